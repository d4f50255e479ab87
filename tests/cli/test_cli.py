import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from marlaas import __version__

ENVIRONMENT = "{kind: reasoning_gym, dataset: chain_sum}"
GOOD = f"""
name: sums
defaults: {{steps: 3, environment: {ENVIRONMENT}}}
tenants: [{{name: acme}}, {{name: globex, steps: 5}}]
"""
MALFORMED = {
    "rank": ("lora: {rank: 64}", "tenants[0].lora.rank: 64 must be at most pool.max_rank 32"),
    "markup": ("lora: {'[red]x': 1}", "tenants[0].lora.[red]x: unknown key; allowed are rank, alpha, targets"),
    "long": (f"job: {'x' * 64}", f"tenants[0].job: '{'x' * 64}' is not allowed: must be a DNS label: 1 to 63 of a-z"),
}


@pytest.fixture
def marlaas(tmp_path, monkeypatch):
    """Runs the command in an empty folder to its end."""
    (tmp_path / "here").mkdir()

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "marlaas.cli", *map(str, arguments)]
        environment = {**os.environ, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            command, cwd=tmp_path / "here", env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    return run


def left(folder: Path) -> list[str]:
    """What a command left in the folder where it ran, and the processes that it left there."""
    processes = []
    for process in psutil.process_iter(["cwd", "cmdline"]):
        if (process.info["cwd"] or "").startswith(str(folder)):
            processes.append(" ".join(process.info["cmdline"]))
    return [*(str(p) for p in folder.rglob("*")), *processes]


def fleet(folder: Path, text: str) -> Path:
    path = folder / "fleet.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("command", ["run", "check"])
@pytest.mark.parametrize(("fields", "problem"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_fleet_ends_with_status_2_and_one_readable_message(marlaas, tmp_path, command, fields, problem):
    path = fleet(tmp_path, GOOD.replace("{name: acme}", f"{{name: acme, {fields}}}"))
    started = time.monotonic()
    done = marlaas(command, path)
    assert time.monotonic() - started < 5
    assert done.returncode == 2
    assert done.stderr.startswith(f"{path}: {problem}")
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
    assert left(tmp_path / "here") == []


def test_every_problem_has_a_line_of_its_own(marlaas, tmp_path):
    path = fleet(tmp_path, "name: A\ntenants: []\npool: {max_rank: 0}\n")
    lines = marlaas("run", path).stderr.splitlines()
    assert [line.removeprefix(f"{path}: ").split(":")[0] for line in lines] == ["name", "pool.max_rank", "tenants"]


@pytest.mark.parametrize("arguments", [("run", "missing.yaml"), ("run",), ("fly",), ("run", "f.yaml", "--speed", "9")])
def test_a_wrong_command_line_ends_with_status_2_and_starts_nothing(marlaas, tmp_path, arguments):
    done = marlaas(*arguments)
    assert done.returncode == 2
    assert done.stderr
    assert "Traceback" not in done.stderr
    assert left(tmp_path / "here") == []


def test_a_job_name_that_is_not_allowed_is_refused_before_anything_starts(marlaas, tmp_path):
    done = marlaas("run", fleet(tmp_path, GOOD), "--job", "My Job")
    assert done.returncode == 2
    assert done.stderr.startswith("--job: tenants[0].job: 'My Job' is not allowed: must be a DNS label")
    assert left(tmp_path / "here") == []


def test_check_says_what_would_run_and_starts_nothing(marlaas, tmp_path):
    path = fleet(tmp_path, GOOD)
    done = marlaas("check", path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (f"{path} is a fleet of 2 on smollm2-135m-instruct: acme (3 steps), globex (5 steps)\n")
    assert left(tmp_path / "here") == []


def test_version(marlaas):
    assert marlaas("version").stdout == f"{__version__}\n"


def test_models_lists_the_aliases(marlaas, tmp_path):
    shown = marlaas("models", "--cache", tmp_path).stdout
    assert "smollm2-135m-instruct" in shown
    assert "tiny-random" in shown


def test_status_of_nothing_creates_nothing(marlaas, tmp_path):
    done = marlaas("status")
    assert done.returncode == 0, done.stderr
    assert "postgres" in done.stdout
    assert "Jobs in .marlaas/store" in done.stdout
    assert left(tmp_path / "here") == []


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("adapters", "acme"), "marlaas: tenant 'acme' has no published adapter in .marlaas/store"),
        (("report", "acme"), "marlaas: tenant 'acme' has no evaluation report"),
        (("status", "--store", "gs://bucket"), "marlaas: store url of scheme 'gs': a folder, file:// or s3://"),
        (("status", "--store", "s3://me:hunter2@bucket"), "marlaas: store url: s3://bucket/prefix and nothing else"),
    ],
)
def test_what_cannot_be_shown_is_said_in_one_line(marlaas, tmp_path, arguments, problem):
    done = marlaas(*arguments)
    assert done.returncode == 1
    assert done.stderr.startswith(problem)
    assert len(done.stderr.splitlines()) == 1
    assert "hunter2" not in done.stderr
    assert left(tmp_path / "here") == []


def test_down_where_nothing_runs_says_so(marlaas, tmp_path):
    assert marlaas("down").stdout == "no services were running\n"
    assert left(tmp_path / "here") == []
