"""Measures a device's service curves, for `bench/simulate.py`.

python -m bench.curves --out bench/curves/NAME.json [--model FOLDER] [--threads N] [--host-seconds S]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from bench.common import machine, median
from bench.model import small_model
from bench.simulation.curves import ServiceCurves
from marlaas.devices import reuse_freed_memory
from marlaas.lora import AdapterBank, AdapterLayout, AdapterShape, PagedAdapters
from marlaas.models import BaseModel, load_base_model
from marlaas.sampling.native import NativeSampler
from marlaas.sampling.protocol import Decoding, SamplingRequest
from marlaas.specs import TARGETS, ModelSpec, TenantSpec
from marlaas.training.batch import TrainingBatch, TrainingSample
from marlaas.training.trainer import Trainer

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ADAPTERS = (1, 2, 4, 8, 16, 32)
STEPS = 12
RANK = 8
PROMPT, CONVERSATION = 64, 224  # tokens: of a prompt, and of a whole conversation of the tool workload
SHAPE = AdapterShape(RANK, 16.0, TARGETS)


class Curves:
    """Times passes of one base model on one device."""

    def __init__(self, base: BaseModel) -> None:
        self.base = base
        self.layout = AdapterLayout(base.transformer, SHAPE)
        t = base.transformer
        self.adapters = PagedAdapters(AdapterBank(max(ADAPTERS), self.layout.size, t.dtype, t.device))
        for i in range(max(ADAPTERS)):
            self.adapters.add(f"t{i}/j/v0", self.layout, torch.randn(self.layout.size) * 0.01)

    def decode(self, rows: int, adapters: int) -> float:
        """Seconds of a step of `rows`, dealt to so many adapters; 0: to the base."""
        sampler = self._sampler(rows, adapters, PROMPT, PROMPT + STEPS + 2)
        sampler.step()  # prompts; more than one step of them for many rows
        while sampler.running < rows:
            sampler.step()
        return median([_timed(sampler.step) for _ in range(STEPS - rows // 32)])

    def prefill(self, rows: int) -> tuple[int, float]:
        """Tokens and seconds of a pass of `rows` prompts of one adapter."""
        seconds = median([_timed(self._sampler(rows, 1, PROMPT, 2).step) for _ in range(5)])
        return rows * PROMPT, seconds

    def train(self, groups: int) -> tuple[int, float]:
        """Tokens and seconds of the one pass of an update of groups of four, without the optimizer."""
        trainer = Trainer(self.base, 1, self.layout.size, 65536)
        lora = {"rank": RANK, "alpha": 16}
        environment = {"kind": "reasoning_gym", "dataset": "chain_sum"}
        trainer.open("t/j", TenantSpec(name="t", environment=environment, steps=10, lora=lora))  # type: ignore[arg-type]
        seconds = median([_timed(lambda: trainer.update([self._batch(groups)])) for _ in range(5)])
        return 4 * groups * CONVERSATION, seconds

    def _sampler(self, rows: int, adapters: int, prompt: int, tokens: int) -> NativeSampler:
        sampler = NativeSampler(self.base, self.adapters, rows, prompt + tokens + 4)
        for i in range(rows):
            name = f"t{i % adapters}" if adapters else "base"
            ids = tuple(3 + (7 * i + j) % 200 for j in range(prompt))
            adapter = f"{name}/j/v0" if adapters else None
            request = SamplingRequest(name, ids, adapter, Decoding.SAMPLE, tokens, frozenset(), seed=i)
            sampler.submit(request, lambda outcome: None)
        return sampler

    def _batch(self, groups: int) -> TrainingBatch:
        rng = np.random.default_rng(0)
        mask = np.arange(CONVERSATION) >= PROMPT
        mask &= np.arange(CONVERSATION) % 37 < 9  # a reply of about eight tokens, then a tool's answer
        samples = []
        for group in range(groups):
            prompt = rng.integers(3, 200, PROMPT)
            for member in range(4):
                tokens = np.r_[prompt, rng.integers(3, 200, CONVERSATION - PROMPT)]
                logprobs = np.where(mask, -5.0, 0.0)
                samples.append(TrainingSample(str(group), tokens, mask, logprobs, float(member % 2)))
        return TrainingBatch("t/j", samples)


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _line(first: tuple[int, float], second: tuple[int, float]) -> tuple[float, float]:
    """Seconds at 0 and per token, of the line through two points."""
    slope = (second[1] - first[1]) / (second[0] - first[0])
    return max(0.0, first[1] - slope * first[0]), slope


def measure(base: BaseModel, name: str, host_seconds: float) -> ServiceCurves:
    curves = Curves(base)
    curves.decode(4, 1)  # warm
    decode = tuple((float(n), curves.decode(n, 0)) for n in ROWS)
    alone = curves.decode(64, 0)
    adapters = tuple((float(n), max(0.0, curves.decode(64, n) - alone)) for n in ADAPTERS)
    curves.train(1)
    prefill_fixed, prefill_token = _line(curves.prefill(1), curves.prefill(16))
    train_fixed, train_token = _line(curves.train(1), curves.train(4))
    about = machine()
    return ServiceCurves(
        name=name,
        measured=True,
        note=f"{about['cpu']}, {torch.get_num_threads()} threads; an update's fixed time is part of a pass's",
        decode=decode,
        adapters=((0.0, 0.0), *adapters),
        prefill_seconds_per_token=prefill_token,
        # What a prompt adds to a step that there is anyway: the pass's own fixed time is the decoding step's.
        prefill_fixed_seconds=max(0.0, prefill_fixed - decode[0][1]),
        train_seconds_per_token=train_token,
        train_fixed_seconds=train_fixed / 2,
        update_fixed_seconds=train_fixed / 2,
        host_seconds_per_step=host_seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", help="folder or alias, instead of the small one")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--host-seconds", type=float, default=0.0, help="of orchestration, for each tenant's step")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    reuse_freed_memory()
    model = options.model or str(small_model())
    curves = measure(load_base_model(ModelSpec(source=model)), Path(model).name, options.host_seconds)
    options.out.write_text(curves.model_dump_json(indent=1) + "\n")
    print(options.out.read_text())


if __name__ == "__main__":
    main()
