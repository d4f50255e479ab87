"""The rollout and interact stages: conversations between the policy and an environment, each at its own pace."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from marlaas.conversations import Conversation, converse
from marlaas.environments import Environment, Example
from marlaas.errors import EnvironmentFailure
from marlaas.pool import AdapterLease, Pool
from marlaas.sampling.protocol import Decoding, SamplingRequest
from marlaas.specs import TenantSpec, tool_call_format
from marlaas.training.batch import TrainingBatch, TrainingSample
from storage import Rollout


@dataclass(frozen=True)
class Collected:
    """A step's rollouts, in whole groups of at least two conversations, and what they took.

    failures: why conversations are missing, and how many. dropped: finished conversations that are left out because
    their group has no other. split: conversations that became several rollouts. calls, environment_seconds: of the
    environment; interacting: when (time.time) the first call began and the last one ended.
    """

    rollouts: list[Rollout]
    failures: dict[str, int]
    dropped: int
    split: int
    calls: int
    environment_seconds: float
    device_seconds: float
    reused_tokens: int
    interacting: tuple[float, float]


@dataclass(frozen=True)
class _Finished:
    group: str
    rollouts: list[Rollout]
    conversation: Conversation


def request_seed(*parts: int | str) -> int:
    """A seed in [0, 2^63) for one request, from what identifies it."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


async def collect(
    pool: Pool,
    environment: Environment,
    tenant: TenantSpec,
    step: int,
    examples: Sequence[Example],
    adapter: AdapterLease,
) -> Collected:
    """Samples `group_size` conversations on each example with one adapter version.

    A conversation whose environment fails is left out and counted; a group left with fewer than two is left out
    whole. Raises EnvironmentFailure, with the commonest reason, if nothing is left.
    """
    began = time.time()
    runs = [
        _roll_out(pool, environment, tenant, step, example, member, adapter)
        for example in examples
        for member in range(tenant.group_size)
    ]
    outcomes = await asyncio.gather(*runs, return_exceptions=True)
    failures: Counter[str] = Counter()
    done: list[_Finished] = []
    for outcome in outcomes:
        if isinstance(outcome, _Finished):
            done.append(outcome)
        elif isinstance(outcome, EnvironmentFailure):
            failures[str(outcome)] += 1
        else:
            raise outcome
    members = Counter(finished.group for finished in done)
    kept = [finished for finished in done if members[finished.group] >= 2]
    if not kept:
        reason, _ = failures.most_common(1)[0]
        raise EnvironmentFailure(f"no rollout of step {step} was finished; most often: {reason}")
    talks = [finished.conversation for finished in done]
    return Collected(
        rollouts=[rollout for finished in kept for rollout in finished.rollouts],
        failures=dict(failures),
        dropped=len(done) - len(kept),
        split=sum(len(finished.rollouts) > 1 for finished in kept),
        calls=sum(talk.calls for talk in talks),
        environment_seconds=sum(talk.environment_seconds for talk in talks),
        device_seconds=sum(talk.device_seconds for talk in talks),
        reused_tokens=sum(talk.reused_tokens for talk in talks),
        interacting=(began, time.time()),
    )


async def _roll_out(
    pool: Pool,
    environment: Environment,
    tenant: TenantSpec,
    step: int,
    example: Example,
    member: int,
    adapter: AdapterLease,
) -> _Finished:
    sampling = tenant.sampling
    group = f"{step}-{example.id}"

    def request(tokens: tuple[int, ...], turn: int, max_tokens: int) -> SamplingRequest:
        return SamplingRequest(
            owner=tenant.name,
            prompt=tokens,
            adapter=adapter.name,
            decoding=Decoding.SAMPLE,
            max_tokens=max_tokens,
            stop_ids=pool.stop_ids,
            stop=sampling.stop,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=request_seed(tenant.seed, step, example.id, member, turn),
            session=f"{adapter.name}/{group}/{member}",
        )

    talk = await converse(
        pool, environment, example, request, sampling.max_tokens, tool_call_format(tenant.environment)
    )
    assert talk.outcome is not None
    assert talk.outcome.reward is not None, "environments check that a finished conversation has a reward"
    conversation = f"{group}-{member}"
    several = len(talk.transcripts) > 1
    rollouts = [
        Rollout(
            sample_id=f"{conversation}.{part}" if several else conversation,
            group_id=group,
            prompt_id=example.id,
            conversation_id=conversation,
            turn_count=len(talk.said),
            token_ids=transcript.tokens,
            loss_mask=transcript.mask,
            logprobs=transcript.logprobs,
            adapter_version=adapter.version,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            reward=talk.outcome.reward,
            reward_parts=talk.outcome.parts,
            finish_reason=str(talk.finish_reason),
            environment_seconds=talk.environment_seconds,
            text="\n".join(talk.said),
        )
        for part, transcript in enumerate(talk.transcripts)
    ]
    return _Finished(group, rollouts, talk)


def training_batch(job: str, rollouts: Sequence[Rollout], staleness: float) -> TrainingBatch:
    """A step's rollouts as the trainer takes them. staleness: in versions."""
    return TrainingBatch(job, [_training_sample(rollout) for rollout in rollouts], staleness)


def _training_sample(rollout: Rollout) -> TrainingSample:
    return TrainingSample(
        group=rollout.group_id,
        conversation=rollout.conversation_id,
        tokens=np.asarray(rollout.token_ids, np.int32),
        mask=np.asarray(rollout.loss_mask, np.bool_),
        logprobs=np.asarray(rollout.logprobs, np.float32),
        reward=rollout.reward,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
    )
