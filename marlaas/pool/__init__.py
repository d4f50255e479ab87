"""The shared pool: where the stages of all tenants meet the accelerator."""

from __future__ import annotations

from marlaas.models import Progress
from marlaas.pool.local import LocalPool
from marlaas.pool.protocol import AdapterLease, Pool, adapter_name
from marlaas.specs import ModelSpec, PoolSpec

__all__ = ["AdapterLease", "LocalPool", "Pool", "adapter_name", "open_pool"]


def open_pool(model: ModelSpec, pool: PoolSpec, progress: Progress = lambda line: None) -> Pool:
    """The pool at `pool.address`, or one in this process. Raises ModelError, MarlaasError."""
    if pool.address is None:
        return LocalPool(model, pool, progress)
    from marlaas.pool.ray import RayPool

    return RayPool(model, pool, progress)
