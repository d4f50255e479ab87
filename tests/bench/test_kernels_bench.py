"""The kernels' benchmark: both sides compute the same, and the counts are right; no figure is asserted."""

import json

import pytest
import torch

from bench import kernels
from bench.kernels import Ceilings, Lora, Measured, main, segments_of, summary, vocabulary_ways


def test_tokens_are_dealt_to_the_adapters_as_equally_as_they_can_be():
    assert segments_of(7, 3) == [(0, 2), (2, 4), (4, 7)]
    assert segments_of(2, 2) == [(0, 1), (1, 2)]


@pytest.mark.parametrize("threads", [1, 2])
def test_both_sides_add_the_same_deltas(tiny, monkeypatch, threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    lora = Lora(tiny, rank=4, adapters=3)
    sizes = {(site.inputs, site.weight.shape[0]) for site in tiny.transformer.sites}
    inputs = {(i, o): torch.randn(19, i) for i, o in sizes}
    outputs = []
    for way in (lora.kernel, lora.torch):
        data = {(i, o): (inputs[i, o], torch.zeros(19, o)) for i, o in sizes}
        way(19, 3, data)()
        outputs.append(data)
    for size in sizes:
        ours, by_torch = (data[size][1] for data in outputs)
        torch.testing.assert_close(ours, by_torch)
        assert (ours != 0).any()


def test_bytes_and_operations_are_counted(tiny):
    lora = Lora(tiny, rank=4, adapters=3)
    kernel, of_torch = (measured for measured, _ in lora.ways(6, 2))
    assert kernel.operations == of_torch.operations == 2 * 6 * 4 * 2 * 1024  # tokens, rank, layers, a layer's widths
    row = Measured("lora", "kernel", 6, torch.float32, 10**9, 10**10, 4, 2, [0.5]).row(
        Ceilings(4e9, {torch.float32: 1e11})
    )
    assert row["of_bandwidth"] == pytest.approx(0.5)
    assert row["of_arithmetic"] == pytest.approx(0.2)


@pytest.mark.parametrize("what", ["draw", "logprobs", "gradient"])
def test_the_vocabularys_kernels_and_definitions_are_told_apart(what):
    (kernel, ours), (of_torch, definition) = vocabulary_ways(what, 3, 500)
    assert (kernel.side, of_torch.side) == ("kernel", "torch")
    results = [work()() for work in (ours, definition)]
    if what == "gradient":
        torch.testing.assert_close(*results, rtol=0.02, atol=1e-4)
    else:
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other)


def test_ratios_are_medians_of_speeds():
    sides = [("kernel", [1.0, 2.0, 1.0]), ("torch", [3.0, 8.0, 2.0])]
    measured = [Measured("draw", side, 128, torch.bfloat16, 1, runs=runs) for side, runs in sides]
    assert summary(measured) == {"draw_over_torch": 3.0}
    assert summary(measured[:1]) == {}


def test_the_command_writes_its_document(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(kernels, "ENOUGH_SECONDS", 1e-9)
    path = tmp_path / "kernels.json"
    main(["--quick", "--model", "tiny-random", "--threads", "1", "--tokens", "2", "--runs", "1", "--json", str(path)])
    found = json.loads(path.read_text())
    assert {(row["what"], row["side"]) for row in found["rows"]} == {
        (what, side) for what in ("lora", "draw", "logprobs", "gradient") for side in ("kernel", "torch")
    }
    assert found["ceilings"]["gigabytes_per_second"] > 0
