"""Stores to test on: a folder, and S3 as moto serves it over HTTP, with faults on demand."""

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from uuid import uuid4

import boto3
import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

from storage import JobLayout, open_store

BUCKET = "artifacts"
SECRET = "wJalrXUtnFEMI-never-shown"
UNAVAILABLE = b"<Error><Code>SlowDown</Code><Message>try again</Message></Error>"


class QuietHandler(WSGIRequestHandler):
    def log_request(self, *args) -> None:
        pass


@dataclass
class FaultyS3:
    """moto as a WSGI application; `faults` are what happens to the next requests of a method.

    "refuse" answers 503 without doing anything; "lose" does the request, then answers 503.
    """

    app: DomainDispatcherApplication = field(default_factory=lambda: DomainDispatcherApplication(create_backend_app))
    faults: deque[tuple[str, str]] = field(default_factory=deque)
    requests: list[str] = field(default_factory=list)
    url: str = ""

    @property
    def options(self) -> dict[str, str]:
        return {"endpoint_url": self.url, "key": "tester", "secret": SECRET}

    def make_bucket(self, name: str) -> None:
        credentials = {"aws_access_key_id": "tester", "aws_secret_access_key": SECRET}
        boto3.client("s3", "us-east-1", endpoint_url=self.url, **credentials).create_bucket(Bucket=name)

    def __call__(self, environ, start_response):
        method = environ["REQUEST_METHOD"]
        self.requests.append(method)
        fault = self.faults.popleft()[1] if self.faults and self.faults[0][0] == method else None
        if fault == "refuse":
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if fault == "lose":
            list(self.app(environ, lambda *args: None))
        if fault is None:
            return self.app(environ, start_response)
        start_response("503 Service Unavailable", [("Content-Length", str(len(UNAVAILABLE)))])
        return [UNAVAILABLE]


@pytest.fixture(scope="session")
def s3_server() -> Iterator[FaultyS3]:
    application = FaultyS3()
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=QuietHandler)
    application.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    application.make_bucket(BUCKET)
    yield application
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def s3(s3_server):
    """The server, without faults left over."""
    s3_server.faults.clear()
    s3_server.requests.clear()
    yield s3_server
    s3_server.faults.clear()


@pytest.fixture
def s3_options(s3):
    return s3.options


@pytest.fixture
def s3_store(s3_options):
    return open_store(f"s3://{BUCKET}/{uuid4().hex}", s3_options)


@pytest.fixture(params=["folder", "s3"])
def store(request, tmp_path):
    return open_store(str(tmp_path / "store")) if request.param == "folder" else request.getfixturevalue("s3_store")


@pytest.fixture
def layout():
    return JobLayout("acme", "sums")
