"""What all figures share: matplotlib's settings, a frame, and SVG that takes its colours from the page."""

from __future__ import annotations

import contextlib
import io
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, MUTED, GRID = "#1c2430", "#5d6878", "#e1e5eb"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "marlaas",
    "font.family": "DejaVu Sans",
    "text.parse_math": False,
}
# Matplotlib reads these settings from a table of the process while it draws, so only one thread may.
_drawing = threading.Lock()


@contextlib.contextmanager
def drawing(font_size: int) -> Iterator[None]:
    """Holds the settings while a figure is made and saved."""
    with _drawing, matplotlib.rc_context({**_STYLE, "font.size": font_size}):
        yield


def frame(axes: Axes, grid: Literal["x", "y", "both"]) -> None:
    """A line below, a grid behind, and muted labels."""
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    axes.tick_params(colors=MUTED, length=0)
    axes.xaxis.label.set_color(MUTED)
    axes.grid(axis=grid, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def svg_document(figure: Figure, transparent: bool) -> str:
    """The figure as an SVG document; the same figure gives the same text."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=transparent, metadata=nothing)
    return re.sub(r"<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.DOTALL)


def inline_element(document: str, variables: Mapping[str, str]) -> str:
    """The `<svg>` element, as wide as its page lets it be, with colours as CSS variables and a fallback.

    variables: the name of each colour's.
    """
    text = re.sub(r' (width|height)="[\d.]+pt"', "", document[document.index("<svg") :], count=2)
    for colour, variable in variables.items():
        text = text.replace(colour, f"var(--{variable}, {colour})")
    return text.strip()
