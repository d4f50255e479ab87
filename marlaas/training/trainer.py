"""The mixed-adapter trainer: batches of many jobs in shared forward and backward passes.

Every job has a slot of fp32 weights, a gradient, AdamW moments and a step count of its own. What a job gets from
an update is what it would get alone; a batch that cannot be used is refused by itself.
"""

from __future__ import annotations

import importlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from marlaas.cpu_kernels import runs_here
from marlaas.errors import AdapterError, BatchError, MarlaasError
from marlaas.lora import AdapterLayout, AdapterShape, LoraBatch, Segment
from marlaas.models import BaseModel
from marlaas.specs import AlgorithmSpec, TenantSpec
from marlaas.training.advantages import GroupAdvantages, conversation_advantages
from marlaas.training.batch import TrainingBatch, TrainingSample, UpdateResult
from marlaas.training.logprobs import token_logprobs
from marlaas.training.losses.base import TokenInputs, TokenLoss
from marlaas.training.metrics import TokenSums, step_metrics
from marlaas.training.microbatch import JobRows, MicroBatch, build
from marlaas.training.optimizer import AdamState, adamw_, clip_, learning_rate
from marlaas.training.packing import Row, pack_group
from marlaas.training.slots import JobVectors, TrainingSlots
from marlaas.transformer import Decoder

_ATTENTION_SLOWNESS = 4.0
_STORED = ("weights", "first", "second")  # what a checkpoint holds, in the order of TrainingSlots.read

TokenLossFunction = Callable[[TokenInputs, AlgorithmSpec], TokenLoss]


@dataclass
class TrainingJob:
    """A job that trains. `version` counts its updates and names the adapter that its weights are."""

    name: str
    spec: TenantSpec
    layout: AdapterLayout
    slots: TrainingSlots
    token_loss: TokenLossFunction
    optimizer_step: int = 0
    version: int = 0

    @property
    def vectors(self) -> JobVectors:
        """Weights, gradient and moments, where the job is on the device."""
        return self.slots[self.name]

    @property
    def weights(self) -> torch.Tensor:
        """fp32 `[size]`: the adapter's master weights, where the job is on the device."""
        return self.vectors.weights

    def stored_weights(self) -> torch.Tensor:
        """A copy of the weights on the host, wherever the job is."""
        return self.slots.read(self.name)[0]


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
class TrainingStep:
    """One pass: the updates that it ended, and each job's share of its seconds."""

    results: dict[str, UpdateResult | MarlaasError]
    seconds: dict[str, float]


@dataclass
class _Prepared:
    """A batch under way: `rows` are those still to run, from short to long."""

    batch: TrainingBatch
    groups: GroupAdvantages
    rows: list[Row]
    total_tokens: int
    sums: TokenSums
    device_seconds: float = 0.0


def take_rows(parts: Sequence[tuple[str, _Prepared]], budget: int) -> list[JobRows]:
    """Takes rows out of the jobs' batches, jobs in order, up to `budget` padded tokens but at least one row."""
    micro: list[JobRows] = []
    used = 0
    for job, ready in parts:
        chosen = 0
        for row in ready.rows:
            if (chosen + 1) * len(row) > budget - used and (chosen or used):
                break
            chosen += 1
        if chosen:
            micro.append(JobRows(job, ready.rows[:chosen], ready.batch.samples))
            ready.rows = ready.rows[chosen:]
            used += micro[-1].padded_tokens
    return micro


def _pair_cost(transformer: Decoder) -> float:
    """Cost of a (query, key) pair of attention in terms of one token's linear layers: by operations, and measured.

    torch's attention reached a quarter of the rate of matrix products on CPUs. Where the processor's kernels attend,
    branches that do not see each other cost nothing.
    """
    if runs_here(transformer.device, transformer.dtype):
        return 0.0
    g = transformer.geometry
    linear = sum(site.weight.numel() for site in transformer.sites)
    return _ATTENTION_SLOWNESS * 2 * g.layers * g.heads * g.head_dim / linear


class Trainer:
    """Trains any number of jobs, up to `slots` in one pass. Not thread-safe: the pool's device thread owns it."""

    def __init__(self, base: BaseModel, slots: int, slot_size: int, micro_batch_tokens: int) -> None:
        """slot_size: elements of the largest adapter; micro_batch_tokens: of one pass, padding included."""
        self.base = base
        self.micro_batch_tokens = micro_batch_tokens
        self._slots = TrainingSlots(slots, slot_size, base.transformer.dtype, base.transformer.device)
        self._pair_cost = _pair_cost(base.transformer)
        self._jobs: dict[str, TrainingJob] = {}
        self._active: dict[str, _Prepared] = {}

    def __contains__(self, job: str) -> bool:
        return job in self._jobs

    def __getitem__(self, job: str) -> TrainingJob:
        return self._jobs[job]

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def active(self) -> list[str]:
        """The jobs whose update is under way."""
        return list(self._active)

    @property
    def paged(self) -> int:
        """How many jobs are in host memory."""
        return self._slots.paged

    def open(self, job: str, spec: TenantSpec, state: JobState | None = None) -> TrainingJob:
        """Takes a job in: a fresh adapter (version 0, drawn from the spec's seed) or a restored state.

        Raises AdapterError when it does not fit. A job that is open already is an error of the caller.
        """
        t = self.base.transformer
        layout = AdapterLayout(t, AdapterShape(spec.lora.rank, spec.lora.alpha, spec.lora.targets))
        loss_module = importlib.import_module(f"marlaas.training.losses.{spec.algorithm.name}")
        entry = TrainingJob(job, spec, layout, self._slots, loss_module.token_loss)
        vectors = torch.zeros(3, layout.size)
        if state is None:
            layout.initialise_(vectors[0], t.sites, spec.seed)
        else:
            for name, vector in zip(_STORED, vectors, strict=True):
                self._restore(layout, vector, getattr(state, name), f"{job}: {name}")
            entry.optimizer_step, entry.version = state.optimizer_step, state.version
        self._slots.add(job, layout.size)
        self._slots.write(job, vectors)
        self._slots.page_in(job, self._active)
        self._jobs[job] = entry
        return entry

    def close(self, job: str) -> None:
        """Lets a job go, and an update of it that is under way."""
        self._active.pop(job, None)
        del self._jobs[job]
        self._slots.remove(job)

    def state(self, job: str) -> JobState:
        """A copy of the job's state, for a checkpoint."""
        entry = self._jobs[job]
        sites = self.base.transformer.sites
        named = {
            field: {t.name: t.tensor for t in entry.layout.tensors(vector, sites)}
            for field, vector in zip(_STORED, self._slots.read(job), strict=True)
        }
        return JobState(**named, optimizer_step=entry.optimizer_step, version=entry.version)

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
        """One optimizer step for each batch's job, at most one batch a job; see `begin` and `step`."""
        results: dict[str, UpdateResult | MarlaasError] = {}
        waiting = list(batches)
        while waiting or self._active:
            for batch in list(waiting):
                try:
                    begun = self.begin(batch)
                except BatchError as error:
                    results[batch.job], begun = error, True
                if begun:
                    waiting.remove(batch)
            results |= self.step(self.active).results
        return results

    def begin(self, batch: TrainingBatch) -> bool:
        """Starts an update; False if every slot is taken by an update under way. Raises BatchError.

        Weights and optimizer stay as they are until the update's last pass.
        """
        assert batch.job not in self._active, f"two batches of {batch.job} in one update"
        ready = self._prepare(batch)
        if not self._slots.page_in(batch.job, self._active):
            return False
        vectors = self._jobs[batch.job].vectors
        vectors.gradient.zero_()
        vectors.rounded.copy_(vectors.weights)
        self._active[batch.job] = ready
        return True

    def step(self, order: Sequence[str]) -> TrainingStep:
        """One forward and backward pass over rows of the jobs in `order`, as many as fit; first come, first in.

        A job's weights and optimizer step after its last row. A job whose gradient is not finite, or whose pass
        raises, gets the error and keeps its weights and optimizer state; other jobs are not affected.
        """
        started = time.perf_counter()
        micro = take_rows([(job, self._active[job]) for job in order], self.micro_batch_tokens)
        if not micro:
            return TrainingStep({}, {})
        results: dict[str, UpdateResult | MarlaasError] = {}
        try:
            self._accumulate_gradients(micro)
        except Exception as error:  # not one job's fault that we know of: all in the pass learn why
            for part in micro:
                del self._active[part.job]
                results[part.job] = BatchError(f"{part.job}: the pass failed: {type(error).__name__}: {error}")
        total = sum(part.padded_tokens for part in micro)
        finished = {p.job: self._active[p.job] for p in micro if p.job in self._active and not self._active[p.job].rows}
        for job, ready in finished.items():
            del self._active[job]
            try:
                results[job] = self._apply(job, ready)
            except Exception as error:  # its weights may be half written: the job ends, and resumes from its checkpoint
                results[job] = BatchError(f"{job}: the optimizer failed: {type(error).__name__}: {error}")
        seconds = time.perf_counter() - started
        shares = {part.job: seconds * part.padded_tokens / total for part in micro}
        for job, ready in [*finished.items(), *self._active.items()]:
            ready.device_seconds += shares.get(job, 0.0)
        for job, ready in finished.items():
            result = results[job]
            if isinstance(result, UpdateResult):
                results[job] = replace(result, device_seconds=ready.device_seconds)
        return TrainingStep(results, shares)

    def _prepare(self, batch: TrainingBatch) -> _Prepared:
        batch.check(self.base.transformer.geometry.vocabulary, self.micro_batch_tokens)
        spec = self._jobs[batch.job].spec
        groups = conversation_advantages(batch.samples, spec.algorithm.normalize_std)
        names = [s.group for s in batch.samples]
        members = defaultdict(list)
        for index, sample in enumerate(batch.samples):
            members[sample.group].append((index, sample))
        # A group whose rewards are all equal has no advantage: it would only add zeros to the gradient.
        learns = {g for g, a in zip(names, groups.advantages, strict=True) if a != 0} or set(names[:1])
        if spec.algorithm.kl_coefficient > 0:
            learns = set(names)
        chosen = [group for name, group in members.items() if name in learns]
        rows = sorted((row for group in chosen for row in self._pack(group)), key=len)
        total_tokens = sum(int(s.mask.sum()) for s in batch.samples)
        return _Prepared(batch, groups, rows, total_tokens, TokenSums(spec.algorithm.importance_cap))

    def _pack(self, group: Sequence[tuple[int, TrainingSample]]) -> Iterator[Row]:
        return pack_group(group, self.micro_batch_tokens, self._pair_cost)

    def _accumulate_gradients(self, micro: Sequence[JobRows]) -> None:
        t = self.base.transformer
        batch = build(micro, t.dtype, t.device)
        references = self._reference_logprobs(micro)
        hidden = self._hidden(batch, self._lora(micro, batch))
        logprobs, entropy = token_logprobs(t, hidden[batch.predicts_N], batch.targets)
        losses = []
        for part, (start, end), reference in zip(micro, batch.target_spans, references, strict=True):
            ready = self._active[part.job]
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

    def _lora(self, micro: Sequence[JobRows], batch: MicroBatch) -> LoraBatch:
        segments = []
        for part, (start, end) in zip(micro, batch.token_spans, strict=True):
            layout, vectors = self._jobs[part.job].layout, self._jobs[part.job].vectors
            segments.append(Segment(start, end, layout, vectors.rounded, vectors.gradient))
        return LoraBatch(segments)

    def _hidden(self, batch: MicroBatch, lora: LoraBatch | None) -> torch.Tensor:
        return self.base.transformer.hidden_states(batch.tokens_T, batch.positions_T, batch.attend, lora)

    @torch.no_grad()
    def _reference_logprobs(self, micro: Sequence[JobRows]) -> list[torch.Tensor | None]:
        """Base log-probs of each part's tokens: of all if the loss needs them, else of the job's first sample."""
        chosen: list[JobRows | None] = []
        for part in micro:
            job = self._jobs[part.job]
            if job.spec.algorithm.kl_coefficient > 0:
                chosen.append(part)
            elif self._active[part.job].sums.tokens == 0:
                chosen.append(JobRows(part.job, [part.rows[0].first_branch], part.samples))
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
        vectors, optimizer = entry.vectors, entry.spec.optimizer
        norm = clip_(vectors.gradient, optimizer.max_grad_norm)
        if not math.isfinite(norm):
            return BatchError(f"{job}: the gradient of this step is not finite; weights and optimizer are unchanged")
        rate = learning_rate(optimizer, entry.optimizer_step, entry.spec.steps)
        adam = AdamState(vectors.first, vectors.second, entry.optimizer_step)
        adamw_(vectors.weights, vectors.gradient, adam, optimizer, rate)
        entry.optimizer_step = adam.step
        entry.version += 1
        metrics = step_metrics(ready.batch, ready.groups, ready.sums)
        return UpdateResult(entry.version, metrics | {"gradient_norm": norm, "learning_rate": rate})
