"""The picture of a run: what its bars, axes and labels say, at any number of tenants; and the page around it."""

import io
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.image import imread

from marlaas.timeline import Run, utilisation
from marlaas.timeline.figures import STAGE_COLOURS, inline_svg, picture
from marlaas.timeline.render import fact_table, render_html, tenant_table
from storage import StageRecord


def stage(tenant, name, step, start, end, **fields):
    return StageRecord(tenant=tenant, job="sums", stage=name, step=step, start=start, end=end, **fields)


def run(tenants=2, steps=3, seconds=2.0, pause=0.0):
    """Rollouts and updates of `seconds` each in turn; a pause after the first half of the steps."""
    found = {}
    for i in range(tenants):
        name, records, now = f"tenant-{i:03d}", [], 1_760_000_000.0
        for step in range(steps):
            now += pause if pause and step == steps // 2 else 0
            records += [
                stage(name, "rollout", step, now, now + seconds, tokens=50, device_seconds=seconds / tenants),
                stage(name, "interact", step, now + seconds / 4, now + seconds / 2, calls=2, waited_seconds=1),
                stage(name, "update", step, now + seconds, now + 2 * seconds, tokens=70, device_seconds=0.1),
            ]
            now += 2 * seconds
        records.append(stage(name, "publish", steps - 1, now, now + 0.01))
        records.append(stage(name, "evaluate", steps - 1, now + 0.01, now + seconds, tokens=9, device_seconds=0.1))
        found[name] = records
    return Run("sums", found)


def texts(svg):
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def path(svg, name):
    """The one path of all bars of a stage: its points and its style."""
    (found,) = re.findall(rf'<g id="stage-{name}">\s*<path d="([^"]+)"[^>]*style="([^"]+)"', svg)
    return found


def bars(svg, name):
    """The bars of a stage, (x from, x to), by y."""
    found = {}
    for x0, y0, x1, y1 in re.findall(r"M ([\d.]+) ([\d.]+)\s*L ([\d.]+) ([\d.]+)", path(svg, name)[0]):
        assert y0 == y1
        found.setdefault(float(y0), []).append((float(x0), float(x1)))
    return found


@pytest.mark.parametrize("name", ["rollout", "interact", "update"])
def test_a_stage_has_a_bar_for_each_step_in_the_row_of_its_tenant(name):
    rows = bars(inline_svg(run(tenants=3, steps=5), 1), name)
    assert [len(row) for row in rows.values()] == [5, 5, 5]


def test_bars_lie_in_time_as_their_stages_did():
    """A run of 14 seconds: rollout, update, ... of two seconds each, and the evaluation."""
    svg = inline_svg(run(tenants=1, steps=3), 1)
    (rollouts,), (updates,), (evaluation,) = (bars(svg, n).values() for n in ("rollout", "update", "evaluate"))
    left, second = rollouts[0][0], (evaluation[-1][1] - rollouts[0][0]) / 14
    starts = [(x - left) / second for x, _ in (*rollouts, *updates)]
    assert starts == pytest.approx([0, 4, 8, 2, 6, 10], abs=0.05)
    assert (rollouts[0][1] - rollouts[0][0]) / second == pytest.approx(2, abs=0.05)


def test_the_lane_of_interact_is_thinner_and_between_rollout_and_update():
    svg = inline_svg(run(tenants=1), 1)
    ys = [next(iter(bars(svg, name))) for name in ("rollout", "interact", "update", "evaluate")]
    assert ys == sorted(ys)
    widths = [float(re.search(r"stroke-width: ([\d.]+)", path(svg, n)[1])[1]) for n in ("rollout", "interact")]
    assert widths[1] < widths[0] / 2


def test_a_bar_too_short_to_see_is_drawn_all_the_same():
    rows = bars(picture(run(steps=50), 1, "svg").decode(), "publish")
    assert all(end - start > 0.3 for ((start, end),) in rows.values())


def test_the_axis_says_what_was_cut_out():
    assert "seconds since the start" in texts(inline_svg(run(), 1))
    cut = texts(inline_svg(run(steps=4, pause=3700), 1))
    assert "seconds since the start, with a pause of 1 h 2 min cut out (dotted)" in cut


def test_many_pauses_are_counted_on_the_axis():
    records = [stage("a", "rollout", i, 1000.0 * i, 1000.0 * i + 2) for i in range(6)]
    svg = inline_svg(Run("sums", {"a": records}), 1)
    assert any("with 5 pauses, 1 h 23 min together, cut out" in text for text in texts(svg))


@pytest.mark.parametrize(("seconds", "unit"), [(2, "seconds"), (200, "minutes"), (20_000, "hours")])
def test_the_unit_of_time_fits_the_run(seconds, unit):
    assert f"{unit} since the start" in texts(inline_svg(run(seconds=seconds), 1))


@pytest.mark.parametrize(("devices", "label"), [(1, "busy"), (3, "busy, 3 devices")])
def test_the_busy_panel_reaches_to_all_devices(devices, label):
    shown = texts(inline_svg(run(), devices))
    assert label in shown
    assert f"{100 * devices}%" in shown


@pytest.mark.parametrize("tenants", [1, 4, 32, 100])
def test_every_row_has_bars_and_labels_thin_out_before_they_overlap(tenants):
    svg = inline_svg(run(tenants, steps=2), 1)
    labels = re.findall(r'y="([\d.]+)"[^>]*>tenant-\d+<', svg)
    heights = sorted(float(y) for y in labels)
    assert len(bars(svg, "rollout")) == tenants
    assert len(labels) == (tenants if tenants <= 32 else tenants / 2)
    assert all(b - a > 9 for a, b in pairwise(heights))


def test_a_large_run_is_a_page_of_a_few_megabytes():
    assert len(inline_svg(run(100, steps=200), 1)) < 4_000_000


def test_the_same_run_gives_the_same_bytes():
    assert inline_svg(run(), 1) == inline_svg(run(), 1)


def test_files_of_their_own_are_whole():
    image = imread(io.BytesIO(picture(run(), 1, "png")))
    assert image.shape[1] == 1800
    svg = picture(run(), 1, "svg").decode()
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert "var(" not in svg
    assert "sums: 2 tenants" in texts(svg)


def test_colours_of_the_stages_differ_for_every_eye():
    """Viénot, Brettel and Mollon's simulation (1999): no two stages of the picture look the same to anybody."""
    lms = np.array([[17.8824, 43.5161, 4.11935], [3.45565, 27.1554, 3.86714], [0.0299566, 0.184309, 1.46709]])
    protan = np.array([[0, 2.02344, -2.52581], [0, 1, 0], [0, 0, 1]])
    deutan = np.array([[1, 0, 0], [0.494207, 0, 1.24827], [0, 0, 1]])
    rgb = np.array([[int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)] for c in STAGE_COLOURS.values()]) ** 2.2
    for seen in (np.eye(3), np.linalg.inv(lms) @ protan @ lms, np.linalg.inv(lms) @ deutan @ lms):
        shown = np.clip(rgb @ seen.T, 0, 1) ** (1 / 2.2)
        apart = np.linalg.norm(shown[:, None] - shown[None], axis=-1)
        assert apart[~np.eye(len(shown), dtype=bool)].min() > 0.2


class _Page(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.tags, self.links = [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href", "xlink:href") and not v.startswith("#")]


def test_the_page_needs_nothing_else_and_follows_light_and_dark():
    html = render_html(run(), 2)
    page = _Page(html)
    assert not {"script", "img", "link", "iframe"} & set(page.tags)
    assert page.links == []
    assert "prefers-color-scheme: dark" in html
    svg = html[html.index("<svg") : html.index("</svg>")]
    assert "#ffffff" not in svg
    for colour in STAGE_COLOURS.values():
        assert len(re.findall(rf"(?<!, ){colour}", svg)) == 0


def test_the_page_has_the_tables():
    found = run(tenants=3)
    html = render_html(found, 2)
    use = utilisation(found, 2)
    assert "2 accelerators" in html
    for row in tenant_table(use):
        assert f'<th scope="row">{row["tenant"]}</th>' in html
        assert f'<td data-label="device s">{row["device s"]}</td>' in html
    for name, text in fact_table(use).items():
        assert f"<dt>{name}</dt><dd>{text}</dd>" in html


def test_facts_name_pauses_and_tenants_without_records():
    found = Run("sums", run(steps=4, pause=3700).tenants, silent=("acme", "globex"))
    facts = fact_table(utilisation(found))
    assert facts["pauses, not counted"] == "1, 1 h 2 min in all"
    assert facts["no stage recorded of"] == "acme, globex"
