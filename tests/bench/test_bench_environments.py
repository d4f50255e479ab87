"""The benchmarks' environments reward, wait and fail as they say."""

import time

import pytest

from bench.environments import Guarded, HangingGame, LetterGame, NanGame, RaisingGame, ToolGame, within_limits
from marlaas.errors import EnvironmentFailure
from marlaas.specs import CustomSpec, LatencySpec

SPEC = CustomSpec(kind="custom", entry="bench.environments:LetterGame", timeout_seconds=0.05)
QUICK = LatencySpec(median_seconds=0.02, sigma=1.0, min_seconds=0.01, max_seconds=0.04)


async def first(environment):
    (example,), _ = await environment.training(1, 0, 0, frozenset())
    return example, await environment.reset(example)


async def test_the_reward_is_the_share_of_characters_that_are_in_the_target():
    game = LetterGame("ae")
    example, messages = await first(game)
    assert (await game.step(example, messages, "area51")).reward == 0.5
    assert (await game.step(example, messages, "")).reward == 0.0


async def test_the_stream_of_examples_goes_on_where_it_stopped():
    game = LetterGame("a")
    whole, _ = await game.training(6, 0, 0, frozenset())
    start, cursor = await game.training(4, 0, 0, frozenset())
    rest, _ = await game.training(2, 0, cursor, frozenset())
    assert start + rest == whole
    assert len({example.question for example in whole}) == 6


async def test_a_tool_game_scores_the_last_of_its_turns_and_waits_as_long_for_the_same_conversation():
    game = ToolGame("a", 3, QUICK)
    example, messages = await first(game)
    waits = []
    for _ in range(2):
        began = time.perf_counter()
        outcome = await game.step(example, messages, "xa")
        waits.append(time.perf_counter() - began)
    assert not outcome.done
    assert 0.01 <= min(waits) <= max(waits) < 0.2
    said = [{"role": "assistant", "content": "xa"}, *outcome.messages]
    second = await game.step(example, [*messages, *said], "x")
    assert not second.done
    last = await game.step(example, [*messages, *said, *said], "aaax")
    assert last.done
    assert last.reward == 0.75


@pytest.mark.parametrize(
    ("game", "reason"),
    [
        (HangingGame("a"), r"step took more than 0\.05 s"),
        (RaisingGame("a"), r"step raised ZeroDivisionError"),
        (NanGame("a"), r"the reward nan, which is not a finite number"),
        (ToolGame("a", 2, LatencySpec(median_seconds=30, min_seconds=30, max_seconds=30)), "took more than"),
    ],
)
async def test_what_a_harmful_game_does_becomes_a_failure_with_its_reason(game, reason):
    environment = within_limits(game, SPEC)
    example, messages = await first(environment)
    with pytest.raises(EnvironmentFailure, match=reason):
        await environment.step(example, messages, "a")


async def test_a_guarded_environment_within_its_time_answers_as_it_would_alone():
    game = LetterGame("a")
    example, messages = await first(Guarded(game, 1.0))
    assert await Guarded(game, 1.0).step(example, messages, "ab") == await game.step(example, messages, "ab")
