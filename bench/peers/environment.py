"""Python environments of their own for the peers that a benchmark compares with, made once under `.bench/`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / ".bench"
CONSTRAINTS = ROOT / "constraints.txt"
MARKER = "installed.txt"


def peer_python(name: str, requirements: list[str], without: Sequence[str] = ()) -> Path:
    """The Python of the environment `.bench/NAME`, made at the first call and again when what it should hold changes.

    `requirements` are lines as pip takes them; the packages `without` are removed after the installation, whoever asked
    for them. torch is the one of constraints.txt, whatever the peer asks for. Raises subprocess.CalledProcessError when
    an installation fails; pip has said why on standard error.
    """
    folder = ENVIRONMENTS / name
    python = folder / "bin" / "python"
    marker = folder / MARKER
    torch = pinned_torch()
    installed = "\n".join([torch, *requirements, *(f"without {package}" for package in without)]) + "\n"
    if marker.is_file() and marker.read_text() == installed:
        return python
    print(f"making the environment of {name} in {folder}", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write(torch + "\n")
        constraints.flush()
        # In a call of its own: resolved together with packages that ask for any torch, pip may take a CUDA build.
        subprocess.run([*install, torch], check=True)
        subprocess.run([*install, "-c", constraints.name, *requirements], check=True)
    if without:
        subprocess.run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *without], check=True)
    marker.write_text(installed)
    return python


def pinned_torch() -> str:
    """The line of constraints.txt that pins torch."""
    return next(line for line in read_requirements(CONSTRAINTS) if line.startswith("torch=="))


def read_requirements(path: Path) -> list[str]:
    """The lines of a requirements file without comments and blank lines."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]
