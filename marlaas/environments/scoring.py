"""When an answer to a question of a data file counts as right: exactly, as a number, or as mathematics."""

from __future__ import annotations

import re
from fractions import Fraction

# At most 64 characters and exponents of at most three digits: huge powers of ten would be computed in full.
_PLAIN_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,3})?")
_MAX_NUMBER = 64
_MAX_MATHEMATICS = 2000  # characters; parsing takes time that grows fast with length


def exact_score(answer: str, expected: str) -> float:
    """1.0 when the texts are equal but for blanks around them."""
    return float(answer.strip() == expected.strip())


def numeric_score(answer: str, expected: str) -> float:
    """1.0 when both are the same number, as `parse_number` reads them; exact, without rounding."""
    value = parse_number(answer)
    return float(value is not None and value == parse_number(expected))


def parse_number(text: str) -> Fraction | None:
    """The number that a text is, or None: 1,234.50 and $5 and 40% (40) and 3/4 and 1e-3, with or without a last dot."""
    text = re.sub(r"[\s,$€£%]", "", text.replace("\u2212", "-")).removesuffix(".")
    if len(text) > _MAX_NUMBER:
        return None
    top, slash, bottom = text.partition("/")
    if not _PLAIN_NUMBER.fullmatch(top) or (slash and not _PLAIN_NUMBER.fullmatch(bottom)):
        return None
    if not slash:
        return Fraction(top)
    divisor = Fraction(bottom)
    return Fraction(top) / divisor if divisor else None


class MathWorker:
    """What the host process of math scoring serves. math-verify's own time limits are signals, which work in main
    threads only; here the caller's limit ends the process instead."""

    def __init__(self) -> None:
        import math_verify

        self._library = math_verify

    def score(self, answer: str, expected: str) -> float:
        """1.0 when math-verify finds the two equal; either may be LaTeX or plain, with or without $."""
        if len(answer) > _MAX_MATHEMATICS:
            return 0.0
        found, wanted = (self._parse(text) for text in (answer, expected))
        return float(self._library.verify(wanted, found, timeout_seconds=None))

    def _parse(self, text: str) -> list[object]:
        marked = text if "$" in text or "\\boxed" in text else f"${text}$"
        parsed: list[object] = self._library.parse(marked, parsing_timeout=None)
        return parsed
