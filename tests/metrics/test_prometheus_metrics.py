"""Prometheus metrics of a pool, scraped over HTTP, and their life beside the pool's."""

import asyncio
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

import flows.runtime
from flows.runtime import Runtime
from marlaas.errors import MarlaasError
from marlaas.metrics import PoolCollector, serve
from marlaas.pool.stats import DeviceStats, PoolStats, TenantStats
from marlaas.specs import ModelSpec, PoolSpec

STATS = PoolStats(
    devices=[
        DeviceStats("cpu", 60.0, 20.0, 10.0, 1.5, 0.25, 3, 2),
        DeviceStats("cuda:1", 50.0, 5.0, 4.0, 0.5, 1.0, 0, 0),
    ],
    tenants={
        "acme": TenantStats(
            waiting=4,
            running=3,
            parked=2,
            updates_waiting=1,
            sampled_tokens=1000,
            prefilled_tokens=300,
            reused_tokens=200,
            trained_tokens=900,
            device_seconds=12.5,
        ),
        'odd"name\\\n': TenantStats(device_seconds=1.0),
    },
)


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def scrape(port, timeout=10):
    """All samples by metric and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=timeout) as reply:
        text = reply.read().decode()
    families = text_string_to_metric_families(text)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def value(samples, name, **labels):
    return samples[name, frozenset(labels.items())]


def test_every_number_of_the_pool_is_scraped_under_its_name_and_labels(port):
    with serve(PoolCollector(lambda: STATS), port):
        samples = scrape(port)
    expected = {
        ("marlaas_pool_up",): 1,
        ("marlaas_sequences", ("tenant", "acme"), ("state", "waiting")): 4,
        ("marlaas_sequences", ("tenant", "acme"), ("state", "running")): 3,
        ("marlaas_sequences", ("tenant", "acme"), ("state", "parked")): 2,
        ("marlaas_updates_waiting", ("tenant", "acme")): 1,
        ("marlaas_tokens_total", ("tenant", "acme"), ("kind", "sampled")): 1000,
        ("marlaas_tokens_total", ("tenant", "acme"), ("kind", "prefilled")): 300,
        ("marlaas_tokens_total", ("tenant", "acme"), ("kind", "reused")): 200,
        ("marlaas_tokens_total", ("tenant", "acme"), ("kind", "trained")): 900,
        ("marlaas_tenant_device_seconds_total", ("tenant", "acme")): 12.5,
        ("marlaas_batch_fill_ratio", ("device", "cpu")): 0.25,
        ("marlaas_batch_fill_ratio", ("device", "cuda:1")): 1,
        ("marlaas_device_busy_seconds_total", ("device", "cpu"), ("kind", "sampling")): 20,
        ("marlaas_device_busy_seconds_total", ("device", "cpu"), ("kind", "training")): 10,
        ("marlaas_device_busy_seconds_total", ("device", "cuda:1"), ("kind", "training")): 4,
        ("marlaas_device_scheduling_seconds_total", ("device", "cpu")): 1.5,
        ("marlaas_device_uptime_seconds", ("device", "cpu")): 60,
        ("marlaas_adapters", ("device", "cpu"), ("state", "resident")): 3,
        ("marlaas_adapters", ("device", "cpu"), ("state", "paged")): 2,
    }
    assert {key: value(samples, key[0], **dict(key[1:])) for key in expected} == expected


def test_a_label_of_any_text_survives_the_scrape(port):
    with serve(PoolCollector(lambda: STATS), port):
        assert value(scrape(port), "marlaas_tenant_device_seconds_total", tenant='odd"name\\\n') == 1


def test_each_scrape_asks_the_pool_anew(port):
    answers = iter([PoolStats(tenants={"a": TenantStats(waiting=1)}), PoolStats(tenants={"a": TenantStats(waiting=2)})])
    with serve(PoolCollector(lambda: next(answers)), port):
        waiting = [value(scrape(port), "marlaas_sequences", tenant="a", state="waiting") for _ in range(2)]
    assert waiting == [1, 2]


def test_a_pool_that_does_not_answer_is_down_and_the_scrape_succeeds(port):
    def silent():
        raise TimeoutError

    with serve(PoolCollector(silent), port):
        assert scrape(port) == {("marlaas_pool_up", frozenset()): 0}


def test_the_server_ends_with_its_block_and_the_port_is_free_again(port):
    for _ in range(2):
        with serve(PoolCollector(lambda: STATS), port):
            scrape(port)
        with pytest.raises(urllib.error.URLError):
            scrape(port)


def test_a_port_in_use_is_an_error_that_names_the_field():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        expected = rf"^pool\.metrics_port: {port} is in use on 127\.0\.0\.1; choose a free port$"
        with pytest.raises(MarlaasError, match=expected), serve(PoolCollector(lambda: STATS), port):
            pass


@pytest.mark.parametrize("port", [0, 65536, -1])
def test_a_port_out_of_range_is_refused_by_the_spec(port):
    with pytest.raises(ValidationError, match="metrics_port"):
        PoolSpec(metrics_port=port)


class FakePool:
    """A pool of which only statistics and closing are asked; they say in which loop they ran."""

    opened = 0
    hangs = False

    def __init__(self, model, spec, progress):
        type(self).opened += 1
        self.loops, self.closed = [], False

    async def stats(self):
        self.loops.append(asyncio.get_running_loop())
        if self.hangs:
            await asyncio.Event().wait()
        return STATS

    async def close(self):
        self.closed = True


@pytest.fixture
def fake_pool(monkeypatch):
    class Pool(FakePool):
        pass

    monkeypatch.setattr(flows.runtime, "open_pool", Pool)
    return Pool


async def test_a_pool_with_a_metrics_port_is_scraped_while_it_is_open(port, fake_pool):
    async with Runtime().pool(ModelSpec(), PoolSpec(metrics_port=port)) as pool:
        samples = await asyncio.to_thread(scrape, port)
        assert value(samples, "marlaas_tokens_total", tenant="acme", kind="sampled") == 1000
        assert pool.loops == [asyncio.get_running_loop()]
        assert not pool.closed
    assert pool.closed
    with pytest.raises(urllib.error.URLError):
        await asyncio.to_thread(scrape, port)


async def test_metrics_go_on_in_the_loop_of_a_user_that_is_still_there(port, fake_pool):
    """The opener leaves first; a flow run in another loop holds the pool."""
    runtime, entered, leave = Runtime(), threading.Event(), threading.Event()
    loops = []

    async def second():
        async with runtime.pool(ModelSpec(), PoolSpec(metrics_port=port)):
            loops.append(asyncio.get_running_loop())
            entered.set()
            while not leave.is_set():
                await asyncio.sleep(0.01)

    other = threading.Thread(target=lambda: asyncio.run(second()))
    async with runtime.pool(ModelSpec(), PoolSpec(metrics_port=port)) as pool:
        other.start()
        assert await asyncio.to_thread(entered.wait, 10)
    try:
        assert value(await asyncio.to_thread(scrape, port), "marlaas_pool_up") == 1
        assert pool.loops == loops
    finally:
        leave.set()
        await asyncio.to_thread(other.join)
    assert pool.closed
    assert fake_pool.opened == 1


async def test_who_asks_for_no_metrics_shares_the_pool_that_has_them(port, fake_pool):
    runtime = Runtime()
    async with runtime.pool(ModelSpec(), PoolSpec(metrics_port=port)) as first:
        async with runtime.pool(ModelSpec(), PoolSpec()) as second:
            assert second is first
        assert value(await asyncio.to_thread(scrape, port), "marlaas_pool_up") == 1


async def test_a_pool_can_be_opened_again_on_the_same_port_at_once(port, fake_pool):
    runtime = Runtime()
    for _ in range(3):
        async with runtime.pool(ModelSpec(), PoolSpec(metrics_port=port)):
            assert value(await asyncio.to_thread(scrape, port), "marlaas_pool_up") == 1
    assert fake_pool.opened == 3


async def test_statistics_that_never_come_are_a_pool_that_is_down(port, fake_pool, monkeypatch):
    monkeypatch.setattr(flows.runtime, "_STATS_SECONDS", 0.2)
    fake_pool.hangs = True
    async with Runtime().pool(ModelSpec(), PoolSpec(metrics_port=port)):
        started = time.monotonic()
        assert await asyncio.to_thread(scrape, port) == {("marlaas_pool_up", frozenset()): 0}
        assert time.monotonic() - started < 5


async def test_a_taken_port_is_said_before_the_model_is_loaded(fake_pool):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MarlaasError, match=rf"pool\.metrics_port: {port} is in use"):
            async with Runtime().pool(ModelSpec(), PoolSpec(metrics_port=port)):
                pass
    assert fake_pool.opened == 0


async def test_a_model_that_does_not_load_leaves_no_server(port, monkeypatch):
    def broken(model, spec, progress):
        raise MarlaasError("no such model")

    monkeypatch.setattr(flows.runtime, "open_pool", broken)
    with pytest.raises(MarlaasError, match="no such model"):
        async with Runtime().pool(ModelSpec(), PoolSpec(metrics_port=port)):
            pass
    with serve(PoolCollector(lambda: STATS), port):
        pass
