"""A fleet whose store is in S3, as moto serves it over HTTP, with credentials from the environment."""

import json
from collections.abc import Iterator

import pytest
from fleets import SMALL
from moto.server import ThreadedMotoServer
from prefect.client.schemas.filters import FlowRunFilter
from s3fs import S3FileSystem

from flows.train_fleet import train_fleet
from storage import JobLayout, list_adapters, read_commits

SECRET = "wJalrXUtnFEMI-never-shown"


@pytest.fixture(scope="module")
def s3_url() -> Iterator[str]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


def test_a_fleet_trains_resumes_and_is_evaluated_on_s3(
    s3_url, fleet_of, run_flow, prefect_client, tracker, monkeypatch
):
    monkeypatch.setenv("TEST_S3_KEY", "tester")
    monkeypatch.setenv("TEST_S3_SECRET", SECRET)
    plain = S3FileSystem(key="tester", secret=SECRET, endpoint_url=s3_url)
    plain.mkdir("fleet-artifacts")
    store = {
        "url": "s3://fleet-artifacts/fleets",
        "options": {"endpoint_url": s3_url, "key": "env:TEST_S3_KEY", "secret": "env:TEST_S3_SECRET"},
    }
    tenants = [{"name": "one", "steps": 3}, {"name": "two", "steps": 2, "max_staleness": 0, "seed": 1}]
    fleet = fleet_of("in-s3", store, tenants, publish_every=2, **SMALL)
    rows = run_flow(train_fleet(fleet))

    assert [(row["tenant"], row["version"], row["examples"]) for row in rows] == [("one", 3, 10), ("two", 2, 10)]
    opened, layout = fleet.store.open(), JobLayout("one", "in-s3")
    assert [c.step for c in read_commits(opened, layout)] == [0, 1, 2]
    assert list_adapters(opened, layout) == [2, 3]
    assert tracker.versions("one", "in-s3")[-1].url == "s3://fleet-artifacts/fleets/tenants/one/in-s3/adapters/v3"
    names = {
        key.removeprefix("fleet-artifacts/fleets/tenants/one/in-s3/")
        for key in plain.find("fleet-artifacts/fleets/tenants/one")
    }
    assert sum(name.startswith("checkpoints/") for name in names) == 2
    assert {"spec.json", "adapters/v3/adapter_config.json", "evaluations/v3/report.html"} <= names

    objects = {name: plain.cat_file(name) for name in plain.find("fleet-artifacts")}
    assert run_flow(train_fleet(fleet)) == rows
    plain.invalidate_cache()
    assert {name: plain.cat_file(name) for name in plain.find("fleet-artifacts")} == objects
    assert all(SECRET.encode() not in data for data in objects.values())

    runs = prefect_client.read_flow_runs(flow_run_filter=FlowRunFilter(name={"any_": ["in-s3", "train-one"]}))
    assert len(runs) == 4
    assert all(SECRET not in json.dumps(run.model_dump(mode="json")) for run in runs)
