"""The training benchmark's work and ratios, and our side of it on a tiny model; no figure is asserted."""

import json

import numpy as np
import pytest

from bench.train_step import GROUP, NEW, PROMPT, Measured, main, make_step, summary, trl_job, trl_name
from bench.train_worker import batches


def test_a_step_has_groups_that_learn_something():
    step = make_step(16, 1000, seed=0)
    assert [len(prompt) for prompt in step["prompts"]] == [PROMPT, PROMPT]
    assert [len(own) for own in step["completions"]] == [NEW] * 16
    assert sum(step["rewards"][:GROUP]) == GROUP / 2
    assert step != make_step(16, 1000, seed=1)


def test_our_side_deals_the_groups_to_the_jobs_in_order():
    step = make_step(32, 1000, seed=0)
    first, second = batches({"jobs": 2, **step}, 1000)
    assert (first.job, second.job) == ("t0/bench", "t1/bench")
    assert len(first.samples) == len(second.samples) == 16
    sample = second.samples[9]
    assert sample.group == "3"
    assert sample.tokens.tolist() == step["prompts"][3] + step["completions"][25]
    assert sample.mask.tolist() == [False] * PROMPT + [True] * NEW
    assert np.unique(sample.logprobs[sample.mask]) == pytest.approx([-np.log(1000)])
    for batch in (first, second):
        batch.check(1000, 1000)


def test_ratios_are_against_the_faster_of_trls_ways_and_memory_against_both():
    whole, passes = trl_name(64), trl_name(8)
    measured = [
        Measured("ours", 256, 1, [10.0, 20.0, 10.0]),
        Measured("ours", 256, 32, [11.0, 21.0, 12.0]),
        Measured(f"ours beside {whole}", 64, 1, [2.0, 2.0, 2.0], 300),
        Measured(whole, 64, 1, [9.0, 8.0, 10.0], 1200),
        Measured(f"ours beside {passes}", 64, 1, [2.0, 4.0, 2.0], 300),
        Measured(passes, 64, 1, [6.0, 8.0, 8.0], 600),
    ]
    assert summary(measured) == {
        "mixed_over_single": 1.1,
        "ours_over_peft": 3.0,
        "peak_memory_over_peft": 0.25,
        "peak_memory_over_peft_in_passes": 0.5,
    }
    assert summary([]) == {}


def test_the_job_of_trl_names_a_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    job = trl_job("tiny-random", 1, 64, 8)
    assert job["model"].startswith(str(tmp_path))
    assert job["samples"] % job["microbatch"] == 0


def test_the_command_measures_our_side_and_writes_its_document(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "train_step.json"
    sizes = ["--adapters", "2", "--samples", "--runs", "1"]
    main(["--model", "tiny-random", "--threads", "1", *sizes, "--json", str(path)])
    found = json.loads(path.read_text())
    assert found["ratios"].keys() == {"mixed_over_single"}
    assert [(row["samples"], row["adapters"]) for row in found["rows"]] == [(16, 1), (16, 2)]
