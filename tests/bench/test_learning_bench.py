"""The learning benchmark's statistics tell a difference from none, and it runs at a small size."""

import json

import numpy as np
import pytest

from bench.learning import compare, main

ALONE = np.array([0.50, 0.56, 0.61, 0.47, 0.58])
NOISE = np.array([0.002, -0.001, 0.001, -0.002, 0.001])


def test_runs_that_differ_by_noise_are_equivalent():
    found = compare(ALONE, ALONE + NOISE)
    assert found["p_equivalent"] < 0.001
    assert -found["spread"] < found["low"] < found["difference"] < found["high"] < found["spread"]


def test_runs_that_are_the_same_are_equivalent():
    found = compare(ALONE, ALONE)
    assert found["difference"] == found["difference_over_spread"] == 0
    assert found["p_equivalent"] < 1e-9


def test_runs_that_differ_by_more_than_their_spread_are_not_equivalent():
    found = compare(ALONE, ALONE - 3 * ALONE.std(ddof=1) + NOISE)
    assert found["p_equivalent"] > 0.99
    assert found["difference_over_spread"] == pytest.approx(-3, abs=0.05)
    assert found["p_mann_whitney"] < 0.05


def test_five_seeds_that_scatter_too_much_do_not_show_equivalence():
    scatter = np.array([0.2, -0.2, 0.15, -0.1, -0.05])
    assert compare(ALONE, ALONE + scatter)["p_equivalent"] > 0.05


@pytest.mark.slow
def test_the_command_trains_alone_and_among_others_and_writes_the_curves(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "learning.json"
    main(["--seeds", "2", "--steps", "3", "--tenants", "4", "--json", str(path)])
    found = json.loads(path.read_text())
    curves = [row for row in found["rows"] if row["what"] == "curve"]
    assert {(row["max_staleness"], row["seed"]) for row in curves} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert all(len(row["alone"]) == len(row["among"]) == 3 for row in curves)
    assert {"learning_area_difference_over_spread", "learning_final_difference_over_spread"} <= found["ratios"].keys()
    # The first step is sampled by the fresh adapter: among others it is the same but for rounding.
    assert all(row["alone"][0] == pytest.approx(row["among"][0], abs=0.02) for row in curves)
    assert "max_staleness 0" in capsys.readouterr().out
