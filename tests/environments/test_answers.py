import asyncio

import pytest

from marlaas.environments.answers import Extractor, extract_answer
from marlaas.environments.protocol import Example
from marlaas.errors import EnvironmentFailure
from marlaas.specs import AnswerSpec

EXAMPLE = Example("7", "q")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The answer is 7.", "7"),
        ("4 + 3 = 7", "7"),
        ("It is -12", "-12"),
        ("4 - 7 = -3.", "-3"),
        ("7-3", "3"),
        ("x-3", "3"),
        ("(2)-3", "3"),
        ("= \u22125", "-5"),
        ("about 3.14", "3.14"),
        ("-0.5!", "-0.5"),
        (".25", ".25"),
        ("1,234,567 people", "1234567"),
        ("-1,234.50", "-1234.50"),
        ("1,2,3", "3"),
        ("12,34", "34"),
        ("2024.", "2024"),
        ("v1.2.3", "3"),
        ("none", None),
        ("", None),
    ],
)
def test_last_number(text, expected):
    assert extract_answer("last_number", text) == expected


@pytest.mark.parametrize(
    ("how", "text", "expected"),
    [
        ("whole", "  Paris \n", "Paris"),
        ("whole", " \n ", None),
        ("last_line", "Let me see.\n\n 42 \n\n", "42"),
        ("last_line", "\n", None),
        ("answer_tag", "<answer>1</answer> no, <answer> 2\n</answer>", "2"),
        ("answer_tag", "<answer>1</answer> and <answer>2", "1"),
        ("answer_tag", "<answer>1", None),
        ("answer_tag", "1</answer>", None),
        ("answer_tag", "<answer> </answer>", None),
        ("boxed", r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("boxed", r"\boxed{1} then \boxed{2}", "2"),
        ("boxed", r"\boxed{1} then \boxed{2", "1"),
        ("boxed", "1", None),
    ],
)
def test_other_extractions(how, text, expected):
    assert extract_answer(how, text) == expected


@pytest.mark.parametrize("how", ["last_number", "answer_tag", "boxed", "last_line", "whole"])
@pytest.mark.parametrize("piece", ["1,", "<answer>", "\\boxed{", "-", "1", "\n", "{"])
@pytest.mark.timeout(20)
def test_hostile_completions_are_read_in_time(how, piece):
    extract_answer(how, piece * 200_000)


def pattern(text, seconds=30.0):
    return Extractor(AnswerSpec(extract="pattern", pattern=text), "environment sums", seconds)


async def test_pattern_takes_the_first_group_of_the_last_match():
    extractor = pattern(r"is (\w+)")
    assert await extractor.extract("it is red, no, it is blue", EXAMPLE) == "blue"
    assert await extractor.extract("nothing", EXAMPLE) is None
    await extractor.close()


async def test_a_catastrophic_pattern_fails_and_the_next_call_works():
    bad, good = pattern(r"(?:(a+)+)+$", seconds=1), pattern(r"(\d)")
    assert await good.extract("1", EXAMPLE) == "1"
    hanging = asyncio.create_task(bad.extract("a" * 40 + "!", EXAMPLE))
    await asyncio.sleep(0.1)
    other = asyncio.create_task(good.extract("5", EXAMPLE))
    with pytest.raises(
        EnvironmentFailure, match=r"environment sums: answer.pattern on example 7 took longer than 1 sec"
    ):
        await hanging
    assert await other == "5", "a call in flight beside the hang is sent again"
    assert await good.extract("2", EXAMPLE) == "2"
    await bad.close()
    assert await good.extract("3", EXAMPLE) == "3", "the process is shared until the last closes"
    await good.close()
