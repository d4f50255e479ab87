"""Kernels for processors, compiled by Numba. Importing the package does not import Numba; its modules do."""

from __future__ import annotations

import hashlib
from pathlib import Path

_HERE = Path(__file__).parent


def forget_stale_code() -> None:
    """Deletes what Numba keeps beside the sources, if any source has changed since.

    Numba compiles a function again when its own file changes, not when a file does whose functions it has inlined.
    """
    sources = b"".join(source.read_bytes() for source in sorted(_HERE.glob("*.py")))
    stamp, now = _HERE / "__pycache__" / "sources", hashlib.sha256(sources).hexdigest()
    if stamp.is_file() and stamp.read_text() == now:
        return
    try:
        stamp.parent.mkdir(exist_ok=True)
        for kept in stamp.parent.glob("*.nb[ic]"):
            kept.unlink(missing_ok=True)
        stamp.write_text(now)
    except OSError:  # not ours to write to: then Numba keeps its code elsewhere, and an installation changes as a whole
        return


forget_stale_code()
