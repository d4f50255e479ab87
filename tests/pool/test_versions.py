"""Versions are dropped when nobody needs them: not before, not twice, whoever asks from whichever thread."""

import sys
import threading
from collections import Counter

import numpy as np
import pytest

from marlaas.errors import JobNotOpen
from marlaas.pool.versions import Versions


def test_jobs_of_one_tenant_have_versions_of_their_own():
    versions = Versions()
    versions.publish("a/x", 0)
    versions.publish("a/y", 4)
    assert (versions.hold("a/x").name, versions.hold("a/y").name) == ("a/x/v0", "a/y/v4")
    assert versions.hold("a/y").version == 4
    assert versions.close("a/x") == []
    assert versions.alive() == ["a/y/v4", "a/x/v0"]
    with pytest.raises(JobNotOpen, match="a/x is not open in this pool"):
        versions.hold("a/x")
    assert versions.close("never/opened") == []


def test_a_version_held_by_its_name_lives_until_the_last_one_lets_go():
    versions = Versions()
    assert versions.hold_named("a/x/v3")
    assert not versions.hold_named("a/x/v3"), "somebody has it already"
    assert versions.release("a/x/v3") == []
    assert versions.release("a/x/v3") == ["a/x/v3"]
    assert versions.hold_named("a/x/v3"), "it was dropped, so it must be loaded again"


def test_the_newest_version_of_a_job_is_not_loaded_again_and_outlives_those_who_hold_it_by_name():
    versions = Versions()
    versions.publish("a/x", 3)
    assert not versions.hold_named("a/x/v3")
    assert versions.release("a/x/v3") == []
    assert versions.publish("a/x", 4) == ["a/x/v3"]


def test_publishing_the_version_that_is_the_newest_already_drops_nothing():
    versions = Versions()
    versions.publish("a/x", 0)
    assert versions.publish("a/x", 0) == []
    assert versions.alive() == ["a/x/v0"]


@pytest.fixture
def hasty_threads():
    """Threads change places as often as the interpreter lets them."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("hasty_threads")
@pytest.mark.parametrize("seed", range(3))
def test_among_many_threads_each_version_is_dropped_once_and_never_while_it_is_held(seed):
    versions, dropped, wrong, start = Versions(), Counter(), [], threading.Barrier(5)
    versions.publish("a/x", 0)

    def publish():
        start.wait()
        for version in range(1, 1000):
            dropped.update(versions.publish("a/x", version))

    def hold(number):
        rng = np.random.default_rng([seed, number])
        held = []
        start.wait()
        for _ in range(1000):
            if held and rng.random() < 0.5:
                name = held.pop(rng.integers(len(held)))
                if dropped[name]:
                    wrong.append(name)
                dropped.update(versions.release(name))
            else:
                held.append(versions.hold("a/x").name)
        for name in held:
            dropped.update(versions.release(name))

    threads = [threading.Thread(target=publish), *(threading.Thread(target=hold, args=(n,)) for n in range(4))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert versions.alive() == ["a/x/v999"]
    assert dropped == Counter(f"a/x/v{n}" for n in range(999))
