"""What a pool says of itself, for Prometheus: a collector, and a server that it is scraped from."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from marlaas.errors import MarlaasError
from marlaas.pool.stats import DeviceStats, PoolStats, TenantStats

_Sample = tuple[Sequence[str], float]


class PoolCollector(Collector):
    """Asks the pool at each scrape. `stats` is called in the server's threads.

    A pool that does not answer (TimeoutError or MarlaasError) is `marlaas_pool_up 0` and nothing else.
    """

    def __init__(self, stats: Callable[[], PoolStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """The metrics of this moment; counters start at 0 with the pool."""
        up = "Whether the pool answered."
        try:
            stats = self._stats()
        except (TimeoutError, MarlaasError):
            yield GaugeMetricFamily("marlaas_pool_up", up, value=0)
            return
        yield GaugeMetricFamily("marlaas_pool_up", up, value=1)
        yield from _tenant_metrics(stats.tenants)
        yield from _device_metrics(stats.devices)


@contextlib.contextmanager
def serve(collector: Collector, port: int, address: str = "127.0.0.1") -> Iterator[None]:
    """Serves the collector's metrics over HTTP, under any path. Raises MarlaasError if the port is not to be had."""
    registry = CollectorRegistry()
    registry.register(collector)
    try:
        server, thread = start_http_server(port, address, registry)
    except OSError as error:
        taken = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be served on: {error.strerror}"
        raise MarlaasError(f"pool.metrics_port: {port} {taken} on {address}; choose a free port") from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _tenant_metrics(tenants: dict[str, TenantStats]) -> Iterator[Metric]:
    yield _gauge(
        "marlaas_sequences",
        "Sequences that wait for the batch, are in it, or are parked while a tool runs.",
        ("tenant", "state"),
        (
            ((name, state), value)
            for name, t in tenants.items()
            for state, value in (("waiting", t.waiting), ("running", t.running), ("parked", t.parked))
        ),
    )
    yield _gauge(
        "marlaas_updates_waiting",
        "Updates that wait for the trainer.",
        ("tenant",),
        (((name,), t.updates_waiting) for name, t in tenants.items()),
    )
    yield _counter(
        "marlaas_tokens",
        "Tokens sampled, prefilled, reused from kept keys and values, or trained on.",
        ("tenant", "kind"),
        (
            ((name, kind), value)
            for name, t in tenants.items()
            for kind, value in (
                ("sampled", t.sampled_tokens),
                ("prefilled", t.prefilled_tokens),
                ("reused", t.reused_tokens),
                ("trained", t.trained_tokens),
            )
        ),
    )
    yield _counter(
        "marlaas_tenant_device_seconds",
        "The tenant's share of the devices' time.",
        ("tenant",),
        (((name,), t.device_seconds) for name, t in tenants.items()),
    )


def _device_metrics(devices: Sequence[DeviceStats]) -> Iterator[Metric]:
    yield _gauge(
        "marlaas_batch_fill_ratio",
        "Running sequences as a share of pool.max_sequences.",
        ("device",),
        (((d.name,), d.batch_fill) for d in devices),
    )
    yield _counter(
        "marlaas_device_busy_seconds",
        "Time in which the device computed.",
        ("device", "kind"),
        (
            ((d.name, kind), value)
            for d in devices
            for kind, value in (("sampling", d.sampling_seconds), ("training", d.training_seconds))
        ),
    )
    yield _counter(
        "marlaas_device_scheduling_seconds",
        "Time that the device's thread spent in deciding what to compute.",
        ("device",),
        (((d.name,), d.scheduling_seconds) for d in devices),
    )
    yield _gauge(
        "marlaas_device_uptime_seconds",
        "Time since the device was opened.",
        ("device",),
        (((d.name,), d.uptime_seconds) for d in devices),
    )
    yield _gauge(
        "marlaas_adapters",
        "Adapter versions on the device, and those paged out to the host.",
        ("device", "state"),
        (
            ((d.name, state), value)
            for d in devices
            for state, value in (("resident", d.resident_adapters), ("paged", d.paged_adapters))
        ),
    )


def _gauge(name: str, text: str, labels: Sequence[str], samples: Iterable[_Sample]) -> Metric:
    metric = GaugeMetricFamily(name, text, labels=labels)
    for values, value in samples:
        metric.add_metric(values, value)
    return metric


def _counter(name: str, text: str, labels: Sequence[str], samples: Iterable[_Sample]) -> Metric:
    """A counter; its samples get `_total` at the end of their names."""
    metric = CounterMetricFamily(name, text, labels=labels)
    for values, value in samples:
        metric.add_metric(values, value)
    return metric
