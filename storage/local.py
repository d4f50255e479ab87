"""An object store in a local folder, as atomic and durable as its file system allows."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from storage.errors import ObjectExists, ObjectNotFound, StorageError
from storage.keys import validate_key, validate_prefix

# No key has a part that begins with a dot, so no listing shows what a killed writer left.
_TEMPORARY = ".tmp-"
_NOT_THERE = {errno.ENOENT, errno.EISDIR, errno.ENOTDIR}


class FolderStore:
    """storage.objects.ObjectStore over a folder, which is made when the first object is written."""

    def __init__(self, root: Path) -> None:
        self._root = root.expanduser().absolute()

    def __repr__(self) -> str:
        return f"FolderStore({str(self._root)!r})"

    def url(self, key: str) -> str:
        return self._path(key).as_uri()

    def put(self, key: str, data: bytes) -> None:
        path = self._path(key)
        with self._naming("write", path), _written_beside(path, data) as temporary:
            temporary.replace(path)
            _sync_folder(path.parent)

    def create(self, key: str, data: bytes) -> None:
        path = self._path(key)
        with self._naming("create", path), _written_beside(path, data) as temporary:
            try:
                path.hardlink_to(temporary)
            except FileExistsError:
                raise ObjectExists(f"{path.as_uri()} exists already") from None
            _sync_folder(path.parent)

    def get(self, key: str) -> bytes:
        path = self._path(key)
        with self._naming("read", path):
            try:
                return path.read_bytes()
            except OSError as error:
                if error.errno not in _NOT_THERE:
                    raise
                raise ObjectNotFound(f"{path.as_uri()} does not exist") from None

    def exists(self, key: str) -> bool:
        return self._path(key).is_file()

    def folders(self, prefix: str = "") -> list[str]:
        base = self._root / validate_prefix(prefix)
        return sorted(p.name for p in base.iterdir() if p.is_dir()) if base.is_dir() else []

    def list(self, prefix: str = "") -> list[str]:
        base = self._root / validate_prefix(prefix)
        return sorted(
            (Path(folder) / name).relative_to(self._root).as_posix()
            for folder, _, names in os.walk(base)
            for name in names
            if not name.startswith(_TEMPORARY)
        )

    def delete(self, prefix: str) -> None:
        path = self._path(prefix)
        with self._naming("delete", path):
            try:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            except OSError as error:
                if error.errno not in _NOT_THERE:
                    raise

    def _path(self, key: str) -> Path:
        return self._root / validate_key(key)

    @contextmanager
    def _naming(self, action: str, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(f"cannot {action} {path.as_uri()}: {error.strerror or error}") from error


@contextmanager
def _written_beside(path: Path, data: bytes) -> Iterator[Path]:
    """A temporary file in the folder of `path` that holds `data` durably; what is left of it goes at the end."""
    _make_folder(path.parent)
    temporary = path.parent / f"{_TEMPORARY}{uuid4().hex}"
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _make_folder(folder: Path) -> None:
    """mkdir -p that also makes each new folder's entry in its parent durable."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
