"""What the numbers of an evaluation mean, in plain sentences: verdicts, the headline and the warnings."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from marlaas.evaluation.schema import Comparison, Contender, DecodingResult
from marlaas.evaluation.statistics import CommonAnswer, PairedDifference

NAMES: Mapping[Contender, str] = {
    "base": "the base model",
    "greedy": "the adapter (greedy)",
    "cold": "CoLD",
    "commonest": "always giving the commonest answer",
}
LABELS: Mapping[Contender, str] = {
    "base": "Base model, greedy",
    "greedy": "Adapter, greedy",
    "cold": "Adapter, CoLD",
    "commonest": "Always the commonest answer",
}
_MINUS = "\N{MINUS SIGN}"
_MANY = 0.1
_MONOTONE = 0.9
_WIDE = 0.1
_SATURATED = 0.5


def percent(share: float) -> str:
    """0.415 as "41.5%"."""
    return f"{100 * share:.1f}%"


def points(difference: float) -> str:
    """A difference of shares, with its sign: 0.415 as "+41.5"."""
    return f"{100 * difference:+.1f}".replace("+0.0", "0.0").replace("-0.0", "0.0").replace("-", _MINUS)


def p_text(p_value: float) -> str:
    """A p-value as "p = 0.012" or "p < 0.001", with spaces that do not break."""
    text = "p < 0.001" if p_value < 0.001 else f"p = {p_value:.3f}" if p_value < 0.9995 else "p = 1"
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def clipped(text: str, length: int) -> str:
    """`text` on one line, cut to at most `length` characters."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1] + "…"


def verdict(
    candidate: Contender, reference: Contender, paired: PairedDifference, p_adjusted: float, distinguishable: bool
) -> str:
    """One sentence on who is right more often, and whether chance explains it."""
    a, b, gap = NAMES[candidate], NAMES[reference], points(paired.difference).lstrip("+" + _MINUS)
    if not paired.gained + paired.lost:
        text = f"{a} and {b} are right on exactly the same examples."
    elif distinguishable:
        more = "more" if paired.difference > 0 else "less"
        text = (
            f"{a} is right {more} often than {b}, by {gap} points: beyond what chance explains ({p_text(p_adjusted)})."
        )
    else:
        text = (
            f"{a} and {b} cannot be told apart on {paired.total} examples: "
            f"a gap of {gap} points is within chance ({p_text(p_adjusted)})."
        )
    return text[0].upper() + text[1:]


def headline(
    results: Mapping[Contender, DecodingResult],
    comparisons: Mapping[tuple[Contender, Contender], Comparison],
    commonest: CommonAnswer | None,
    confidence: float,
) -> str:
    """What was learned and how sure that is, in a sentence."""
    gap = comparisons["greedy", "base"].difference
    now, before = percent(results["greedy"].accuracy.share), percent(results["base"].accuracy.share)
    sure = f"({points(gap.difference)} points; {100 * confidence:g}% interval {points(gap.low)} to {points(gap.high)})"
    right = f"it gets {now} of {gap.total} held-out examples right"
    if not comparisons["greedy", "base"].distinguishable:
        return f"No learning can be shown for this adapter: {right}, the base model {before} {sure}."
    if gap.difference < 0:
        return f"This adapter is worse than the base model: {right}, down from {before} {sure}."
    change = f"{right}, up from {before} with the base model {sure}"
    above = comparisons.get(("greedy", "commonest"))
    if commonest is None or above is None or (above.distinguishable and above.difference.difference > 0):
        return f"The adapter learned: {change}."
    line = f"but always answering “{clipped(commonest.answer, 40)}” gets {percent(commonest.share)}"
    if above.difference.difference > 0:
        return f"The adapter improved, perhaps only by guessing: {change}, {line}."
    return f"The adapter collapsed rather than learned: {change}, {line}."


def warnings(
    results: Mapping[Contender, DecodingResult],
    comparisons: Mapping[tuple[Contender, Contender], Comparison],
    commonest: CommonAnswer | None,
    curve: Sequence[Mapping[str, float]],
) -> list[str]:
    """What a reader must know before trusting or using the adapter, the gravest first."""
    return [
        *_about_commonest(results["greedy"], comparisons, commonest),
        *_about_cold(results, comparisons["cold", "greedy"]),
        *(text for result in results.values() for text in _about_replies(result)),
        *_about_precision(results.values()),
        *_about_curve(curve),
    ]


def _about_commonest(
    greedy: DecodingResult,
    comparisons: Mapping[tuple[Contender, Contender], Comparison],
    commonest: CommonAnswer | None,
) -> Iterator[str]:
    if commonest is not None:
        above = comparisons["greedy", "commonest"]
        scores = f"({percent(greedy.accuracy.share)} against {percent(commonest.share)})"
        if above.difference.difference <= 0:
            yield (
                f"The adapter is not above always answering the commonest answer {scores}: "
                "a gain up to that line is collapse, not learning."
            )
        elif not above.distinguishable:
            yield (
                f"The adapter is not clearly above always answering the commonest answer {scores}, "
                f"{p_text(above.p_adjusted)}: this may be collapse rather than learning."
            )
    given = greedy.given
    if given is not None and given.share >= _MONOTONE:
        yield f"The adapter answers “{clipped(given.answer, 40)}” on {percent(given.share)} of the examples."


def _about_cold(results: Mapping[Contender, DecodingResult], cold: Comparison) -> Iterator[str]:
    if cold.difference.difference < 0:
        sure = "beyond what chance explains" if cold.distinguishable else "a difference within chance"
        yield (
            f"CoLD lowered accuracy: {percent(results['cold'].accuracy.share)} against "
            f"{percent(results['greedy'].accuracy.share)} with greedy decoding, {sure} ({p_text(cold.p_adjusted)})."
        )


def _about_replies(result: DecodingResult) -> Iterator[str]:
    shares = [
        (result.truncated_share, "of the replies were cut off by the token limit"),
        (result.unanswered_share, "have no answer that could be found"),
    ]
    texts = [f"{percent(share)} {what}" for share, what in shares if share > _MANY]
    if texts:
        yield f"{LABELS[result.decoding]}: {' and '.join(texts)}."


def _about_precision(results: Collection[DecodingResult]) -> Iterator[str]:
    half = max(result.accuracy.high - result.accuracy.low for result in results) / 2
    if half > _WIDE:
        total = next(iter(results)).accuracy.total
        yield (
            f"{total} examples are few: accuracies are known to about ±{100 * half:.0f} points only. "
            "Raise evaluation.examples to tell decodings apart."
        )


def _about_curve(curve: Sequence[Mapping[str, float]]) -> Iterator[str]:
    last = [point["saturated_share"] for point in curve[-5:] if "saturated_share" in point]
    if last and sum(last) / len(last) > _SATURATED:
        yield (
            f"In the last steps {percent(sum(last) / len(last))} of the groups were saturated (all rewards equal) and "
            "taught nothing: harder or more varied examples would."
        )
