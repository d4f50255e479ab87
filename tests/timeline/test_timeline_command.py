"""`marlaas timeline`: what it prints and writes, and what it refuses."""

import json
import os
import subprocess
import sys

import pytest

from marlaas.errors import MarlaasError
from marlaas.timeline import read_run
from storage import JobLayout, StageRecord, open_store, write_stages


@pytest.fixture
def store(tmp_path):
    """A store with the run `sums` of three tenants, one of them without records, and the run `gcd` without any."""
    opened = open_store(str(tmp_path / "store"))
    for tenant, job in (("acme", "sums"), ("globex", "sums"), ("initech", "sums"), ("acme", "gcd")):
        opened.put(JobLayout(tenant, job).spec, b"{}")
    for tenant in ("acme", "globex"):
        for step in range(2):
            common = {"tenant": tenant, "job": "sums", "step": step}
            start = 1_760_000_000.0 + 10 * step
            records = [
                StageRecord(stage="rollout", start=start, end=start + 6, tokens=60, device_seconds=3, **common),
                StageRecord(stage="update", start=start + 6, end=start + 10, tokens=90, device_seconds=2, **common),
            ]
            write_stages(opened, JobLayout(tenant, "sums"), f"{step:08d}", records)
    return opened


@pytest.fixture
def timeline(tmp_path, store):
    """Runs `marlaas timeline` in an empty folder to its end."""
    (tmp_path / "here").mkdir()

    def run(*arguments):
        command = [sys.executable, "-m", "marlaas.cli", "timeline", *arguments, "--store", str(tmp_path / "store")]
        environment = {**os.environ, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            command, cwd=tmp_path / "here", env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    return run


def left(tmp_path):
    return sorted(path.name for path in (tmp_path / "here").iterdir())


def test_a_run_is_the_jobs_of_that_name_and_their_records(store):
    run = read_run(store, "sums")
    assert list(run.tenants) == ["acme", "globex"]
    assert [(r.stage, r.step) for r in run.tenants["acme"]] == [
        ("rollout", 0),
        ("update", 0),
        ("rollout", 1),
        ("update", 1),
    ]
    assert run.silent == ("initech",)


def test_an_unknown_run_is_an_error_even_where_nothing_ran(tmp_path):
    with pytest.raises(MarlaasError, match=r"no run 'sums' in .*; there is none"):
        read_run(open_store(str(tmp_path)), "sums")


def test_many_known_runs_are_not_all_named(tmp_path):
    opened = open_store(str(tmp_path))
    for i in range(30):
        opened.put(JobLayout("acme", f"run-{i:02d}").spec, b"{}")
    with pytest.raises(MarlaasError, match=r"known are run-00, run-01, .*run-19 and 10 more$"):
        read_run(opened, "sums")


def test_the_command_prints_the_figures_and_writes_the_page(timeline, tmp_path):
    done = timeline("sums", "--devices", "2")
    assert done.returncode == 0, done.stderr
    assert left(tmp_path) == ["timeline-sums.html"]
    assert "<svg" in (tmp_path / "here" / "timeline-sums.html").read_text()
    row = next(line for line in done.stdout.splitlines() if "acme" in line)
    assert [cell.strip() for cell in row.strip("│ ").split("│")][:6] == ["acme", "2", "120", "180", "6.0", "10.0"]
    assert "busy: 50.0% of 2 devices (rollout 30.0%, update 20.0%)" in done.stdout
    assert "fairness (Jain): 1.000 over the 20 s in which all were active" in done.stdout
    assert "no stage recorded of: initech" in done.stdout
    assert done.stdout.splitlines()[-1] == "timeline  timeline-sums.html"


@pytest.mark.parametrize(
    ("name", "begins"), [("t.png", b"\x89PNG"), ("t.svg", b"<?xml"), ("t.html", b"<!doctype html>")]
)
def test_the_picture_is_what_its_name_says(timeline, tmp_path, name, begins):
    done = timeline("sums", "--output", name, "--json", "figures.json")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "here" / name).read_bytes().startswith(begins)
    figures = json.loads((tmp_path / "here" / "figures.json").read_text())
    assert (figures["run"], figures["devices"], figures["busy_share"]) == ("sums", 1, 1.0)
    assert [t["device_share"] for t in figures["tenants"]] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("arguments", "status", "problem"),
    [
        (["sum"], 1, "no run 'sum' in"),
        (["sum"], 1, "known are gcd, sums"),
        (["../sums"], 1, "no run '../sums' in"),
        (["gcd"], 1, "run 'gcd' has no stage records: none of its jobs has finished a step"),
        (["sums", "--output", "t.pdf"], 2, "t.pdf must end in .html, .png or .svg"),
        (["sums", "--output", "nowhere/t.png"], 2, "nowhere is not a folder"),
        (["sums", "--json", "nowhere/t.json"], 2, "nowhere is not a folder"),
        (["sums", "--devices", "0"], 2, "--devices"),
    ],
)
def test_what_cannot_be_shown_is_said_and_nothing_is_written(timeline, tmp_path, arguments, status, problem):
    done = timeline(*arguments)
    assert done.returncode == status
    assert problem in done.stderr
    assert "Traceback" not in done.stderr
    assert left(tmp_path) == []
