"""What stages did is stored as it was, is read back in the order of time, and damage is told."""

import numpy as np
import pytest
from pydantic import ValidationError

from storage import CorruptObject, InvalidName, JobLayout, StageRecord, write_stages
from storage.stages import read_stages


def record(start, stage="rollout", step=0, **fields):
    return StageRecord(tenant="acme", job="sums", stage=stage, step=step, start=start, end=start + 1.5, **fields)


def test_records_come_back_as_they_were_and_by_start_whoever_wrote_them(store, layout):
    start = 1_790_000_000.123456
    first = [record(start + 3, "update", 1, tokens=700, device_seconds=0.1 + 0.2), record(start, calls=12)]
    second = [record(start + 1, "interact", waited_seconds=1e-9), record(start + 3, "rollout", 2)]
    write_stages(store, layout, "00000000-a", first)
    write_stages(store, layout, "00000001-b", second)
    assert read_stages(store, layout) == [first[1], second[0], second[1], first[0]]


def test_a_job_without_records_has_none_and_others_are_not_read(store, layout):
    write_stages(store, JobLayout("acme", "sums-2"), "x", [record(1.0)])
    write_stages(store, JobLayout("acme", "other"), "x", [record(1.0)])
    assert read_stages(store, layout) == []
    write_stages(store, layout, "none", [])
    assert read_stages(store, layout) == []


def test_writing_under_a_name_again_replaces_so_that_a_retry_counts_once(store, layout):
    for _ in range(2):
        write_stages(store, layout, "00000000-a", [record(1.0), record(2.0)])
    assert read_stages(store, layout) == [record(1.0), record(2.0)]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"records": [{"tenant": "acme"}]}',
        b'{"records": [',
        record(1.0).model_dump_json().encode(),
        b'{"records": [' + record(1.0).model_dump_json().replace('"step":0', '"step":-1').encode() + b"]}",
        b'{"records": [' + record(1.0).model_dump_json().replace("rollout", "lunch").encode() + b"]}",
    ],
)
def test_what_is_not_records_is_told_with_its_place(store, layout, data):
    write_stages(store, layout, "good", [record(1.0)])
    store.put(layout.stage_records("bad"), data)
    with pytest.raises(CorruptObject, match=r"acme/sums/stages/bad\.json does not hold stage records"):
        read_stages(store, layout)


@pytest.mark.parametrize(
    ("change", "field"),
    [({"step": -1}, "step"), ({"tokens": -1}, "tokens"), ({"device_seconds": -0.1}, "device_seconds"),
     ({"calls": 1.5}, "calls"), ({"waited_seconds": -1}, "waited_seconds"), ({"stage": "lunch"}, "stage"),
     ({"reward": 1.0}, "reward")],
)  # fmt: skip
def test_a_record_of_something_impossible_is_refused(change, field):
    whole = {"tenant": "acme", "job": "sums", "stage": "update", "step": 0, "start": 1.0, "end": 2.0}
    with pytest.raises(ValidationError, match=field):
        StageRecord(**(whole | change))


def test_numbers_as_the_stages_count_them_are_taken():
    counted = record(np.float64(1.5), tokens=np.int64(3), calls=np.int32(2), device_seconds=np.float32(0.5))
    assert StageRecord.model_validate_json(counted.model_dump_json()) == counted


@pytest.mark.parametrize("name", ["", "../escape", "a/b", "x" * 300])
def test_a_name_that_is_no_file_name_is_refused(store, layout, name):
    with pytest.raises(InvalidName):
        write_stages(store, layout, name, [record(1.0)])
    assert store.list(layout.root) == []
