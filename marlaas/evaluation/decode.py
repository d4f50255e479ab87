"""Held-out examples under the three decodings, side by side, so that equal prompts are prefilled once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from marlaas.conversations import converse
from marlaas.environments import Environment, Example
from marlaas.errors import EnvironmentFailure
from marlaas.evaluation.report import DECODINGS
from marlaas.evaluation.schema import Decoding as Contestant
from marlaas.pool import Pool
from marlaas.sampling.protocol import Decoding, SamplingRequest
from marlaas.specs import TenantSpec, tool_call_format
from storage import EvaluationRow


@dataclass(frozen=True)
class Decoded:
    """The rows of each decoding, in the order of the examples, and what they took of the accelerators' time."""

    rows: dict[str, list[EvaluationRow]]
    device_seconds: float


async def decode_examples(
    pool: Pool, environment: Environment, tenant: TenantSpec, examples: Sequence[Example], adapter: str
) -> Decoded:
    """Answers the examples under every decoding.

    An example that the environment fails on is left out of all decodings, so that they stay comparable. Raises
    EnvironmentFailure if more than a tenth are.
    """
    runs = [_answer(pool, environment, tenant, e, adapter, d) for e in examples for d in DECODINGS]
    outcomes = await asyncio.gather(*runs, return_exceptions=True)
    rows: dict[str, list[EvaluationRow]] = {d: [] for d in DECODINGS}
    failures, device_seconds = [], 0.0
    for start in range(0, len(outcomes), len(DECODINGS)):
        of_example = outcomes[start : start + len(DECODINGS)]
        failed = [o for o in of_example if isinstance(o, BaseException)]
        if any(not isinstance(o, EnvironmentFailure) for o in failed):
            raise next(o for o in failed if not isinstance(o, EnvironmentFailure))
        if failed:
            failures.append(failed[0])
            continue
        for decoding, answered in zip(DECODINGS, of_example, strict=True):
            assert isinstance(answered, tuple)
            rows[decoding].append(answered[0])
            device_seconds += answered[1]
    if 10 * len(failures) > len(examples):
        raise EnvironmentFailure(f"{len(failures)} of {len(examples)} held-out examples failed; first: {failures[0]}")
    return Decoded(rows, device_seconds)


async def _answer(
    pool: Pool, environment: Environment, tenant: TenantSpec, example: Example, adapter: str, contestant: Contestant
) -> tuple[EvaluationRow, float]:
    """The row, and the device seconds of its requests."""
    spec = tenant.evaluation

    limit = spec.max_tokens or tenant.sampling.max_tokens

    def request(tokens: tuple[int, ...], turn: int, max_tokens: int) -> SamplingRequest:
        return SamplingRequest(
            owner=tenant.name,
            prompt=tokens,
            adapter=None if contestant == "base" else adapter,
            decoding=Decoding.COLD if contestant == "cold" else Decoding.GREEDY,
            max_tokens=max_tokens,
            stop_ids=pool.stop_ids,
            stop=tenant.sampling.stop,
            alpha=spec.alpha,
            beta=spec.beta,
            session=f"{adapter}/{contestant}/{example.id}",
        )

    done = await converse(pool, environment, example, request, limit, tool_call_format(tenant.environment))
    assert done.outcome is not None
    assert done.outcome.reward is not None, "environments check that a finished conversation has a reward"
    row = EvaluationRow(
        example_id=example.id,
        prompt="\n".join(f"{m['role']}: {m['content']}" for m in done.prompt),
        answer=example.answer or "",
        completion="\n".join(done.said),
        extracted=done.outcome.extracted,
        reward=done.outcome.reward,
        correct=done.outcome.reward >= spec.correct_at,
        tokens=done.sampled_tokens,
        seconds=done.generation_seconds,
        finish_reason=str(done.finish_reason),
    )
    return row, done.device_seconds
