"""How every stage runs as a Prefect task: never cached, results not stored, since artifacts are."""

from typing import Any

from prefect.cache_policies import NO_CACHE

STAGE: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False}
