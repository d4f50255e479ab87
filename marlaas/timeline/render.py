"""The timeline for people: tables for a terminal, and one HTML page with the picture and the same tables."""

from __future__ import annotations

from functools import cache

import jinja2
from markupsafe import Markup

from marlaas.timeline.clock import length_text
from marlaas.timeline.figures import inline_svg
from marlaas.timeline.runs import Run
from marlaas.timeline.utilisation import RunUse, utilisation


def render_html(run: Run, devices: int) -> str:
    """The run as one HTML file that needs nothing else, readable in light and dark."""
    use = utilisation(run, devices)
    return (
        _templates()
        .get_template("timeline.html.j2")
        .render(
            use=use,
            picture=Markup(inline_svg(run, devices)),
            facts=fact_table(use),
            tenants=tenant_table(use),
        )
    )


def fact_table(use: RunUse) -> dict[str, str]:
    """What is said of the whole run, as text by name."""
    devices = f"{use.devices} device{'s' if use.devices > 1 else ''}"
    stages = ", ".join(f"{stage} {_percent(share)}" for stage, share in use.busy_by_stage.items())
    facts = {"wall time": length_text(use.wall_seconds)}
    if use.pauses:
        facts["pauses, not counted"] = f"{use.pauses}, {length_text(use.paused_seconds)} in all"
    facts |= {
        "busy": f"{_percent(use.busy_share)} of {devices}" + (f" ({stages})" if stages else ""),
        "tenants at work at once": f"{use.overlap:.1f} of {len(use.tenants)} on average",
        "fairness (Jain)": "-"
        if use.fairness is None
        else f"{use.fairness:.3f} over the {length_text(use.fair_seconds)} in which all were active",
    }
    if use.silent:
        facts["no stage recorded of"] = ", ".join(use.silent)
    return facts


def tenant_table(use: RunUse) -> list[dict[str, str]]:
    """One row a tenant, as text by column; the same columns in every row."""
    return [
        {
            "tenant": t.tenant,
            "steps": str(t.steps),
            "sampled": f"{t.sampled_tokens:,}",
            "trained on": f"{t.trained_tokens:,}",
            "tokens/s": f"{t.tokens_per_second:.1f}",
            "device s": f"{t.device_seconds:,.1f}",
            "share": _percent(t.device_share),
            "step s, mean": _number(t.step_seconds_mean),
            "median": _number(t.step_seconds_median),
            "environment": _percent(t.environment_share),
            "s a call": _number(t.call_seconds),
        }
        for t in use.tenants
    ]


@cache
def _templates() -> jinja2.Environment:
    # The look is the evaluation report's: its style sheet is included.
    return jinja2.Environment(
        loader=jinja2.ChoiceLoader(
            [jinja2.PackageLoader("marlaas.timeline"), jinja2.PackageLoader("marlaas.evaluation")]
        ),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
