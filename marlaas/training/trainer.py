"""The mixed-adapter trainer: batches of many jobs in shared forward and backward passes.

Every job has a slot of fp32 weights, a gradient, AdamW moments and a step count of its own. What a job gets from
an update is what it would get alone; a batch that cannot be used is refused by itself.
"""

from __future__ import annotations

import importlib
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from marlaas.attention import BlockAttention
from marlaas.errors import AdapterError, BatchError, MarlaasError
from marlaas.lora import AdapterBank, AdapterLayout, AdapterShape, LoraBatch, Segment
from marlaas.lora.bank import Resident
from marlaas.models import BaseModel
from marlaas.specs import AlgorithmSpec, TenantSpec
from marlaas.training.advantages import GroupAdvantages, group_advantages
from marlaas.training.batch import TrainingBatch, UpdateResult
from marlaas.training.logprobs import token_logprobs
from marlaas.training.losses.base import TokenInputs, TokenLoss
from marlaas.training.metrics import TokenSums, step_metrics
from marlaas.training.microbatch import JobRows, MicroBatch, build, split_by_budget
from marlaas.training.optimizer import AdamState, adamw_, clip_, learning_rate
from marlaas.training.packing import Row, pack_group

TokenLossFunction = Callable[[TokenInputs, AlgorithmSpec], TokenLoss]


@dataclass
class TrainingJob:
    """A job that trains. `version` counts its updates and names the adapter that its weights are."""

    spec: TenantSpec
    resident: Resident
    gradient: torch.Tensor
    adam: AdamState
    token_loss: TokenLossFunction
    version: int = 0

    @property
    def weights(self) -> torch.Tensor:
        """fp32 `[size]`: the adapter's master weights."""
        return self.resident.vector

    @property
    def vectors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds, fp32 `[size]` each, by the names of `JobState`."""
        return {"weights": self.weights, "first": self.adam.first, "second": self.adam.second}


@dataclass(frozen=True)
class JobState:
    """All that an update depends on, besides its batch.

    The three mappings hold fp32 CPU tensors by name, `layers.{i}.{module}.{A|B}`: the weights and AdamW's moments.
    """

    weights: Mapping[str, torch.Tensor]
    first: Mapping[str, torch.Tensor]
    second: Mapping[str, torch.Tensor]
    optimizer_step: int
    version: int


@dataclass(frozen=True)
class _Prepared:
    batch: TrainingBatch
    groups: GroupAdvantages
    rows: list[Row]
    total_tokens: int
    sums: TokenSums


class Trainer:
    """Trains up to `slots` jobs. Not thread-safe: the pool's device thread owns it."""

    def __init__(self, base: BaseModel, slots: int, slot_size: int, micro_batch_tokens: int) -> None:
        """slot_size: elements of the largest adapter; micro_batch_tokens: of one pass, padding included."""
        t = base.transformer
        self.base = base
        self.micro_batch_tokens = micro_batch_tokens
        self._bank = AdapterBank(slots, slot_size, torch.float32, t.device)
        self._jobs: dict[str, TrainingJob] = {}

    def __contains__(self, job: str) -> bool:
        return job in self._jobs

    def __getitem__(self, job: str) -> TrainingJob:
        return self._jobs[job]

    def open(self, job: str, spec: TenantSpec, state: JobState | None = None) -> TrainingJob:
        """Takes a job in: a fresh adapter (version 0, drawn from the spec's seed) or a restored state.

        Raises AdapterError when it does not fit. A job that is open already is an error of the caller.
        """
        t = self.base.transformer
        layout = AdapterLayout(t, AdapterShape(spec.lora.rank, spec.lora.alpha, spec.lora.targets))
        loss_module = importlib.import_module(f"marlaas.training.losses.{spec.algorithm.name}")
        resident = self._bank.add(job, layout)
        zeros = torch.zeros_like(resident.vector)
        adam = AdamState(zeros.clone(), zeros.clone())
        entry = TrainingJob(spec, resident, zeros, adam, loss_module.token_loss)
        if state is None:
            layout.initialise_(resident.vector, t.sites, spec.seed)
        else:
            try:
                for name, vector in entry.vectors.items():
                    self._restore(layout, vector, getattr(state, name), f"{job}: {name}")
            except AdapterError:
                self._bank.remove(job)
                raise
            adam.step, entry.version = state.optimizer_step, state.version
        self._jobs[job] = entry
        return entry

    def close(self, job: str) -> None:
        """Lets a job go; its slot is zeroed."""
        del self._jobs[job]
        self._bank.remove(job)

    def state(self, job: str) -> JobState:
        """A copy of the job's state, for a checkpoint."""
        entry = self._jobs[job]
        sites = self.base.transformer.sites
        named = {}
        for field, vector in entry.vectors.items():
            copy = vector.detach().to("cpu", copy=True)
            named[field] = {t.name: t.tensor for t in entry.resident.layout.tensors(copy, sites)}
        return JobState(**named, optimizer_step=entry.adam.step, version=entry.version)

    def _restore(
        self, layout: AdapterLayout, vector: torch.Tensor, stored: Mapping[str, torch.Tensor], where: str
    ) -> None:
        expected = {t.name: t.tensor for t in layout.tensors(vector, self.base.transformer.sites)}
        if expected.keys() != stored.keys():
            odd = min(expected.keys() ^ stored.keys())
            raise AdapterError(f"{where}: {odd} is in the checkpoint or in the spec's lora, but not in both")
        for name, tensor in expected.items():
            if stored[name].shape != tensor.shape:
                raise AdapterError(
                    f"{where}: {name} has shape {list(stored[name].shape)}; the spec's lora needs {list(tensor.shape)}"
                )
            tensor.copy_(stored[name])

    def update(self, batches: Sequence[TrainingBatch]) -> dict[str, UpdateResult | MarlaasError]:
        """One optimizer step for each batch's job, at most one batch a job.

        A job whose batch is refused or whose gradient is not finite gets the error and keeps its weights and
        optimizer state; the others are not affected.
        """
        results: dict[str, UpdateResult | MarlaasError] = {}
        prepared: dict[str, _Prepared] = {}
        for batch in batches:
            assert batch.job not in prepared, f"two batches of {batch.job} in one update"
            try:
                prepared[batch.job] = self._prepare(batch)
            except BatchError as error:
                results[batch.job] = error
        self._accumulate_gradients(prepared)
        for job, ready in prepared.items():
            results[job] = self._apply(job, ready)
        return results

    def _prepare(self, batch: TrainingBatch) -> _Prepared:
        batch.check(self.base.transformer.geometry.vocabulary, self.micro_batch_tokens)
        spec = self._jobs[batch.job].spec
        names = [s.group for s in batch.samples]
        groups = group_advantages(names, [s.reward for s in batch.samples], spec.algorithm.normalize_std)
        members = defaultdict(list)
        for index, sample in enumerate(batch.samples):
            members[sample.group].append((index, sample))
        # A group whose rewards are all equal has no advantage: it would only add zeros to the gradient.
        learns = {g for g, a in zip(names, groups.advantages, strict=True) if a != 0} or set(names[:1])
        if spec.algorithm.kl_coefficient > 0:
            learns = set(names)
        chosen = [group for name, group in members.items() if name in learns]
        rows = [row for group in chosen for row in pack_group(group, self.micro_batch_tokens)]
        total_tokens = sum(int(s.mask.sum()) for s in batch.samples)
        return _Prepared(batch, groups, rows, total_tokens, TokenSums())

    def _accumulate_gradients(self, prepared: Mapping[str, _Prepared]) -> None:
        t = self.base.transformer
        weights = {job: self._jobs[job].weights.to(t.dtype) for job in prepared}
        for job in prepared:
            self._jobs[job].gradient.zero_()
        parts = [JobRows(job, p.rows, p.batch.samples) for job, p in prepared.items()]
        for micro in split_by_budget(parts, self.micro_batch_tokens) if parts else []:
            batch = build(micro, t.dtype, t.device)
            references = self._reference_logprobs(micro, prepared)
            hidden = self._hidden(batch, self._lora(micro, batch, weights))
            logprobs, entropy = token_logprobs(t, hidden[batch.predicts_N], batch.targets)
            losses = []
            for part, (start, end), reference in zip(micro, batch.target_spans, references, strict=True):
                ready = prepared[part.job]
                span = slice(start, end)
                of_token = torch.as_tensor(ready.groups.advantages[batch.sample_N[span]], dtype=torch.float32)
                entry = self._jobs[part.job]
                algorithm = entry.spec.algorithm
                inputs = TokenInputs(
                    logprobs[span],
                    batch.behaviour_N[span],
                    of_token.to(t.device),
                    reference if algorithm.kl_coefficient > 0 else None,
                )
                result = entry.token_loss(inputs, algorithm)
                losses.append(result.loss.sum() / ready.total_tokens)
                ready.sums.add(
                    result.loss.detach(),
                    entropy[span],
                    result.clipped,
                    inputs.logprobs.detach(),
                    inputs.behaviour,
                    reference,
                )
            # One backward for all; a loss that is not finite stays with its own rows.
            torch.autograd.backward(losses)

    def _lora(self, micro: Sequence[JobRows], batch: MicroBatch, weights: Mapping[str, torch.Tensor]) -> LoraBatch:
        return LoraBatch(
            [
                Segment(start, end, self._jobs[p.job].resident.layout, weights[p.job], self._jobs[p.job].gradient)
                for p, (start, end) in zip(micro, batch.token_spans, strict=True)
            ]
        )

    def _hidden(self, batch: MicroBatch, lora: LoraBatch | None) -> torch.Tensor:
        attend = BlockAttention(batch.blocks)
        return self.base.transformer.hidden_states(batch.tokens_T, batch.positions_T, attend, lora)

    @torch.no_grad()
    def _reference_logprobs(
        self, micro: Sequence[JobRows], prepared: Mapping[str, _Prepared]
    ) -> list[torch.Tensor | None]:
        """Base log-probs of each part's tokens: of all if the loss needs them, else of the job's first row once."""
        chosen: list[JobRows | None] = []
        for part in micro:
            job = self._jobs[part.job]
            if job.spec.algorithm.kl_coefficient > 0:
                chosen.append(part)
            elif prepared[part.job].sums.tokens == 0:
                chosen.append(JobRows(part.job, part.rows[:1], part.samples))
            else:
                chosen.append(None)
        wanted = [part for part in chosen if part is not None]
        if not wanted:
            return [None] * len(micro)
        t = self.base.transformer
        batch = build(wanted, t.dtype, t.device)
        logprobs, _ = token_logprobs(t, self._hidden(batch, None)[batch.predicts_N], batch.targets)
        spans = iter(batch.target_spans)
        return [None if part is None else logprobs[slice(*next(spans))] for part in chosen]

    @torch.no_grad()
    def _apply(self, job: str, ready: _Prepared) -> UpdateResult | MarlaasError:
        entry = self._jobs[job]
        norm = clip_(entry.gradient, entry.spec.optimizer.max_grad_norm)
        if not math.isfinite(norm):
            entry.gradient.zero_()
            return BatchError(f"{job}: the gradient of this step is not finite; weights and optimizer are unchanged")
        optimizer = entry.spec.optimizer
        rate = learning_rate(optimizer, entry.adam.step, entry.spec.steps)
        adamw_(entry.weights, entry.gradient, entry.adam, optimizer, rate)
        entry.version += 1
        metrics = step_metrics(ready.batch, ready.groups, ready.sums)
        return UpdateResult(entry.version, metrics | {"gradient_norm": norm, "learning_rate": rate})
