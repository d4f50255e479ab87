"""Starts and stops the actors of a Ray pool, and Ray itself where none is running."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tenacity

from marlaas.devices import choose_device
from marlaas.errors import MarlaasError
from marlaas.pool.actors import DeviceActor, ray_module
from marlaas.pool.ray import NAMESPACE, connect, disconnect
from marlaas.services.processes import ProcessRecord, end, family, find, launch, tail
from marlaas.specs import ModelSpec, PoolSpec

# Ray takes 127.0.0.1 for the machine's outward address; any other of the loopback addresses stays what it is.
LOOPBACK = "127.0.0.2"
CLIENT_PORT, GCS_PORT = 10001, 6399
_START_SECONDS = 60.0
_STOP_SECONDS = 20.0
_LOAD_SECONDS = 600.0
_CALLS = 4096  # in flight on one actor: every request of its batch and of those that wait is one


def start_pool(
    model: ModelSpec,
    pool: PoolSpec,
    rollout: int,
    train: int,
    state: Path,
    host: str = LOOPBACK,
    say: Callable[[str], None] = lambda line: None,
) -> str:
    """Starts the actors on the Ray cluster at `pool.address`, or on one that it starts on this machine.

    Actors that are there already stay. Returns the address for `marlaas run --pool`. Raises MarlaasError.
    """
    ray_module()
    address = pool.address or _start_ray(state, host, say)
    _connect(address)
    try:
        _start_actors(model, pool, {"rollout": rollout, "train": train}, say)
    finally:
        disconnect()
    return address


def stop_pool(state: Path) -> bool:
    """Stops the Ray that `start_pool` started, with all actors; False: there was none."""
    record = _remembered(state)
    if record is None:
        return False
    end(family([record], record.url), signal.SIGTERM, _STOP_SECONDS)
    _file(state).unlink()
    return True


@tenacity.retry(
    retry=tenacity.retry_if_exception_type(MarlaasError),
    stop=tenacity.stop_after_delay(_START_SECONDS),
    wait=tenacity.wait_fixed(1),
    reraise=True,
)
def _connect(address: str) -> None:
    """Connects; a Ray that has just been started refuses for some seconds after its ports answer."""
    connect(address)


def _start_actors(model: ModelSpec, pool: PoolSpec, counts: dict[str, int], say: Callable[[str], None]) -> None:
    ray = ray_module()
    kind = choose_device(model.device).type
    a_device: dict[str, dict[str, Any]] = {"cuda": {"num_gpus": 1}, "npu": {"resources": {"NPU": 1}}}
    resources = a_device.get(kind, {})
    threads = pool.threads or max(1, (os.cpu_count() or 1) // sum(counts.values()))
    spec = pool.model_copy(update={"address": None, "metrics_port": None, "threads": threads})
    actor = ray.remote(DeviceActor)
    handles = {}
    for role, count in counts.items():
        for number in range(count):
            name = f"{role}-{number}"
            options: dict[str, Any] = {
                "name": name,
                "namespace": NAMESPACE,
                "lifetime": "detached",
                "get_if_exists": True,
            }
            handles[name] = actor.options(
                **options, **resources, num_cpus=0, max_restarts=-1, max_concurrency=4096
            ).remote(name, role, model.model_dump(mode="json"), spec.model_dump(mode="json"))
    for name, handle in handles.items():
        try:
            info = ray.get(handle.describe.remote(), timeout=_LOAD_SECONDS)
        except Exception as error:  # Ray has many kinds for an actor that does not start
            for started in handles.values():
                ray.kill(started)
            reason = getattr(error, "cause", None) or str(error).strip().splitlines()[-1]
            raise MarlaasError(f"the actor {name} does not start: {reason}") from None
        say(f"{name}: {info.base_name}, process {info.process}")


def _start_ray(state: Path, host: str, say: Callable[[str], None]) -> str:
    address = f"ray://{host}:{CLIENT_PORT}"
    record = _remembered(state)
    if record is not None:
        return record.url
    for port in (CLIENT_PORT, GCS_PORT):
        if _answers(host, port):
            raise MarlaasError(f"port {port} of {host} is taken; if that is a Ray cluster, set pool.address to it")
    say(f"starting Ray on {host}")
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
        *("--include-dashboard=false", f"--node-ip-address={host}", f"--port={GCS_PORT}"),
        f"--ray-client-server-port={CLIENT_PORT}",
    ]
    state.mkdir(parents=True, exist_ok=True)
    log = state / "ray.log"
    record, process = launch("ray", command, url=address, log=log, environment=os.environ, folder=state)
    _file(state).write_text(json.dumps(asdict(record)))
    deadline = time.monotonic() + _START_SECONDS
    while not (_answers(host, CLIENT_PORT) and _answers(host, GCS_PORT)):
        if process.poll() is not None or time.monotonic() > deadline:
            stop_pool(state)
            raise MarlaasError(f"Ray does not start within {_START_SECONDS:g} s; the end of {log}:\n{tail(log)}")
        time.sleep(0.1)
    return address


def _remembered(state: Path) -> ProcessRecord | None:
    """The Ray that was started with this state folder, if it still runs."""
    if not _file(state).exists():
        return None
    record = ProcessRecord(**json.loads(_file(state).read_text()))
    return record if find(record) is not None else None


def _file(state: Path) -> Path:
    return state / "ray.json"


def _answers(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex((host, port)) == 0
