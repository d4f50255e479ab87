"""The calculator: arithmetic without eval, bounded so that no expression takes more than a moment."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from marlaas.environments.tools.parameters import Parameters, ToolError, function_schema

MAX_EXPRESSION = 200
"""Characters, which also bounds nesting."""

MAX_BITS = 4096
"""Of any integer on the way; about 1200 digits."""

Number = int | float

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_SIGNS: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "ceil": math.ceil,
    "exp": math.exp,
    "floor": math.floor,
    "gcd": math.gcd,
    "lcm": math.lcm,
    "log": math.log,
    "max": max,
    "min": min,
    "round": lambda number, digits=0: round(number, max(-300, min(300, digits))) if digits else round(number),
    "sqrt": math.sqrt,
}
_CONSTANTS = {"pi": math.pi, "e": math.e}
_SPELLINGS = str.maketrans({"\u00d7": "*", "\u00f7": "/", "\u2212": "-"})
_ALLOWED = f"allowed are numbers, + - * / // % **, parentheses, {', '.join((*_FUNCTIONS, *_CONSTANTS))}"


class Calculator:
    """The tool. It runs where it is called: what it does is bounded."""

    name = "calculator"

    def __init__(self) -> None:
        self._parameters = Parameters({"expression": str}, docs={"expression": "Such as (12 + 7) * 3"})
        self._schema = function_schema(self.name, "Evaluates an arithmetic expression.", self._parameters.schema)

    async def schema(self) -> dict[str, Any]:
        """One parameter: the expression."""
        return self._schema

    async def call(self, arguments: dict[str, Any]) -> str:
        """The value. Raises ToolError."""
        return calculate(self._parameters.checked(arguments)["expression"])

    async def close(self) -> None:
        """There is nothing to free."""


def calculate(expression: str) -> str:
    """The value of an arithmetic expression: exact for integers, else to 12 digits. Raises ToolError."""
    if len(expression) > MAX_EXPRESSION:
        raise ToolError(f"the expression has {len(expression)} characters; at most {MAX_EXPRESSION} are allowed")
    try:
        tree = ast.parse(expression.translate(_SPELLINGS).strip(), mode="eval")
        value = _value(tree.body)
    except (SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ToolError(f"{expression!r} cannot be evaluated: {reason[:120]}; {_ALLOWED}") from None
    if isinstance(value, int):
        return str(value)
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.12g}"


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _SIGNS:
            return _bounded(_SIGNS[type(sign)](_value(operand)))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _bounded(_OPERATORS[type(sign)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*map(_value, arguments)))
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
    raise ValueError(f"{ast.unparse(node)!r:.40} is not arithmetic")


def _power(base: Number, exponent: Number) -> Number:
    # A negative exponent makes a float, whose size needs no bound.
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0 and abs(base) > 1:
        _bits(base.bit_length() * exponent)
    return _bounded(base**exponent)


def _bounded(value: Any) -> Number:
    if isinstance(value, int):
        _bits(value.bit_length())
        return value
    if not isinstance(value, float):
        raise ValueError(f"the result {value!r:.40} is not a real number")
    if not math.isfinite(value):
        raise ValueError("the result is too large")
    return value


def _bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise ValueError("a number on the way has more than 1200 digits")
