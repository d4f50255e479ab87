"""Which object keys are allowed: those that mean the same thing on S3 and in a folder, and cannot leave the store."""

from __future__ import annotations

import re

from storage.errors import InvalidName

_PART = re.compile(r"[A-Za-z0-9_=+@-][A-Za-z0-9._=+@-]{0,254}")
_MAX_KEY = 900  # of S3's 1024 bytes, so that a store may lie under a prefix


def validate_key(key: str) -> str:
    """Returns `key` as it is; raises InvalidName unless it is parts joined by '/'.

    A part is 1 to 255 of `A-Z a-z 0-9 . _ = + @ -` and does not begin with '.', which also keeps '..' and the
    temporary files of a folder store out.
    """
    if not key or len(key) > _MAX_KEY:
        raise InvalidName(f"key {key!r} has {len(key)} characters; 1 to {_MAX_KEY} are allowed")
    for part in key.split("/"):
        if not _PART.fullmatch(part):
            raise InvalidName(
                f"key {key!r}: part {part!r} is not allowed; a part is 1 to 255 of A-Z, a-z, 0-9, '.', '_', '=', '+', "
                "'@' and '-', and does not begin with '.'"
            )
    return key


def validate_prefix(prefix: str) -> str:
    """A folder of keys: the empty string is the whole store, anything else is a key without a slash at its end."""
    return validate_key(prefix) if prefix else prefix
