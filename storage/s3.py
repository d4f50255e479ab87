"""An object store in an S3 bucket, through s3fs, with one retry policy and no cache."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from botocore.exceptions import BotoCoreError  # type: ignore[import-untyped]
from s3fs import S3FileSystem
from s3fs.core import S3_RETRYABLE_ERRORS
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from storage.errors import InvalidName, ObjectExists, ObjectNotFound, StorageError
from storage.keys import validate_key, validate_prefix

OPTIONS = frozenset(
    {"anon", "client_kwargs", "config_kwargs", "endpoint_url", "key", "profile", "secret", "token", "use_ssl"}
    | {"s3_additional_kwargs"}
)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_MAX_PUT = 5 * 2**30  # bytes: S3's limit for one PUT
_MAX_DELETE = 1000  # keys: S3's limit for one DeleteObjects
_ATTEMPTS = 6
_CONFLICT = "ConditionalRequestConflict"  # S3 asks for another try: two conditional writes met
_TRANSIENT_CODES = {_CONFLICT, "OperationAborted", "RequestTimeout", "SlowDown", "Throttling", "ThrottlingException"}
_FAILURES = (OSError, BotoCoreError, *S3_RETRYABLE_ERRORS)


class _TryOnce(S3FileSystem):
    """s3fs without its own retries. fsspec shares it among a thread's stores of equal options: a client takes 0.4 s."""

    retries = 1


class S3Store:
    """storage.objects.ObjectStore over s3://bucket/prefix. The bucket must exist."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._bucket, self._prefix = _split_url(url)
        _check_options(options)
        # One retry policy, ours: botocore and s3fs are told to try once. A checkpoint can take long to upload.
        config = {"retries": {"total_max_attempts": 1}, "read_timeout": 60} | dict(options.get("config_kwargs") or {})
        arguments = dict(options) | {"config_kwargs": config}
        self._fs = _TryOnce(**arguments, use_listings_cache=False)

    def __repr__(self) -> str:
        return f"S3Store('s3://{self._bucket}/{self._prefix}')"

    def url(self, key: str) -> str:
        return f"s3://{self._bucket}/{self._name(key)}"

    def put(self, key: str, data: bytes) -> None:
        self._write(key, data)

    def create(self, key: str, data: bytes) -> None:
        # An answer can be lost after S3 has stored the object; the next attempt then meets our own object. The
        # writer's token in its metadata tells it from another writer's, even one with the same bytes.
        writer = uuid4().hex
        try:
            self._write(key, data, mode="create", Metadata={"writer": writer})
        except ObjectExists:
            if self._head(key).get("Metadata", {}).get("writer") != writer:
                raise

    def get(self, key: str) -> bytes:
        # One GET: parallel ranges could mix two versions of an object that is replaced meanwhile.
        return self._run("read", self.url(key), self._fs.cat_file, self._at(key), max_concurrency=1)

    def exists(self, key: str) -> bool:
        return bool(self._head(key))

    def folders(self, prefix: str = "") -> list[str]:
        start = len(self._folder(prefix))
        pages = self._pages(prefix, Delimiter="/")
        return sorted(entry["Prefix"][start:-1] for page in pages for entry in page.get("CommonPrefixes", []))

    def list(self, prefix: str = "") -> list[str]:
        start = len(self._folder(""))
        return sorted(
            entry["Key"][start:]
            for page in self._pages(prefix)
            for entry in page.get("Contents", [])
            if not entry["Key"].endswith("/")  # some tools keep empty objects to show folders
        )

    def delete(self, prefix: str) -> None:
        keys = [validate_key(prefix), *self.list(prefix)]
        for i in range(0, len(keys), _MAX_DELETE):
            objects = [{"Key": self._name(key)} for key in keys[i : i + _MAX_DELETE]]
            request = {"Objects": objects, "Quiet": True}
            answer = self._call("delete", self.url(prefix), "delete_objects", Delete=request)
            for error in answer.get("Errors", []):
                raise StorageError(f"cannot delete s3://{self._bucket}/{error['Key']}: {error.get('Message')}")

    def _write(self, key: str, data: bytes, **arguments: Any) -> None:
        if len(data) > _MAX_PUT:
            raise StorageError(f"cannot write {self.url(key)}: {len(data)} bytes; one PUT takes {_MAX_PUT}")
        # s3fs sends one PUT below twice its chunk size.
        self._run("write", self.url(key), self._fs.pipe_file, self._at(key), data, chunksize=_MAX_PUT, **arguments)

    def _head(self, key: str) -> dict[str, Any]:
        """The object's HEAD; empty if there is no such object."""
        try:
            return self._call("look up", self.url(key), "head_object", Key=self._name(key))
        except ObjectNotFound:
            return {}

    def _pages(self, prefix: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        folder = self._folder(prefix)
        url = f"s3://{self._bucket}/{folder}"
        while True:
            page = self._call("list", url, "list_objects_v2", Prefix=folder, **arguments)
            yield page
            if not page.get("IsTruncated"):
                return
            arguments["ContinuationToken"] = page["NextContinuationToken"]

    def _call(self, action: str, url: str, method: str, **arguments: Any) -> dict[str, Any]:
        return self._run(action, url, self._fs.call_s3, method, Bucket=self._bucket, **arguments)

    def _run(self, action: str, url: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """call(...), again while it fails for a passing reason; failures become ours and name the URL."""
        retrying = Retrying(
            stop=stop_after_attempt(_ATTEMPTS),
            wait=wait_random_exponential(multiplier=0.1, max=5),
            retry=retry_if_exception(_is_transient),
            reraise=True,
        )
        try:
            return retrying(call, *arguments, **named)
        except _FAILURES as error:
            raise _translated(action, url, error) from error

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{validate_key(key)}" if self._prefix else validate_key(key)

    def _at(self, key: str) -> str:
        return f"{self._bucket}/{self._name(key)}"

    def _folder(self, prefix: str) -> str:
        """The S3 key prefix of everything below a folder: empty, or ends in a slash."""
        return "".join(f"{part}/" for part in (self._prefix, validate_prefix(prefix)) if part)


def _split_url(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query or parts.fragment:
        # The URL may hold a secret, so it isn't shown.
        raise InvalidName("store url: s3://bucket/prefix and nothing else is allowed; credentials go in the options")
    if not _BUCKET.fullmatch(parts.netloc):
        raise InvalidName(f"store url {url!r}: {parts.netloc!r} is not a bucket name")
    return parts.netloc, validate_prefix(parts.path.strip("/"))


def _check_options(options: Mapping[str, Any]) -> None:
    unknown = sorted(set(options) - OPTIONS)
    if unknown:
        raise InvalidName(f"store options {unknown} are not known; allowed: {', '.join(sorted(OPTIONS))}")
    if "@" in str(options.get("endpoint_url") or ""):
        raise InvalidName("store option endpoint_url: credentials go in key and secret")


def _answer(error: BaseException) -> tuple[str, int]:
    """S3's error code and HTTP status, from the client error that s3fs translated; ("", 0) if S3 didn't answer."""
    response = getattr(error.__cause__, "response", None) or {}
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return str(response.get("Error", {}).get("Code", "")), int(status)


def _is_transient(error: BaseException) -> bool:
    code, status = _answer(error)
    return isinstance(error, S3_RETRYABLE_ERRORS) or code in _TRANSIENT_CODES or status >= 500


def _translated(action: str, url: str, error: BaseException) -> StorageError:
    code, status = _answer(error)
    if code == "NoSuchBucket":
        return StorageError(f"cannot {action} {url}: the bucket does not exist")
    if status == 404:
        return ObjectNotFound(f"{url} does not exist")
    if status == 412:
        return ObjectExists(f"{url} exists already")
    return StorageError(f"cannot {action} {url}: {getattr(error, 'strerror', None) or error or type(error).__name__}")
