import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from storage import InvalidName, ObjectExists, ObjectNotFound, StorageError, open_store

BAD_KEYS = [
    "",
    "/etc/passwd",
    "..",
    "../outside",
    "a/../../outside",
    "a/./b",
    "a//b",
    "a/",
    "a\\b",
    "a b",
    "a\x00b",
    "a\nb",
    "é",
    ".tmp-1",
    "a/.hidden",
    "x" * 256,
    "/".join(["x" * 200] * 5),
]


def race(count, act):
    """Runs act(i) in `count` threads that start together; what each returned or raised."""
    barrier, results = threading.Barrier(count), [None] * count

    def run(i):
        barrier.wait(timeout=10)
        try:
            results[i] = act(i)
        except StorageError as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return results


@pytest.mark.parametrize("data", [b"", b"hello", os.urandom(3_000_000)], ids=["empty", "small", "large"])
def test_an_object_reads_back_as_it_was_written(store, data):
    store.put("a/b/object.bin", data)
    assert store.get("a/b/object.bin") == data
    assert store.exists("a/b/object.bin")


def test_put_replaces_an_object(store):
    store.put("a", b"first, and longer")
    store.put("a", b"second")
    assert store.get("a") == b"second"


def test_reading_a_missing_object_names_its_url(store):
    with pytest.raises(ObjectNotFound) as caught:
        store.get("no/such-object")
    assert store.url("no/such-object") in str(caught.value)
    assert store.url("no/such-object").endswith("/no/such-object")


def test_a_folder_of_objects_is_not_an_object(store):
    store.put("folder/object", b"x")
    assert not store.exists("folder")
    with pytest.raises(ObjectNotFound):
        store.get("folder")


def test_create_refuses_a_taken_key_even_for_the_same_bytes(store):
    store.create("a/commit", b"first")
    for data in (b"first", b"second"):
        with pytest.raises(ObjectExists) as caught:
            store.create("a/commit", data)
        assert store.url("a/commit") in str(caught.value)
    assert store.get("a/commit") == b"first"


@pytest.mark.parametrize("same", [True, False], ids=["same-bytes", "other-bytes"])
def test_of_eight_threads_racing_to_create_exactly_one_wins(store, same):
    for round_ in range(5):
        contents = [b"same" if same else f"writer {i}".encode() for i in range(8)]
        results = race(8, lambda i: store.create(f"race/{round_}", contents[i]))  # noqa: B023 - joined in the loop
        winners = [i for i, result in enumerate(results) if result is None]
        assert len(winners) == 1
        assert sum(isinstance(r, ObjectExists) for r in results) == 7
        assert store.get(f"race/{round_}") == contents[winners[0]]


def test_a_reader_never_sees_a_mixture_of_two_writes(store):
    size, stop, seen = 200_000, threading.Event(), set()
    store.put("replaced", b"0" * size)

    def write():
        for i in range(20):
            store.put("replaced", str(i % 10).encode() * size)
        stop.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not stop.is_set():
        data = store.get("replaced")
        assert len(data) == size
        assert len(set(data)) == 1
        seen.add(data[:1])
    writer.join()
    assert seen


def test_list_is_recursive_sorted_and_keeps_to_its_folder(store):
    for key in ("a/2", "a/10/x", "a/1", "ab/3", "b", "a-b/4"):
        store.put(key, b"")
    assert store.list("a") == ["a/1", "a/10/x", "a/2"]
    assert store.list() == ["a-b/4", "a/1", "a/10/x", "a/2", "ab/3", "b"]
    assert store.list("b") == []
    assert store.list("nothing/here") == []
    assert store.folders() == ["a", "a-b", "ab"]
    assert store.folders("a") == ["10"]
    assert store.folders("nothing") == []


def test_list_is_never_stale(store, s3_options):
    root = store.url("x").removesuffix("/x")
    # Another option, so that it is a client of its own.
    other = open_store(root, s3_options | {"use_ssl": False} if root.startswith("s3:") else None)
    assert store.list("steps") == []
    for i in range(3):
        other.put(f"steps/{i}", b"")
        assert store.list("steps") == [f"steps/{j}" for j in range(i + 1)]
        assert store.exists(f"steps/{i}")
    other.delete("steps/1")
    assert store.list("steps") == ["steps/0", "steps/2"]
    assert not store.exists("steps/1")


def test_delete_takes_an_object_or_all_below_a_folder_and_may_be_repeated(store):
    for key in ("a/1", "a/b/2", "ab/3", "c"):
        store.put(key, b"x")
    for prefix in ("a", "c", "never-there"):
        store.delete(prefix)
        store.delete(prefix)
    assert store.list() == ["ab/3"]
    store.put("a/1", b"again")
    assert store.get("a/1") == b"again"


@pytest.mark.parametrize("key", BAD_KEYS)
def test_keys_that_could_leave_the_store_or_differ_between_stores_are_refused(store, key):
    for call in (store.get, store.exists, store.url, store.delete, lambda k: store.put(k, b"")):
        with pytest.raises(InvalidName):
            call(key)
    with pytest.raises(InvalidName):
        store.create(key, b"")
    if key:
        with pytest.raises(InvalidName):
            store.list(key)
    assert store.list() == []


def test_the_whole_store_cannot_be_deleted_by_an_empty_prefix(store):
    store.put("a", b"x")
    with pytest.raises(InvalidName):
        store.delete("")
    assert store.exists("a")


@pytest.mark.parametrize(("method", "step"), [("put", "replace"), ("create", "link")])
def test_a_writer_killed_before_its_object_has_a_name_leaves_nothing_visible(tmp_path, method, step):
    program = f"""
        import os, signal
        from storage.local import FolderStore
        from pathlib import Path
        os.{step} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        FolderStore(Path({str(tmp_path)!r})).{method}("steps/1", b"x" * 100_000)
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=environment, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [path.name[:5] for path in (tmp_path / "steps").iterdir()] == [".tmp-"]  # killed after writing its file
    store = open_store(str(tmp_path))
    assert store.list() == []
    assert not store.exists("steps/1")
    store.create("steps/1", b"next runner")
    assert store.get("steps/1") == b"next runner"


def test_a_folder_store_leaves_no_temporary_file(tmp_path):
    store = open_store(str(tmp_path))
    store.put("a/1", b"x")
    store.create("a/2", b"x")
    with pytest.raises(ObjectExists):
        store.create("a/2", b"x")
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["1", "2"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "a").write_bytes(b"a file where a folder is needed")
    with pytest.raises(StorageError, match=r"cannot write file://.*/a/b"):
        open_store(str(tmp_path)).put("a/b", b"x")


def test_a_path_and_a_file_url_are_the_same_store(tmp_path):
    folder = tmp_path / "with space"
    open_store(str(folder)).put("a", b"x")
    assert open_store(folder.as_uri()).get("a") == b"x"


@pytest.mark.parametrize(
    "url", ["", "gs://bucket/x", "file://host/x", "s3://", "s3://bucket/../x", "s3://b/x", "s3://bucket/a//b"]
)
def test_urls_of_no_store_are_refused(url):
    with pytest.raises(InvalidName):
        open_store(url)


def test_a_folder_takes_no_options(tmp_path):
    with pytest.raises(InvalidName, match="key"):
        open_store(str(tmp_path), {"key": "x"})
