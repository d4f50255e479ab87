"""What an answer that ignores the question would score: the line that learning must clear."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from marlaas.environments.protocol import Example


def commonest_answer(examples: Iterable[Example]) -> tuple[str, float]:
    """The commonest expected answer and its share of all examples; of equals the first in the alphabet.

    Examples without an expected answer count in the total only. Without any answer: ("", 0.0).
    """
    answers = [e.answer for e in examples]
    counts = Counter(a.strip() for a in answers if a is not None)
    if not counts:
        return "", 0.0
    answer = min(counts, key=lambda a: (-counts[a], a))
    return answer, counts[answer] / len(answers)
