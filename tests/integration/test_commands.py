"""What the `marlaas` command shows of a trained fleet."""

import re
import subprocess

import pytest
from fleets import JOB


def words(process: subprocess.Popen[str], code: int = 0) -> str:
    """The command's output with all white space and table lines folded."""
    output, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    return " ".join(re.sub(r"[│┃━─┏┓┗┛┡┩└┘┴┬┳╇┼├┤]", " ", output).split())


@pytest.fixture
def store(trained):
    return trained.folder / "store"


def test_status_shows_the_services_and_every_job(marlaas, store, services):
    shown = words(marlaas("status", "--store", store, "--state", services.folder))
    assert f"prefect {services.prefect_api_url}" in shown
    assert f"mlflow {services.mlflow_tracking_uri}" in shown
    assert re.search(rf"judged {JOB} 3/3 \d\.\d{{3}} v3 20\d\d-", shown)
    assert re.search(rf"raises {JOB} 0/3 - - -", shown)
    assert re.search(rf"wide {JOB} 5/5 0\.000 v5 ", shown)


def test_adapters_lists_the_versions_with_their_accuracies_and_aliases(marlaas, store, services, trained):
    shown = words(marlaas("adapters", "judged", "--store", store, "--state", services.folder))
    row = trained.rows["judged"]
    accuracies = " ".join(f"{row[name]:.3f}" for name in ("base", "greedy", "cold"))
    assert f"judged/{JOB}/v3 2 {row['reward_last']:.3f} {accuracies}" in shown
    assert "champion" in shown
    assert "latest" in shown


def test_adapters_says_that_aliases_need_mlflow(marlaas, store, tmp_path):
    shown = words(marlaas("adapters", "wide", "--store", store, "--state", tmp_path / "none"))
    assert f"wide/{JOB}/v2" in shown
    assert "aliases are kept by MLflow, which is not running here; start it with: marlaas up" in shown
    assert not (tmp_path / "none").exists()


def test_report_shows_the_newest_report_and_copies_it(marlaas, store, trained, tmp_path):
    shown = words(marlaas("report", "wide", "--store", store, "--output", tmp_path / "copy.html"))
    assert f"wide/{JOB}/v5" in shown
    assert trained.rows["wide"]["report"] in shown
    assert (tmp_path / "copy.html").read_bytes() == (trained.path("wide") / "evaluations/v5/report.html").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("report", "wide", "--job", "none"), "tenant 'wide' has no evaluation report of job 'none'"),
        (("adapters", "No/body"), "tenant 'No/body' must be a DNS label"),
    ],
)
def test_what_is_not_there_is_named(marlaas, store, arguments, problem):
    process = marlaas(*arguments, "--store", store)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.startswith(f"marlaas: {problem}"), errors
