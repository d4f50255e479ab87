"""The shared pool: where the stages of all tenants meet the accelerator."""

from marlaas.pool.local import LocalPool
from marlaas.pool.protocol import AdapterLease, Pool, adapter_name

__all__ = ["AdapterLease", "LocalPool", "Pool", "adapter_name"]
