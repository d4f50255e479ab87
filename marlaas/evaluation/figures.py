"""The report's figures as inline SVG.

Drawn with matplotlib's object interface. Colours leave as CSS variables with a fallback (`var(--ink, #...)`), so the
page they are put into decides on light or dark; text stays text. The same data gives the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from marlaas.drawing import GRID, INK, MUTED, drawing, frame, inline_element, svg_document
from marlaas.evaluation.schema import DecodingResult
from marlaas.evaluation.statistics import CommonAnswer
from marlaas.evaluation.wording import LABELS, percent

COLOURS: Mapping[str, str] = {
    "ink": INK,
    "muted": MUTED,
    "grid": GRID,
    "base": "#8a94a3",
    "greedy": "#2a6fdb",
    "cold": "#d3700f",
    "saturated": "#a06cc4",
}
HEALTH: Mapping[str, str] = {
    "entropy": "Entropy, nats a token",
    "kl_to_base": "KL to the base model, nats a token",
    "logprob_gap": "Log-prob gap, sampler to trainer",
}
_SIZE = (4.4, 3.3)
_SMALL_SIZE = (3.3, 1.9)
SMOOTH_FROM = 40
_FONT_SIZE = 10


def reward_figure(curve: Sequence[Mapping[str, float]]) -> str:
    """Mean reward by training step with a band of one standard deviation, over the share of saturated groups.

    Every point needs "step" and "reward_mean"; "reward_std" and "saturated_share" are drawn where they are. From
    SMOOTH_FROM points on, the thick line and its band are moving averages.
    """
    with drawing(_FONT_SIZE):
        saturated = any("saturated_share" in point for point in curve)
        figure = Figure(figsize=_SIZE, layout="constrained")
        if saturated:
            top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
            _draw_saturated(bottom, curve)
        else:
            top = bottom = figure.subplots()
        _draw_reward(top, curve)
        bottom.set_xlabel("training step")
        bottom.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        return _svg(figure, "reward")


def accuracy_figure(results: Sequence[DecodingResult], commonest: CommonAnswer | None) -> str:
    """Accuracy by decoding with its interval, and a dashed line at the commonest answer's share."""
    with drawing(_FONT_SIZE):
        figure = Figure(figsize=_SIZE, layout="constrained")
        axes = figure.subplots()
        _frame(axes, grid="x")
        for y, result in enumerate(results):
            a = result.accuracy
            axes.barh(y, a.share, height=0.5, color=COLOURS[result.decoding])
            axes.plot([a.low, a.high], [y, y], color=COLOURS["ink"], linewidth=1.6, marker="|", markersize=8)
            _write(axes, percent(a.share), a.high, y)
        axes.set_yticks(range(len(results)), [LABELS[r.decoding] for r in results], color=COLOURS["ink"])
        axes.set_ylim(len(results) - 0.5, -0.5)
        _draw_commonest(axes, commonest)
        _scale_shares(axes, max([r.accuracy.high for r in results] + [commonest.share if commonest else 0]))
        return _svg(figure, "accuracy")


def health_figures(curve: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """A small curve by title for each of entropy, KL to the base model and log-prob gap that some point has."""
    return {title: _metric_figure(curve, name) for name, title in HEALTH.items() if any(name in p for p in curve)}


def _metric_figure(curve: Sequence[Mapping[str, float]], name: str) -> str:
    with drawing(_FONT_SIZE):
        figure = Figure(figsize=_SMALL_SIZE, layout="constrained")
        axes = figure.subplots()
        _frame(axes)
        steps, values = _series(curve, name)
        axes.plot(
            steps, values, color=COLOURS["greedy"], linewidth=1.4, marker=_marker(steps), markersize=3, clip_on=False
        )
        axes.set_ylim(min(0.0, float(values.min())), max(float(values.max()) * 1.15, 1e-6))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
        return _svg(figure, name)


def _draw_reward(axes: Axes, curve: Sequence[Mapping[str, float]]) -> None:
    _frame(axes)
    colour = COLOURS["greedy"]
    steps, mean = _series(curve, "reward_mean")
    spread = np.array([point.get("reward_std", 0.0) for point in curve if "reward_mean" in point])
    if len(steps) >= SMOOTH_FROM:
        axes.plot(steps, mean, color=colour, linewidth=0.8, alpha=0.45)
        mean, spread = _smoothed(mean), _smoothed(spread)
    axes.fill_between(steps, mean - spread, mean + spread, color=colour, alpha=0.14, linewidth=0)
    axes.plot(steps, mean, color=colour, linewidth=2.2, marker=_marker(steps), markersize=4)
    _write(axes, f"{mean[-1]:.2f}", steps[-1], mean[-1])
    if mean.min() >= 0 and mean.max() <= 1:
        axes.set_ylim(0, 1.02)
    axes.set_ylabel("reward", color=COLOURS["ink"])


def _draw_saturated(axes: Axes, curve: Sequence[Mapping[str, float]]) -> None:
    _frame(axes)
    steps, share = _series(curve, "saturated_share")
    axes.fill_between(steps, 0, share, color=COLOURS["saturated"], alpha=0.3, linewidth=0)
    axes.plot(steps, share, color=COLOURS["saturated"], linewidth=1.4, marker=_marker(steps), markersize=3)
    axes.set_ylim(0, 1.05)
    axes.set_yticks([0, 0.5, 1])
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_ylabel("saturated", color=COLOURS["ink"])


def _draw_commonest(axes: Axes, commonest: CommonAnswer | None) -> None:
    if commonest is None:
        return
    label = f"always the commonest answer, {percent(commonest.share)}"
    axes.axvline(commonest.share, color=COLOURS["ink"], linewidth=1.3, linestyle=(0, (4, 3)), label=label)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), frameon=False, labelcolor=COLOURS["muted"], borderaxespad=0)


def _scale_shares(axes: Axes, highest: float) -> None:
    """An x axis from 0% to a little beyond `highest`, with room for the number written there and no tick over 100%."""
    limit = min(1.15, highest * 1.2 + 0.02)
    ticks = MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]).tick_values(0, limit)
    axes.set_xticks([tick for tick in ticks if 0 <= tick <= min(1, limit)])
    axes.set_xlim(0, limit)
    axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:.3g}%")
    axes.set_xlabel("held-out examples answered correctly")


def _write(axes: Axes, text: str, x: float, y: float) -> None:
    """Writes `text` to the right of a point."""
    ink = COLOURS["ink"]
    axes.annotate(text, (x, y), (8, 0), textcoords="offset points", va="center", color=ink, weight="bold")


def _frame(axes: Axes, grid: Literal["x", "y"] = "y") -> None:
    frame(axes, grid)
    axes.margins(x=0.03)


def _series(curve: Sequence[Mapping[str, float]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values, float64 `[points that have the metric]` each."""
    found = [(point["step"], point[name]) for point in curve if name in point]
    return np.array([step for step, _ in found]), np.array([value for _, value in found])


def _smoothed(values: np.ndarray) -> np.ndarray:
    """The mean of each point's neighbourhood, a fifteenth of the curve wide and narrower at its ends."""
    half = max(1, len(values) // 30)
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


def _marker(steps: np.ndarray) -> str:
    return "o" if len(steps) < SMOOTH_FROM else ""


def _svg(figure: Figure, name: str) -> str:
    """The figure as an `<svg>` element; ids begin with `name`, so that several fit into one page."""
    text = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", svg_document(figure, transparent=True))
    return inline_element(text, {colour: variable for variable, colour in COLOURS.items()})
