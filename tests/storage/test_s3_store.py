"""What only S3 can do wrong: passing failures, lost answers, credentials."""

import traceback
from uuid import uuid4

import pytest

from storage import InvalidName, ObjectExists, ObjectNotFound, StorageError, open_store

SECRET = "in-the-wrong-place"


@pytest.fixture
def quick(monkeypatch):
    """Retries do not wait."""
    monkeypatch.setattr("storage.s3.wait_random_exponential", lambda **_: lambda state: 0)


@pytest.mark.usefixtures("quick")
def test_passing_failures_are_retried(s3, s3_store):
    s3.faults.extend([("PUT", "refuse")] * 3)
    s3_store.put("a", b"x")
    s3.faults.extend([("GET", "refuse")] * 3)
    assert s3_store.get("a") == b"x"
    s3.faults.extend([("GET", "refuse")] * 2)
    assert s3_store.list() == ["a"]
    s3.faults.extend([("HEAD", "refuse")] * 2)
    assert s3_store.exists("a")
    assert not s3.faults


@pytest.mark.usefixtures("quick")
def test_retries_are_bounded_and_nobody_else_retries(s3, s3_store):
    s3.faults.extend([("PUT", "refuse")] * 100)
    with pytest.raises(StorageError, match=r"cannot write s3://artifacts/\w+/a: try again"):
        s3_store.put("a", b"x")
    assert s3.requests == ["PUT"] * 6


@pytest.mark.usefixtures("quick")
def test_a_create_whose_answer_was_lost_is_still_ours(s3, s3_store):
    s3.faults.append(("PUT", "lose"))
    s3_store.create("commit", b"mine")
    assert s3.requests[:2] == ["PUT", "PUT"]
    assert s3_store.get("commit") == b"mine"


@pytest.mark.usefixtures("quick")
def test_a_create_that_was_retried_after_anothers_is_not_ours_even_with_the_same_bytes(s3, s3_store):
    s3_store.create("commit", b"same")
    s3.faults.append(("PUT", "refuse"))
    with pytest.raises(ObjectExists):
        s3_store.create("commit", b"same")


@pytest.mark.usefixtures("quick")
def test_a_server_that_is_not_there_is_named(s3_options):
    store = open_store("s3://artifacts/x", s3_options | {"endpoint_url": "http://127.0.0.1:9"})
    with pytest.raises(StorageError, match=r"cannot read s3://artifacts/x/a: .*127\.0\.0\.1:9") as caught:
        store.get("a")
    assert not isinstance(caught.value, ObjectNotFound)


def test_a_missing_bucket_is_not_an_empty_store(s3_options):
    store = open_store("s3://no-such-bucket/x", s3_options)
    for call in (lambda: store.list(), lambda: store.get("a"), lambda: store.put("a", b"x")):
        with pytest.raises(StorageError, match="the bucket does not exist") as caught:
            call()
        assert not isinstance(caught.value, ObjectNotFound)


def test_credentials_are_never_shown(s3_options):
    store = open_store("s3://no-such-bucket/x", s3_options)
    secret = s3_options["secret"]
    assert secret not in repr(store) + str(store) + store.url("a")
    with pytest.raises(StorageError) as caught:
        store.put("a", b"x")
    assert secret not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("url", "options"),
    [
        (f"s3://key:{SECRET}@bucket/x", {}),
        (f"s3://bucket/x?secret={SECRET}", {}),
        ("s3://bucket/x", {"secret_key": SECRET}),
        ("s3://bucket/x", {"endpoint_url": f"http://key:{SECRET}@127.0.0.1:9"}),
    ],
)
def test_credentials_in_the_wrong_place_are_refused_without_showing_them(url, options):
    with pytest.raises(InvalidName) as caught:
        open_store(url, options)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_more_objects_than_one_page_are_listed_and_deleted(s3, s3_store, monkeypatch):
    keys = [f"many/{i:03d}" for i in range(25)]
    for key in keys:
        s3_store.put(key, b"")
    pages = s3_store._pages
    monkeypatch.setattr(s3_store, "_pages", lambda prefix, **more: pages(prefix, MaxKeys=10, **more))
    s3.requests.clear()
    assert s3_store.list("many") == keys
    assert s3.requests == ["GET"] * 3
    monkeypatch.setattr("storage.s3._MAX_DELETE", 10)
    s3_store.delete("many")
    assert s3_store.list() == []


def test_a_store_at_the_root_of_a_bucket(s3, s3_options):
    bucket = f"root-{uuid4().hex}"
    s3.make_bucket(bucket)
    store = open_store(f"s3://{bucket}", s3_options)
    store.put("a/b", b"x")
    assert store.list() == store.list("a") == ["a/b"]
    assert store.folders() == ["a"]
    assert store.url("a/b") == f"s3://{bucket}/a/b"
