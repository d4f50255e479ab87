import pytest

from storage import (
    InvalidName,
    ObjectExists,
    ObjectNotFound,
    delete_adapter,
    list_adapters,
    read_adapter,
    write_adapter,
)

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights", "README.md": b"# Adapter"}
BARE = {name: FILES[name] for name in ("adapter_config.json", "adapter_model.safetensors")}


def test_a_version_reads_back_as_it_was_written(store, layout):
    write_adapter(store, layout, 0, BARE)
    write_adapter(store, layout, 12, FILES)
    assert read_adapter(store, layout, 0) == BARE
    assert read_adapter(store, layout, 12) == FILES
    assert list_adapters(store, layout) == [0, 12]


def test_the_same_bytes_may_be_written_again_and_others_may_not(store, layout):
    write_adapter(store, layout, 1, BARE)
    write_adapter(store, layout, 1, BARE)
    for name in BARE:
        with pytest.raises(ObjectExists, match=rf"acme/sums/v1 is immutable.*{name}"):
            write_adapter(store, layout, 1, BARE | {name: b"other"})
    assert read_adapter(store, layout, 1) == BARE


def test_a_version_whose_writer_died_does_not_exist_until_it_is_completed(store, layout):
    store.put(f"{layout.adapter(1)}/adapter_model.safetensors", BARE["adapter_model.safetensors"])
    assert list_adapters(store, layout) == []
    with pytest.raises(ObjectNotFound, match="acme/sums/v1"):
        read_adapter(store, layout, 1)
    write_adapter(store, layout, 1, BARE)
    assert list_adapters(store, layout) == [1]
    assert read_adapter(store, layout, 1) == BARE


def test_the_configuration_is_written_last(store, layout, monkeypatch):
    written = []
    create = store.create
    monkeypatch.setattr(store, "create", lambda key, data: (written.append(key.rsplit("/")[-1]), create(key, data)))
    write_adapter(store, layout, 1, FILES)
    assert set(written) == set(FILES)
    assert written[-1] == "adapter_config.json"


@pytest.mark.parametrize(
    "files",
    [{}, {"adapter_config.json": b"{}"}, FILES | {"model.bin": b""}, FILES | {"../x": b""}],
    ids=["none", "no-weights", "extra", "traversal"],
)
def test_other_files_than_a_peft_folder_has_are_refused(store, layout, files):
    with pytest.raises(InvalidName, match="adapter files"):
        write_adapter(store, layout, 1, files)
    assert store.list() == []


def test_a_deleted_version_is_gone_and_the_others_stay(store, layout):
    for n in (1, 10):
        write_adapter(store, layout, n, BARE)
    delete_adapter(store, layout, 1)
    delete_adapter(store, layout, 1)
    assert list_adapters(store, layout) == [10]
    assert store.list(layout.adapter(1)) == []
