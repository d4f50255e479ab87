import asyncio

import pytest

from marlaas.environments import check_environment, open_environment, question_key
from marlaas.errors import EnvironmentFailure
from marlaas.specs import ReasoningGymSpec

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def gym(dataset="chain_sum", settings=SUMS, **fields):
    fields = {"answer": {"extract": "last_number"}, **fields}
    return ReasoningGymSpec(kind="reasoning_gym", dataset=dataset, settings=settings, **fields)


@pytest.fixture
async def sums():
    environment = open_environment(gym())
    yield environment
    await environment.close()


async def test_held_out_questions_are_distinct_and_never_trained_on(sums):
    held_out = await sums.held_out(60, seed=5)
    keys = frozenset(map(question_key, held_out))
    assert len(keys) == 60
    trained, cursor = set(), 0
    for _ in range(30):
        examples, cursor = await sums.training(8, seed=0, cursor=cursor, exclude=keys)
        assert len({question_key(e) for e in examples}) == 8
        trained |= {question_key(e) for e in examples}
    assert not trained & keys


async def test_streams_depend_on_seed_and_cursor_alone(sums):
    assert await sums.held_out(20, seed=1) == await sums.held_out(20, seed=1)
    assert await sums.held_out(20, seed=1) != await sums.held_out(20, seed=2)
    whole, end = await sums.training(6, 3, 0, frozenset())
    first, middle = await sums.training(3, 3, 0, frozenset())
    assert whole[:3] == first
    rest, cursor = await sums.training(3, 3, middle, frozenset(map(question_key, first)))
    assert (rest, cursor) == (whole[3:], end)
    another = open_environment(gym())
    assert (await another.training(6, 3, 0, frozenset()))[0] == whole
    assert (await another.training(6, 4, 0, frozenset()))[0] != whole
    await another.close()


async def test_a_question_space_that_is_too_small_is_said_to_be(sums):
    with pytest.raises(EnvironmentFailure, match=r"environment chain_sum: .*500 distinct questions .*; 200 were found"):
        await sums.held_out(500, seed=0)


async def test_the_data_sets_own_scorer_judges_the_extracted_answer(sums):
    [example], _ = await sums.training(1, 0, 0, frozenset())
    messages = await sums.reset(example)
    assert messages == [{"role": "user", "content": example.question}]
    right = await sums.step(example, messages, f"The answer is {example.answer}.")
    assert (right.done, right.reward, right.extracted, right.parts) == (True, 1.0, example.answer, {"answered": 1.0})
    assert (await sums.step(example, messages, "The answer is 99.")).reward < 1.0
    silent = await sums.step(example, messages, "I do not know.")
    assert (silent.reward, silent.extracted, silent.parts) == (0.0, None, {"answered": 0.0})


@pytest.mark.parametrize("dataset", ["acre", "gsm_symbolic", "word_ladder", "number_sorting", "needle_haystack", "lcm"])
async def test_data_sets_of_all_kinds_give_examples_whose_answers_score_one(dataset):
    environment = open_environment(gym(dataset, {}, answer={"extract": "whole"}))
    held_out = await environment.held_out(4, seed=0)
    training, _ = await environment.training(3, 0, 10_000_000, frozenset())
    for example in held_out + training:
        outcome = await environment.step(example, await environment.reset(example), example.answer)
        assert outcome.reward == pytest.approx(1.0)
    await environment.close()


async def test_many_calls_at_once_answer_each_its_own(sums):
    examples, _ = await sums.training(40, 0, 0, frozenset())
    outcomes = await asyncio.gather(*(sums.step(e, [], e.answer) for e in examples for _ in range(5)))
    assert [o.reward for o in outcomes] == [1.0] * 200


async def test_an_answer_whose_scoring_hangs_is_timed_out():
    environment = open_environment(gym("countdown", {}, answer={"extract": "whole"}, timeout_seconds=3))
    [example], _ = await environment.training(1, 0, 0, frozenset())
    with pytest.raises(EnvironmentFailure, match="countdown: step of example training-0 took longer than 3"):
        await environment.step(example, [], "9**9**9**9**9")
    await environment.close()


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (gym(), None),
        (gym("chain_sums"), r"dataset: 'chain_sums' is not a reasoning-gym data set; nearest are chain_sum"),
        (gym(settings={"max_term": 2}), r"settings.max_term: unknown setting of chain_sum; allowed are .*max_terms"),
        (gym(settings={"seed": 2}), "settings.seed: unknown"),
        (
            gym(settings={"min_terms": 3, "max_terms": 2}),
            r"settings: .* is not allowed: max_terms must be",
        ),
        (gym(settings={"min_terms": "a"}), "settings: .* is not allowed"),
    ],
)
def test_specs_are_checked(spec, problem):
    import re

    found = check_environment(spec)
    assert found is None if problem is None else re.match(problem, found)
