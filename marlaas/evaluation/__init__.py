"""Evaluation of an adapter version: statistics, and the report as data, HTML and Markdown."""

from marlaas.evaluation.render import render_html, render_markdown, report_table
from marlaas.evaluation.report import DECODINGS, CurvePoint, build_report
from marlaas.evaluation.schema import EvaluationReport

__all__ = [
    "DECODINGS",
    "CurvePoint",
    "EvaluationReport",
    "build_report",
    "render_html",
    "render_markdown",
    "report_table",
]
