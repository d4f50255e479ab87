"""The report for people: one HTML file, Markdown and a table for the Prefect UI."""

from __future__ import annotations

import operator
import re
from functools import cache

import jinja2
from markupsafe import Markup

from marlaas.evaluation.figures import SMOOTH_FROM, accuracy_figure, health_figures, reward_figure
from marlaas.evaluation.schema import Comparison, EvaluationReport
from marlaas.evaluation.wording import LABELS, clipped, p_text, percent, points

# C0 and C1 controls but tab and newline, and the marks that reorder text: shown, never obeyed.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]")
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|~$&])")


def render_html(report: EvaluationReport) -> str:
    """The report as one HTML file that needs nothing else: no script, no font, no image from elsewhere.

    Completions and other text from tenants are escaped, and the page's content policy forbids scripts and requests.
    """
    curve = [point for point in report.curve if "reward_mean" in point]
    return (
        _templates()
        .get_template("report.html.j2")
        .render(
            report=report,
            accuracy_svg=Markup(accuracy_figure(report.results, report.commonest)),
            reward_svg=Markup(reward_figure(curve)) if curve else None,
            health_svgs={title: Markup(svg) for title, svg in health_figures(report.curve).items()},
            last_point=curve[-1] if curve else {},
            smoothed=len(curve) >= SMOOTH_FROM,
            steps=[point["step"] for point in curve],
        )
    )


def render_markdown(report: EvaluationReport) -> str:
    """A compact summary in Markdown: headline, warnings, accuracies and comparisons."""
    rows = report_table(report)
    header = list(rows[0])
    lines = [
        f"## {_escaped(report.title)}",
        f"**{_escaped(report.headline)}**",
        "\n".join(f"- ⚠ {_escaped(text)}" for text in report.warnings),
        "\n".join(
            [
                "| " + " | ".join(header) + " |",
                "|" + " --- |" * len(header),
                *("| " + " | ".join(_escaped(row[key]) for key in header) + " |" for row in rows),
            ]
        ),
        "\n".join(f"- {_escaped(c.verdict)} {_escaped(_interval(c))}" for c in report.comparisons),
        f"{_escaped(report.environment)} · {report.examples} held-out examples · base model "
        f"{_escaped(report.base_model)} · CoLD alpha {report.alpha:g}, beta {report.beta:g} · "
        f"{report.created_at:%Y-%m-%d %H:%M %Z}",
    ]
    return "\n\n".join(line for line in lines if line) + "\n"


def report_table(report: EvaluationReport) -> list[dict[str, str]]:
    """One row a decoding and one for the commonest answer, as text, for a table artifact."""
    level = f"{100 * report.confidence:g}% interval"
    table = [
        {
            "decoding": LABELS[result.decoding],
            "accuracy": percent(result.accuracy.share),
            level: f"{percent(result.accuracy.low)} to {percent(result.accuracy.high)}",
            "mean reward": f"{result.reward_mean:.3f}",
            "median seconds": f"{result.cost.seconds_median:.3f}",
            "tokens an example": f"{result.cost.tokens_mean:.1f}",
        }
        for result in report.results
    ]
    if report.commonest is not None:
        line = f"{LABELS['commonest']} ({clipped(report.commonest.answer, 40)})"
        table.append(dict.fromkeys(table[0], "") | {"decoding": line, "accuracy": percent(report.commonest.share)})
    return table


@cache
def _templates() -> jinja2.Environment:
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("marlaas.evaluation"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"percent": percent, "points": points, "p": p_text, "clipped": clipped, "visible": _visible}
    templates.filters["combined"] = operator.or_
    templates.globals["labels"] = LABELS
    return templates


def _visible(text: str) -> str:
    """Control characters and marks that reorder text as the replacement character."""
    return _UNPRINTABLE.sub("�", text.replace("\r\n", "\n"))


def _escaped(text: str) -> str:
    """`text` on one line as Markdown shows it, with neither formatting nor HTML."""
    return _MARKDOWN.sub(r"\\\1", " ".join(_visible(text).split()))


def _interval(comparison: Comparison) -> str:
    paired = comparison.difference
    return f"({points(paired.difference)} points, {points(paired.low)} to {points(paired.high)})"
