"""Our side of `bench/train_step.py`: a trainer in a process of its own, so that its memory is its own.

The job: model (a source), threads, rank, slots: jobs at a time, and train_tokens: of a pass. A request is an update:
jobs, to which the groups are dealt in order, prompts (token ids, one a group), completions (one a sample, group by
group) and rewards.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from bench.peers.serve import Answer, forget_high_water_mark, high_water_mark, resident, serve
from marlaas.devices import reuse_freed_memory
from marlaas.errors import MarlaasError
from marlaas.lora import AdapterLayout, AdapterShape
from marlaas.models import load_base_model
from marlaas.specs import TARGETS, ModelSpec, TenantSpec
from marlaas.training.batch import TrainingBatch, TrainingSample
from marlaas.training.trainer import Trainer


def batches(request: dict[str, Any], vocabulary: int) -> list[TrainingBatch]:
    """One a job. Completions are taken to have been drawn uniformly from the vocabulary."""
    groups, group = len(request["prompts"]), len(request["completions"]) // len(request["prompts"])
    samples = []
    for i, (own, reward) in enumerate(zip(request["completions"], request["rewards"], strict=True)):
        prompt = request["prompts"][i // group]
        mask = np.arange(len(prompt) + len(own)) >= len(prompt)
        logprobs = np.where(mask, -np.log(vocabulary), 0.0)
        samples.append(TrainingSample(str(i // group), np.array(prompt + own), mask, logprobs, reward))
    share = groups // request["jobs"] * group
    return [TrainingBatch(_name(j), samples[j * share : (j + 1) * share]) for j in range(request["jobs"])]


def _name(job: int) -> str:
    return f"t{job}/bench"


def prepare(job: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    """Loads the model and makes a trainer."""
    torch.set_num_threads(job["threads"])
    reuse_freed_memory()
    base = load_base_model(ModelSpec(source=job["model"], device="cpu"))
    forget_high_water_mark()
    loaded = resident()
    lora = {"rank": job["rank"], "alpha": 2 * job["rank"]}
    size = AdapterLayout(base.transformer, AdapterShape(job["rank"], 2.0 * job["rank"], TARGETS)).size
    trainer = Trainer(base, job["slots"], size, job["train_tokens"])
    environment = {"kind": "reasoning_gym", "dataset": "chain_sum"}

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        mine = batches(request, base.transformer.geometry.vocabulary)
        for batch in mine:
            if batch.job not in trainer:
                fields = {"name": batch.job.split("/")[0], "environment": environment, "steps": 1000, "lora": lora}
                trainer.open(batch.job, TenantSpec.model_validate(fields))
        started = time.perf_counter()
        results = trainer.update(mine)
        seconds = time.perf_counter() - started
        for result in results.values():
            if isinstance(result, MarlaasError):
                raise result
        tokens = sum(int(sample.mask.sum()) for batch in mine for sample in batch.samples)
        return {"seconds": seconds, "peak_bytes": high_water_mark() - loaded, "trained_tokens": tokens}

    return {"loaded_bytes": loaded, "vocabulary": base.transformer.geometry.vocabulary}, answer


if __name__ == "__main__":
    serve(prepare)
