import contextlib
import random
import time

import pytest

from marlaas.environments.tools.calculator import Calculator, calculate
from marlaas.environments.tools.parameters import ToolError


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        (" (2 + 3) * 4 ", "20"),
        ("7 / 2", "3.5"),
        ("6 / 3", "2"),
        ("7 // 2", "3"),
        ("-7 % 3", "2"),
        ("2 ** 10", "1024"),
        ("2 ** -1", "0.5"),
        ("2 ** 0.5", "1.41421356237"),
        ("0.1 + 0.2", "0.3"),
        ("sqrt(16) + abs(-3)", "7"),
        ("round(2.567, 2)", "2.57"),
        ("round(2.5)", "2"),
        ("max(1, 7, 3) - min(4, 2)", "5"),
        ("floor(2.7) + ceil(2.1)", "5"),
        ("gcd(12, 18) * lcm(4, 6)", "72"),
        ("2 * pi", "6.28318530718"),
        ("log(100, 10)", "2"),
        ("6 \u00d7 7 \u00f7 2 \u2212 1", "20"),
        ("1e20", "1e+20"),
        ("123456789123456789 * 10", "1234567891234567890"),
    ],
)
def test_arithmetic_is_evaluated(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("", "cannot be evaluated"),
        ("2 +", "invalid syntax; allowed are numbers, + - * / // % **, parentheses, abs"),
        ("1 / 0", "division by zero"),
        ("sqrt(-1)", "math domain error"),
        ("(-8) ** 0.5", "is not a real number"),
        ("2 ^ 3", "is not arithmetic"),
        ("__import__('os').system('x')", "is not arithmetic"),
        ("(1).real", "is not arithmetic"),
        ("[1][0]", "is not arithmetic"),
        ("abs", "is not arithmetic"),
        ("x + 1", "'x' is not arithmetic"),
        ("True + 1", "is not arithmetic"),
        ("'a' * 9", "is not arithmetic"),
        ("1j", "is not arithmetic"),
        ("min()", "expected at least 1 argument"),
        ("exp(1000)", "math range error"),
        ("1e308 * 10", "the result is too large"),
        ("1 if 1 else 2", "is not arithmetic"),
        ("2 = 2", "invalid syntax"),
        ("\x00", "null bytes"),
        ("\ud800", "cannot be evaluated"),
    ],
)
def test_anything_else_is_refused_with_the_reason_and_what_is_allowed(expression, reason):
    with pytest.raises(ToolError) as error:
        calculate(expression)
    assert reason in str(error.value)
    assert "allowed are numbers" in str(error.value)


@pytest.mark.parametrize(
    "expression",
    [
        "9 ** 9 ** 9",
        "9 ** 9 ** 9 ** 9",
        "(9 ** 999) ** 999",
        "10 ** 4000",
        "round(1, -10 ** 9)",
        "round(9 ** 999, -10 ** 900)",
        "*".join(["(9**999)"] * 22),
        "(" * 99 + "1" + ")" * 99,
        "-" * 199 + "1",
        "1 ** 10 ** 999",
        "(-1) ** 10 ** 999",
        "0.5 ** 10 ** 999",
        "lcm(" + ",".join(str(n) for n in range(900, 945)) + ")",
        "9" * 5000,
        "1" + "+1" * 10**6,
    ],
)
def test_no_expression_takes_more_than_a_moment(expression):
    started = time.perf_counter()
    with contextlib.suppress(ToolError):
        assert len(calculate(expression)) < 1300
    assert time.perf_counter() - started < 0.5


@pytest.mark.parametrize("seed", range(10))
def test_any_text_gives_a_value_or_a_tool_error(seed):
    rng = random.Random(seed)
    pieces = ["1", "2.5", "9", "+", "-", "*", "/", "//", "%", "**", "(", ")", ",", " ", "abs(", "round(", "max(", "pi"]
    pieces += ["'", "x", "[", "]", ":", "lambda ", "1j", "e", "gcd(", "~", "<", ".", "\\", "#", "\n", "{", "}"]
    for _ in range(300):
        with contextlib.suppress(ToolError):
            assert calculate("".join(rng.choices(pieces, k=rng.randint(1, 20))))


async def test_the_tool_takes_one_text():
    tool = Calculator()
    schema = (await tool.schema())["function"]
    assert schema["name"] == "calculator"
    assert schema["parameters"]["required"] == ["expression"]
    assert schema["parameters"]["properties"]["expression"]["type"] == "string"
    assert await tool.call({"expression": "1+1"}) == "2"
    for arguments, problem in (
        ({}, "expression: is missing; parameters are expression"),
        ({"expression": 5}, "expression: input should be a valid string"),
        ({"expression": "1", "x": 1}, "x: is not a parameter"),
    ):
        with pytest.raises(ToolError, match=problem):
            await tool.call(arguments)
