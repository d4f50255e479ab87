"""The isolation benchmark runs at a small size and reports what it should; no figure of it is asserted."""

import json

import pytest

from bench import isolation
from bench.isolation import Settings, by_weight, jain, main, measure_disturbances, measure_memory
from marlaas.errors import MarlaasError
from marlaas.specs import ModelSpec


@pytest.fixture
def settings(model_cache):
    model = ModelSpec(source="tiny-random", dtype="float32", device="cpu", cache=model_cache)
    return Settings(model, threads=1, warmup=1.0, window=2.0, repeats=1, memory_steps=20, places=0.5)


def test_shares_are_fair_when_they_are_as_the_weights():
    assert jain([3.0, 3.0, 3.0]) == pytest.approx(1)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert by_weight([10, 20, 40], [1, 2, 4]) == pytest.approx([1, 1, 1])
    assert by_weight([30, 10], [1, 1]) == pytest.approx([1.5, 0.5])


async def test_a_disturbance_is_measured_against_a_run_of_equals(settings, monkeypatch):
    monkeypatch.setattr(isolation, "DISTURBANCES", {"nan": isolation.DISTURBANCES["nan"]})
    (row,), ratios = await measure_disturbances(settings)
    assert ratios.keys() == {"others_under_nan", "jain_equal"}
    assert ratios["others_under_nan"] == row["tokens"] > 0
    assert row["disturber_failures"] > 0
    assert row["others_failures"] == 0
    assert 0 < row["fair_busy"] <= 1.01


async def test_a_window_in_which_nothing_ended_is_refused(settings, monkeypatch):
    monkeypatch.setattr(isolation, "DISTURBANCES", {"nan": isolation.DISTURBANCES["nan"]})
    short = Settings(**{**vars(settings), "warmup": 0.0, "window": 0.01})
    with pytest.raises(MarlaasError, match="--window"):
        await measure_disturbances(short)


@pytest.mark.slow
async def test_memory_is_sampled_with_conversations_that_are_split_and_nothing_is_left(settings):
    (row,), ratios = await measure_memory(settings)
    assert [step for step, _ in row["rss_mb"]] == [10, 20]
    assert row["split_conversations"] > 0
    assert row["adapters_left"] == row["parked_left"] == 0
    assert ratios == {"rss_growth_mb_per_100_steps": row["slope_mb_per_100_steps"]}


def test_the_command_writes_its_document_and_says_what_holds(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "isolation.json"
    sizes = ["--repeats", "1", "--warmup", "1", "--window", "1.5"]
    main(["--quick", "--only", "weights", "scheduling", *sizes, "--json", str(path)])
    found = json.loads(path.read_text())
    assert found["bench"] == "isolation"
    assert found["ratios"].keys() == {"jain_weighted", "weights_largest_deviation", "scheduling_share"}
    assert {row["what"] for row in found["rows"]} == {"weights_of_3", "weights_of_8", "scheduling"}
    assert "scheduling_share" in capsys.readouterr().out
