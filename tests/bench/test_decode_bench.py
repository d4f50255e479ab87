"""The decoding benchmark's work and ratios, and our side of it on a tiny model; no figure is asserted."""

import json

import pytest

from bench import decode
from bench.decode import ALONE, HEADLINE, NEW, PROMPT, Cell, Measured, agreement, main, make_work, summary


def test_work_is_dealt_in_turn_and_no_run_repeats_anothers_prompts():
    work = make_work(Cell(5, 2), 1000, seed=0)
    assert work.adapters == [0, 1, 0, 1, 0]
    assert all(len(prompt) == PROMPT and min(prompt) >= 64 and max(prompt) < 1000 for prompt in work.prompts)
    assert work == make_work(Cell(5, 2), 1000, seed=0)
    assert not set(map(tuple, work.prompts)) & set(map(tuple, make_work(Cell(5, 2), 1000, seed=1).prompts))


def test_cells_are_read_and_have_a_row_for_every_adapter():
    assert Cell.of("128x32") == HEADLINE
    with pytest.raises(ValueError, match="2x4: adapters"):
        Cell.of("2x4")


def test_ratios_are_medians_of_the_runs_own_ratios():
    alone = {"step_seconds": [0.02, 0.03, 0.04], "read_seconds": [0.01, 0.01, 0.01]}
    measured = [
        Measured(HEADLINE, "ours", [1.0, 2.0, 4.0]),
        Measured(HEADLINE, "base", [0.5, 1.0, 4.0]),
        Measured(HEADLINE, "peft", [10.0, 10.0, 10.0]),
        Measured(ALONE, "ours", [1.0, 1.0, 1.0], extra=alone),
    ]
    assert summary(measured) == {"ours_over_peft": 5.0, "adapters_over_base": 0.5, "batch1_over_bandwidth": 3.0}


def test_agreement_ends_at_the_first_token_that_differs():
    assert agreement([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 9, 4], [5, 6, 7, 8]]) == 6 / 8


class Peft:
    """A worker that takes longer or shorter in its different ways."""

    def __init__(self, seconds):
        self.seconds, self.asked = seconds, []

    def ask(self, request):
        way = request["mode"], request["dtype"]
        self.asked.append(way)
        return {"seconds": self.seconds[way], "tokens": [[7] * NEW for _ in request["prompts"]]}


def test_peft_is_measured_in_every_way_once_and_then_in_its_fastest():
    seconds = {("mixed", "float32"): 4.0, ("mixed", "bfloat16"): 3.0, ("swapped", "float32"): 5.0}
    peer = Peft(seconds | {("swapped", "bfloat16"): 6.0})
    bench = decode.Bench(None, {}, 1000)
    side = Measured(Cell(4, 2), "peft")
    for run in range(3):
        bench._measure_peer(side, peer, make_work(Cell(4, 2), 1000, run))
    assert len(peer.asked) == 4 + 2
    assert side.runs == [3.0, 3.0, 3.0]
    assert json.loads(side.way) == {"mode": "mixed", "dtype": "bfloat16"}


def test_the_command_measures_our_side_and_writes_its_document(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "decode.json"
    main(
        [
            "--model",
            "tiny-random",
            "--threads",
            "1",
            "--cells",
            "1x1",
            "4x2",
            "--runs",
            "1",
            "--peers",
            "--json",
            str(path),
        ]
    )
    found = json.loads(path.read_text())
    assert found["bench"] == "decode"
    assert found["ratios"].keys() == {"batch1_over_bandwidth"}
    assert [(row["rows"], row["side"]) for row in found["rows"]] == [(1, "ours"), (1, "base"), (4, "ours"), (4, "base")]
