"""Exceptions of the storage room; their text is fit to show to a user as it is."""


class StorageError(Exception):
    """Base of everything the storage room raises on purpose."""


class InvalidName(StorageError, ValueError):
    """A store URL, option, key, tenant or job name, step or version that is not allowed."""


class InvalidRow(StorageError, ValueError):
    """A row or tensor that breaks the invariants of its artifact; the text names it and the field."""


class ObjectNotFound(StorageError):
    """There is no object under that key."""


class ObjectExists(StorageError):
    """An object that may be written only once is there already."""


class StepAlreadyCommitted(ObjectExists):
    """Another runner of the job has committed this step."""


class CorruptObject(StorageError):
    """The bytes of an object are damaged or incomplete."""


class SchemaMismatch(StorageError):
    """The bytes of an object are sound, but of another kind or schema version than expected."""
