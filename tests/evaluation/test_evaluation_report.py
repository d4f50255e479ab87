"""The report: what it says, what it refuses, and that its renderings are safe and stable."""

from datetime import UTC, datetime
from html.parser import HTMLParser

import matplotlib
import numpy as np
import pytest

from marlaas.evaluation import EvaluationReport, build_report, render_html, render_markdown, report_table
from storage.evaluations import EvaluationRow

HOSTILE = "</div><script>alert(1)</script><img src=x onerror=alert(2)> {{ 7*7 }} | **b** \x00\u202egnol"


def row(i, answer, said, **changes):
    fields = {
        "example_id": f"e{i:03d}",
        "prompt": f"question {i}",
        "answer": answer,
        "completion": f"it is {said}",
        "extracted": said,
        "reward": float(said == answer),
        "correct": said == answer,
        "tokens": 10,
        "seconds": 0.5,
        "finish_reason": "stop",
    }
    return EvaluationRow(**(fields | changes))


def evaluation(base=30, greedy=70, cold=72, n=100):
    """Rows of `n` examples with ten answers, of which each decoding gets the given number right, at random."""
    rng = np.random.default_rng(3)
    answers = [str(i % 10) for i in range(n)]
    rows = {}
    for decoding, right in (("base", base), ("greedy", greedy), ("cold", cold)):
        hits = set(rng.permutation(n)[:right].tolist())
        rows[decoding] = [row(i, a, a if i in hits else str((int(a) + 1) % 10)) for i, a in enumerate(answers)]
    return rows


def always(said, answers):
    return [row(i, answer, said) for i, answer in enumerate(answers)]


def curve(steps=12):
    return [
        {
            "step": float(i),
            "reward_mean": 0.2 + 0.5 * i / steps,
            "reward_std": 0.3,
            "saturated_share": 0.02 * i,
            "entropy": 1.0 / (1 + i),
            "kl_to_base": 0.01 * i,
            "logprob_gap": 0.003,
        }
        for i in range(steps)
    ]


def report_of(rows, **changes):
    arguments = {
        "tenant": "shop",
        "job": "sums",
        "version": 4,
        "base_model": "tiny",
        "environment": "chain_sum",
        "alpha": 0.1,
        "beta": 0.5,
        "confidence": 0.95,
        "created_at": datetime(2026, 12, 1, 9, 30, tzinfo=UTC),
        "rows": rows,
        "curve": curve(),
        "settings": {"rank": "16"},
        "provenance": {"fingerprint": "abc"},
    }
    return build_report(**(arguments | changes))


class Page(HTMLParser):
    """Collects the tags, attributes and ids of a page."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.ids = set(), [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id"]


def test_report_states_what_was_learned_and_how_sure_it_is():
    report = report_of(evaluation())
    assert report.headline.startswith(
        "The adapter learned: it gets 70.0% of 100 held-out examples right, up from 30.0%"
    )
    assert "95% interval" in report.headline
    assert report.result("greedy").accuracy.correct == 70
    gain = report.comparison("greedy", "base")
    assert gain.distinguishable
    assert gain.difference.difference == pytest.approx(0.4)
    assert "right more often than the base model, by 40.0 points" in gain.verdict
    assert "cannot be told apart" in report.comparison("cold", "greedy").verdict
    assert report.warnings == []


def test_comparisons_are_the_three_and_the_commonest_answer_adjusted_together():
    report = report_of(evaluation())
    pairs = [(c.candidate, c.reference) for c in report.comparisons]
    assert pairs == [("greedy", "base"), ("cold", "greedy"), ("cold", "base"), ("greedy", "commonest")]
    smallest = min(c.difference.p_value for c in report.comparisons)
    assert min(c.p_adjusted for c in report.comparisons) == pytest.approx(4 * smallest)
    assert report.commonest.answer == "0"
    assert report.commonest.share == pytest.approx(0.1)


def test_collapse_onto_the_commonest_answer_is_not_called_learning():
    answers = ["7"] * 40 + [str(i) for i in range(60)]
    rows = {"base": always("none", answers), "greedy": always("7", answers), "cold": always("7", answers)}
    report = report_of(rows)
    assert report.comparison("greedy", "base").distinguishable
    assert report.headline.startswith("The adapter collapsed rather than learned")
    assert any("collapse, not learning" in text for text in report.warnings)
    assert any("answers “7” on 100.0%" in text for text in report.warnings)
    assert "collapse, not learning" in render_html(report)
    assert "collapse, not learning" in render_markdown(report)


def test_gain_that_stays_near_the_commonest_answer_is_doubted():
    answers = ["7"] * 40 + [f"x{i}" for i in range(60)]
    greedy = [row(i, a, a if 2 <= i < 44 else "wrong") for i, a in enumerate(answers)]
    report = report_of({"base": always("none", answers), "greedy": greedy, "cold": greedy})
    assert report.headline.startswith("The adapter improved, perhaps only by guessing")
    assert any("not clearly above" in text for text in report.warnings)


def test_no_gain_and_loss_are_said():
    assert report_of(evaluation(greedy=32)).headline.startswith("No learning can be shown")
    assert report_of(evaluation(base=90, greedy=40)).headline.startswith("This adapter is worse than the base model")


def test_cold_below_greedy_is_a_warning_that_says_whether_it_is_chance():
    slight = [t for t in report_of(evaluation(greedy=70, cold=69)).warnings if t.startswith("CoLD lowered accuracy")]
    grave = [t for t in report_of(evaluation(greedy=90, cold=40)).warnings if t.startswith("CoLD lowered accuracy")]
    assert "within chance" in slight[0]
    assert "beyond what chance explains" in grave[0]


def test_cut_off_replies_few_examples_and_saturated_groups_are_warned_of():
    rows = evaluation(base=4, greedy=12, cold=12, n=20)
    rows["greedy"] = [row(i, r.answer, None, finish_reason="length") for i, r in enumerate(rows["greedy"])]
    text = " ".join(report_of(rows, curve=[{"step": 0.0, "saturated_share": 0.8}]).warnings)
    assert "cut off by the token limit" in text
    assert "no answer" in text
    assert "20 examples are few" in text
    assert "saturated" in text


def test_without_reference_answers_there_is_no_line_of_the_commonest():
    rows = {
        decoding: [row(i, "", None, correct=r.correct) for i, r in enumerate(found)]
        for decoding, found in evaluation().items()
    }
    report = report_of(rows)
    assert report.commonest is None
    assert report.comparison("greedy", "commonest") is None
    assert report.headline.startswith("The adapter learned")
    assert len(report_table(report)) == 3
    assert "Always" not in render_html(report)


def test_rows_are_matched_by_example_not_by_position():
    rows = evaluation()
    shuffled = {**rows, "cold": rows["cold"][::-1]}
    assert report_of(shuffled) == report_of(rows)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda rows: rows["cold"].pop(), r"rows\['cold'\].*same examples.*'e099'"),
        (lambda rows: rows["greedy"].append(rows["greedy"][0]), r"rows\['greedy'\] has an example twice"),
        (lambda rows: rows.pop("cold"), "must be exactly"),
        (lambda rows: rows.update(beam=rows["cold"]), "must be exactly"),
        (lambda rows: [found.clear() for found in rows.values()], "empty"),
        (lambda rows: rows["cold"].__setitem__(0, row(0, "99", "1")), "'e000' has another answer"),
    ],
)
def test_decodings_of_other_examples_are_refused(spoil, message):
    rows = evaluation()
    spoil(rows)
    with pytest.raises(ValueError, match=message):
        report_of(rows)


def test_curve_point_without_a_step_is_refused():
    with pytest.raises(ValueError, match=r"curve\[1\] must have a finite 'step'"):
        report_of(evaluation(), curve=[{"step": 0.0}, {"reward_mean": 1.0}])


def test_report_survives_json():
    report = report_of(evaluation())
    text = report.model_dump_json(indent=2)
    assert EvaluationReport.model_validate_json(text) == report
    assert EvaluationReport.model_validate_json(text).model_dump_json(indent=2) == text


def test_values_of_the_curve_that_are_not_finite_are_left_out():
    report = report_of(evaluation(), curve=[{"step": 0.0, "reward_mean": 0.5, "kl_to_base": float("nan")}])
    assert report.curve == [{"step": 0.0, "reward_mean": 0.5}]
    assert EvaluationReport.model_validate_json(report.model_dump_json()) == report


def test_html_of_the_same_report_is_the_same_bytes_and_leaves_matplotlib_alone():
    before = dict(matplotlib.rcParams)
    first, second = render_html(report_of(evaluation())), render_html(report_of(evaluation()))
    assert first == second
    assert dict(matplotlib.rcParams) == before


def test_html_is_one_self_contained_file():
    page = Page(render_html(report_of(evaluation())))
    assert not page.tags & {"script", "link", "img", "iframe", "object"}
    assert {"svg", "style", "table"} <= page.tags
    loading = [(n, v) for n, v in page.attributes if n in ("src", "href", "xlink:href", "action")]
    assert all(value.startswith("#") for _, value in loading)
    assert len(page.ids) == len(set(page.ids))
    assert {value[1:] for _, value in loading} <= set(page.ids)


def test_hostile_text_is_shown_and_does_nothing():
    rows = evaluation()
    for decoding, found in rows.items():
        rows[decoding] = [
            row(i, HOSTILE if i % 2 else "4", HOSTILE, prompt=HOSTILE, completion=HOSTILE + decoding, correct=r.correct)
            for i, r in enumerate(found)
        ]
    report = report_of(rows, environment=HOSTILE, settings={HOSTILE: HOSTILE}, provenance={"by": HOSTILE})
    html = render_html(report)
    page = Page(html)
    assert not page.tags & {"script", "img"}
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "{{ 7*7 }}" in html
    assert "\x00" not in html
    assert "\u202e" not in html
    markdown = render_markdown(report)
    assert "\\<script\\>" in markdown
    assert "<script>" not in markdown
    assert all(line.count("|") - line.count("\\|") == 7 for line in markdown.splitlines() if line.startswith("|"))


@pytest.mark.parametrize("points", [[], [{"step": 3.0, "reward_mean": 0.4}], curve(100)], ids=["none", "one", "many"])
def test_curves_of_any_length_are_drawn(points):
    html = render_html(report_of(evaluation(), curve=points))
    assert ("No training step is recorded" in html) == (not points)
    assert ("moving averages" in html) == (len(points) == 100)


def test_samples_show_every_way_in_which_decodings_differ_before_repeating_one():
    samples = report_of(evaluation()).samples
    patterns = [tuple(reply.correct for reply in sample.replies) for sample in samples]
    assert len(samples) == 6
    assert len(set(patterns)) == 6
    assert all(len(set(pattern)) == 2 for pattern in patterns)


def test_samples_fall_back_to_replies_that_read_differently():
    rows = evaluation(n=10, base=10, greedy=10, cold=10)
    rows["cold"][4] = row(4, "4", "4", completion="x" * 9000)
    (sample,) = report_of(rows).samples
    assert sample.example_id == "e004"
    assert len(sample.replies[2].completion) < 2000


def test_table_has_a_row_for_every_decoding_and_the_commonest_answer():
    table = report_table(report_of(evaluation(), confidence=0.9))
    assert [entry["accuracy"] for entry in table] == ["30.0%", "70.0%", "72.0%", "10.0%"]
    assert all(isinstance(value, str) for entry in table for value in entry.values())
    assert "90% interval" in table[0]
    assert table[3]["decoding"] == "Always the commonest answer (0)"
