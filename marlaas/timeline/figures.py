"""The picture of a run: a row of bars for each tenant, over how busy the accelerators were.

Drawn in inches, so that a bar's height is known, with all bars of a stage as one path: a picture of a hundred tenants
and two hundred steps stays a few megabytes. Inside a page colours are CSS variables with a fallback, as in the
evaluation report, and the page decides on light or dark.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator

from marlaas.drawing import GRID, INK, MUTED, drawing, frame, inline_element, svg_document
from marlaas.timeline.clock import Clock, Interval, clock, length_text, merged
from marlaas.timeline.runs import Run
from marlaas.timeline.utilisation import STAGES, spread
from storage import StageRecord
from storage.stages import Stage

# Okabe and Ito's colours, which colour-blind eyes tell apart on white and on black.
STAGE_COLOURS: Mapping[Stage, str] = {
    "rollout": "#0072b2",
    "interact": "#e69f00",
    "update": "#d55e00",
    "publish": "#1c2430",
    "evaluate": "#009e73",
}
DEVICE_COLOURS: Mapping[str, str] = {"sampling": STAGE_COLOURS["rollout"], "training": STAGE_COLOURS["update"]}
_VARIABLES: Mapping[str, str] = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    **{colour: stage for stage, colour in STAGE_COLOURS.items() if colour != INK},
}
# Lanes of a row, from its top to its bottom, with their heights. Stages of one lane follow each other.
_LANES: tuple[tuple[tuple[Stage, ...], float], ...] = (
    (("rollout",), 3),
    (("interact",), 1.2),
    (("update", "publish"), 3),
    (("evaluate",), 2),
)
_LANE_GAP, _ROW_GAP = 0.25, 1.6

# Inches.
_WIDTH, _RIGHT, _TOP, _TITLE, _BETWEEN, _PANEL, _BOTTOM = 12.0, 0.35, 0.33, 0.3, 0.5, 1.15, 0.52
_ALL_ROWS, _LEAST_ROW, _MOST_ROW = 10.0, 0.13, 0.6
_LEGEND_GAP = 0.08
_LABEL_ROW = 0.145
_NAME_LENGTH = 26
_POINTS = 72
_BINS = 200
_DOTS_PER_INCH = 150
_PAUSES_NAMED = 3
_UNITS = ((10 * 3600, 3600, "hours"), (600, 60, "minutes"), (0, 1, "seconds"))
_FONT_SIZE = 9


def inline_svg(run: Run, devices: int) -> str:
    """The picture as an `<svg>` element for a page that sets the colours. The same run gives the same bytes."""
    return inline_element(_drawn(run, devices, "svg", alone=False).decode(), _VARIABLES)


def picture(run: Run, devices: int, kind: Literal["png", "svg"]) -> bytes:
    """The picture as a file of its own, on white."""
    return _drawn(run, devices, kind, alone=True)


def _drawn(run: Run, devices: int, kind: str, alone: bool) -> bytes:
    """Alone it has a title and stands on white; in a page it has neither."""
    time = clock(run.records)
    _, unit, unit_name = next(u for u in _UNITS if time.wall_seconds >= u[0])
    with drawing(_FONT_SIZE):
        row = min(max(_ALL_ROWS / len(run.tenants), _LEAST_ROW), _MOST_ROW)
        rows = row * len(run.tenants)
        height = _TITLE * alone + _TOP + rows + _BETWEEN + _PANEL + _BOTTOM
        left = 0.35 + 0.078 * max(8, *(len(_clipped(name)) for name in run.tenants))
        figure = Figure(figsize=(_WIDTH, height))

        def axes(bottom: float, tall: float) -> Axes:
            across = (_WIDTH - left - _RIGHT) / _WIDTH
            made = figure.add_axes((left / _WIDTH, bottom / height, across, tall / height))
            made.set_xlim(0, max(time.wall_seconds, 1e-9) / unit)
            return made

        gantt, panel = axes(_BOTTOM + _PANEL + _BETWEEN, rows), axes(_BOTTOM, _PANEL)
        _draw_rows(gantt, run.tenants, time, unit, row)
        _draw_busy(panel, run.records, time, unit, devices)
        _draw_pauses((gantt, panel), time, unit)
        panel.set_xlabel(_axis_text(time, unit_name))
        used = {record.stage for record in run.records}
        _draw_legend(gantt, {stage: STAGE_COLOURS[stage] for stage in STAGES if stage in used}, _LEGEND_GAP / rows)
        _draw_legend(panel, DEVICE_COLOURS, _LEGEND_GAP / _PANEL)
        if alone:
            figure.text(left / _WIDTH, 1 - 0.2 / height, _title(run), color=INK, size=11, weight="bold", va="center")
        return _saved(figure, kind, transparent=not alone)


def _draw_rows(axes: Axes, tenants: Mapping[str, Sequence[StageRecord]], time: Clock, unit: float, row: float) -> None:
    used = {record.stage for records in tenants.values() for record in records}
    lanes = _lanes(used)
    for stage in (s for s in STAGES if s in used):
        middle, thick = lanes[stage]
        bars = [
            (start / unit, end / unit, y + middle)
            for y, records in enumerate(tenants.values())
            for start, end in _bars([r for r in records if r.stage == stage], time)
        ]
        vertices = [point for start, end, y in bars for point in ((start, y), (end, y))]
        # A line for each bar: half the bytes of a box.
        path = Path(np.array(vertices), [Path.MOVETO, Path.LINETO] * len(bars))
        path.should_simplify = False
        colour, width = STAGE_COLOURS[stage], thick * row * _POINTS
        bar = {"edgecolor": colour, "facecolor": "none", "linewidth": width, "capstyle": "butt"}
        axes.add_patch(PathPatch(path, gid=f"stage-{stage}", **bar))
    _frame(axes)
    axes.set_ylim(len(tenants), 0)
    step = int(np.ceil(_LABEL_ROW / row))
    names = [_clipped(name) for name in tenants]
    axes.set_yticks(np.arange(0, len(names), step) + 0.5, names[::step], color=INK)
    axes.hlines(range(1, len(names)), 0, 1, transform=axes.get_yaxis_transform(), colors=GRID, linewidth=0.6, zorder=0)
    axes.tick_params(labelbottom=False)


def _lanes(used: set[Stage]) -> dict[Stage, tuple[float, float]]:
    """The middle and the height of each used stage's bars, in rows; a lane that no stage uses takes no room."""
    lanes = [(stages, tall) for stages, tall in _LANES if used & set(stages)]
    whole = sum(tall for _, tall in lanes) + _LANE_GAP * (len(lanes) - 1) + _ROW_GAP
    places: dict[Stage, tuple[float, float]] = {}
    y = _ROW_GAP / 2
    for stages, tall in lanes:
        places |= dict.fromkeys(stages, ((y + tall / 2) / whole, tall / whole))
        y += tall + _LANE_GAP
    return places


def _bars(records: Sequence[StageRecord], time: Clock) -> list[Interval]:
    """Bars of one lane in seconds of `time`: none too short to see, and a hairline between those that touch."""
    hairline = time.wall_seconds / (_WIDTH * _DOTS_PER_INCH)
    starts, ends = (time.seconds(moments) for moments in ([r.start for r in records], [r.end for r in records]))
    ends = np.maximum(starts + hairline, ends - hairline)
    return merged(zip(starts.tolist(), ends.tolist(), strict=True), apart=hairline / 4)


def _draw_busy(axes: Axes, records: Sequence[StageRecord], time: Clock, unit: float, devices: int) -> None:
    edges = np.linspace(0, time.wall_seconds, _BINS + 1)
    width = max(time.wall_seconds, 1e-9) / _BINS
    training = 100 * spread([r for r in records if r.stage == "update"], time, edges) / width
    both = training + 100 * spread([r for r in records if r.stage != "update"], time, edges) / width
    axes.stairs(both, edges / unit, baseline=training, fill=True, color=DEVICE_COLOURS["sampling"])
    axes.stairs(training, edges / unit, fill=True, color=DEVICE_COLOURS["training"])
    _frame(axes, grid="both")
    axes.axhline(100 * devices, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.set_ylim(0, 1.06 * max(100 * devices, float(both.max())))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0f}%")
    axes.set_ylabel("busy" if devices == 1 else f"busy, {devices} devices")
    axes.yaxis.label.set_color(MUTED)


def _draw_pauses(panels: Sequence[Axes], time: Clock, unit: float) -> None:
    for at in time.seconds([end for _, end in time.pauses]) / unit:
        for axes in panels:
            axes.axvline(at, color=MUTED, linewidth=1.2, linestyle=(0, (1, 1.5)))


def _axis_text(time: Clock, unit_name: str) -> str:
    text = f"{unit_name} since the start"
    lengths = [length_text(end - start) for start, end in time.pauses]
    if not lengths:
        return text
    if len(lengths) == 1:
        return f"{text}, with a pause of {lengths[0]} cut out (dotted)"
    if len(lengths) <= _PAUSES_NAMED:
        return f"{text}, with pauses of {', '.join(lengths[:-1])} and {lengths[-1]} cut out (dotted)"
    return f"{text}, with {len(lengths)} pauses, {length_text(time.paused_seconds)} together, cut out (dotted)"


def _draw_legend(axes: Axes, colours: Mapping[Any, str], gap: float) -> None:
    """A legend in one line, `gap` of the axes' height above them."""
    axes.legend(
        handles=[Patch(color=colour, label=name) for name, colour in colours.items()],
        loc="lower right",
        bbox_to_anchor=(1, 1 + gap),
        ncols=len(colours),
        frameon=False,
        labelcolor=INK,
        borderaxespad=0,
        borderpad=0,
        handlelength=1,
        handleheight=0.9,
        columnspacing=1.4,
    )


def _title(run: Run) -> str:
    tenants = len(run.tenants)
    return f"{run.name}: {tenants} tenant{'s' if tenants > 1 else ''}"


def _clipped(name: str) -> str:
    return name if len(name) <= _NAME_LENGTH else name[: _NAME_LENGTH - 1] + "…"


def _frame(axes: Axes, grid: Literal["x", "both"] = "x") -> None:
    frame(axes, grid)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, steps=[1, 2, 5, 10]))


def _saved(figure: Figure, kind: str, transparent: bool) -> bytes:
    if kind == "png":
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=_DOTS_PER_INCH, transparent=transparent)
        return buffer.getvalue()
    return re.sub(r"(\d\.\d\d)\d+", r"\1", svg_document(figure, transparent)).encode()
