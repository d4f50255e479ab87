"""The rollout and interact stages: conversations between the policy and an environment, each at its own pace."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from marlaas.conversations import converse
from marlaas.environments import Environment, Example
from marlaas.errors import EnvironmentFailure
from marlaas.pool import AdapterLease, Pool
from marlaas.sampling.protocol import Decoding, SamplingRequest
from marlaas.specs import TenantSpec
from storage import Rollout


@dataclass(frozen=True)
class Collected:
    """A step's rollouts, in whole groups of at least two, and why any that were asked for are missing."""

    rollouts: list[Rollout]
    failures: dict[str, int]
    environment_seconds: float


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
    runs = [
        _roll_out(pool, environment, tenant, step, example, member, adapter)
        for example in examples
        for member in range(tenant.group_size)
    ]
    outcomes = await asyncio.gather(*runs, return_exceptions=True)
    failures: Counter[str] = Counter()
    done: list[Rollout] = []
    for outcome in outcomes:
        if isinstance(outcome, Rollout):
            done.append(outcome)
        elif isinstance(outcome, EnvironmentFailure):
            failures[str(outcome)] += 1
        else:
            raise outcome
    members = Counter(r.group_id for r in done)
    kept = [r for r in done if members[r.group_id] >= 2]
    if not kept:
        reason, _ = failures.most_common(1)[0]
        raise EnvironmentFailure(f"no rollout of step {step} was finished; most often: {reason}")
    return Collected(kept, dict(failures), sum(r.environment_seconds for r in kept))


async def _roll_out(
    pool: Pool,
    environment: Environment,
    tenant: TenantSpec,
    step: int,
    example: Example,
    member: int,
    adapter: AdapterLease,
) -> Rollout:
    sampling = tenant.sampling

    def request(tokens: tuple[int, ...], turn: int) -> SamplingRequest:
        return SamplingRequest(
            owner=tenant.name,
            prompt=tokens,
            adapter=adapter.name,
            decoding=Decoding.SAMPLE,
            max_tokens=sampling.max_tokens,
            stop_ids=pool.stop_ids,
            stop=sampling.stop,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=request_seed(tenant.seed, step, example.id, member, turn),
        )

    done = await converse(pool, environment, example, request)
    assert done.outcome.reward is not None, "environments check that a finished conversation has a reward"
    group = f"{step}-{example.id}"
    return Rollout(
        sample_id=f"{group}-{member}",
        group_id=group,
        prompt_id=example.id,
        turn_count=len(done.said),
        token_ids=done.transcript.tokens,
        loss_mask=done.transcript.mask,
        logprobs=done.transcript.logprobs,
        adapter_version=adapter.version,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        reward=done.outcome.reward,
        reward_parts=done.outcome.parts,
        finish_reason=str(done.finish_reason),
        environment_seconds=done.environment_seconds,
        text="\n".join(done.said),
    )
