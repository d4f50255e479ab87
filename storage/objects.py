"""The object store: what every store promises, and how a URL becomes one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from storage.errors import InvalidName
from storage.local import FolderStore


class ObjectStore(Protocol):
    """Whole objects under validated keys. Methods block and are safe to call from several threads and processes.

    Every method raises InvalidName for a key that is not allowed (see storage.keys) and StorageError, naming the
    object's URL, when the store cannot do what was asked; transient S3 failures are retried before that.
    """

    def url(self, key: str) -> str:
        """Where the object lies, for people and logs."""

    def put(self, key: str, data: bytes) -> None:
        """Writes or replaces an object. Readers see all of it or nothing; it is durable on return."""

    def create(self, key: str, data: bytes) -> None:
        """As `put`, but raises ObjectExists if the key is taken: of several racing callers exactly one returns."""

    def get(self, key: str) -> bytes:
        """The object's bytes, all of one version of it. Raises ObjectNotFound."""

    def exists(self, key: str) -> bool:
        """Whether there is an object under exactly this key; a folder of objects is not one."""

    def folders(self, prefix: str = "") -> list[str]:
        """Names of the folders directly below the folder `prefix`, sorted; on a local disk they may be empty."""

    def list(self, prefix: str = "") -> list[str]:
        """Keys of all objects below the folder `prefix`, at any depth, sorted; never from a cache."""

    def delete(self, prefix: str) -> None:
        """Deletes the object `prefix` and all objects below it; what is not there is no error."""


def open_store(url: str, options: Mapping[str, Any] | None = None) -> ObjectStore:
    """The store at `url`: a folder (a path or file://), or s3://bucket/prefix. Nothing is read or created yet.

    options: of an S3 store, as s3fs names them (storage.s3.OPTIONS). They are never shown. Raises InvalidName.
    """
    parts = urlsplit(url)
    if parts.scheme == "s3":
        from storage.s3 import S3Store  # its client takes half a second to import

        return S3Store(url, options or {})
    if options:
        raise InvalidName(f"store options {sorted(options)} are for s3:// only; a folder takes none")
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise InvalidName(f"store url {url!r}: a file URL is file:// and an absolute path")
        return FolderStore(Path(unquote(parts.path)))
    if not url or "://" in url:
        raise InvalidName(f"store url of scheme {parts.scheme!r}: a folder, file:// or s3://bucket/prefix is allowed")
    return FolderStore(Path(url))
