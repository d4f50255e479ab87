"""The extra wait of a tool call: drawn by a hash, so that a conversation run again waits as long."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING

from marlaas.environments.protocol import Message

if TYPE_CHECKING:
    from marlaas.specs import LatencySpec


def wait_seconds(spec: LatencySpec, example: str, messages: Sequence[Message], call: int) -> float:
    """Seconds for the call of that number in the last of the messages: log-normal, clipped to the spec's bounds."""
    drawn_from = json.dumps([spec.seed, example, list(messages), call], sort_keys=True)
    digest = hashlib.blake2b(drawn_from.encode(), digest_size=6).digest()
    uniform = (int.from_bytes(digest, "big") + 0.5) / 2**48
    wait = spec.median_seconds * math.exp(spec.sigma * NormalDist().inv_cdf(uniform))
    return min(max(wait, spec.min_seconds), spec.max_seconds)
