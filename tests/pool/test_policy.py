"""What the device does next, and which versions are needed."""

import pytest

from marlaas.errors import JobNotOpen
from marlaas.pool.policy import DeviceLoad, should_train
from marlaas.pool.versions import Versions


def load(**fields):
    usual = {
        "waiting": 1, "open_jobs": 4, "oldest_seconds": 0.0, "under_way": 0, "sampling": True, "lead_seconds": 0.0,
        "usual_seconds": 1.0,
    }  # fmt: skip
    return DeviceLoad(**usual | fields)


@pytest.mark.parametrize(
    ("fields", "trains"),
    [
        ({"waiting": 0}, False),
        ({}, False),
        ({"oldest_seconds": 0.06}, True),
        ({"waiting": 4}, True),
        ({"sampling": False}, True),
        ({"under_way": 1, "waiting": 0}, True),
        ({"under_way": 1, "lead_seconds": 1.9}, True),
        ({"under_way": 1, "lead_seconds": 2.1}, False),
        ({"oldest_seconds": 9.0, "lead_seconds": 2.1}, False),
        ({"sampling": False, "lead_seconds": 99.0}, True),
        ({"under_way": 1, "lead_seconds": 99.0, "usual_seconds": 0.0}, True),
    ],
)
def test_updates_go_first_but_for_whom_has_had_the_device_for_long(fields, trains):
    assert should_train(load(**fields), 0.05) is trains


def test_a_version_is_needed_while_it_is_the_newest_or_held():
    versions = Versions()
    assert versions.publish("a/j", 0) == []
    first, again = versions.hold("a/j"), versions.hold("a/j")
    assert versions.publish("a/j", 1) == []
    assert versions.release(first.name) == []
    assert sorted(versions.alive()) == ["a/j/v0", "a/j/v1"]
    assert versions.release(again.name) == ["a/j/v0"]
    assert versions.publish("a/j", 2) == ["a/j/v1"]
    held = versions.hold("a/j")
    assert versions.close("a/j") == []
    with pytest.raises(JobNotOpen, match="a/j is not open"):
        versions.hold("a/j")
    assert versions.release(held.name) == ["a/j/v2"]
    assert versions.alive() == []
