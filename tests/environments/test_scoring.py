import asyncio
from fractions import Fraction

import pytest

from marlaas.environments.hosting import Served, SharedHost
from marlaas.environments.protocol import Example, question_key
from marlaas.environments.scoring import exact_score, numeric_score, parse_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("-7.", -7),
        ("+7.50", Fraction(15, 2)),
        ("1,234.5", Fraction(2469, 2)),
        ("$ 1,000", 1000),
        ("40%", 40),
        ("\u22123", -3),
        ("3/4", Fraction(3, 4)),
        ("1/0", None),
        ("1e-3", Fraction(1, 1000)),
        ("1e9999999999", None),
        ("9" * 100, None),
        ("seven", None),
        ("1 / 2 / 3", None),
        ("nan", None),
        ("inf", None),
        ("", None),
    ],
)
def test_numbers_are_read_as_people_write_them(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize(
    ("answer", "expected", "score"),
    [
        ("0.1", "1/10", 1.0),
        ("1,000", "$1000", 1.0),
        ("7.", "7.0", 1.0),
        ("7", "8", 0.0),
        ("x", "7", 0.0),
        ("x", "x", 0.0),
    ],
)
def test_numeric_score(answer, expected, score):
    assert numeric_score(answer, expected) == score


def test_exact_score_minds_case_and_not_outer_blanks():
    assert exact_score(" Paris ", "Paris\n") == 1.0
    assert exact_score("paris", "Paris") == 0.0


async def test_math_score_off_the_main_thread():
    host = SharedHost(Served("marlaas.environments.scoring:MathWorker"))
    pairs = [
        (r"\frac{1}{2}", "0.5"),
        ("x^2+2x+1", "(x+1)^2"),
        ("$4$", "4"),
        (r"\boxed{3}", "3"),
        ("5", "4"),
        ("?", "4"),
    ]
    scores = await asyncio.gather(*(host.call("score", a, b, seconds=60, what="step") for a, b in pairs))
    assert scores == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    await host.close()


def test_question_key_minds_words_only():
    keys = {question_key(Example("a", text)) for text in ("What is  2 + 2?", "what is 2 + 2?\n")}
    assert len(keys) == 1
    assert question_key(Example("a", "What is 2 + 3?")) not in keys
