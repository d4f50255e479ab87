"""The environment of `bench/fleet.py`, run by its flows in a process of its own as any user's class is."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import numpy as np


class Fleet:
    """Conversations of `turns` replies, whatever they say; a tool call after each but the last takes its time."""

    def __init__(self, turns: int, latency: list[float], prompt_bytes: int, answer_bytes: int) -> None:
        """latency: median, sigma, low and high of a clipped log-normal, in seconds."""
        self.turns, self.latency = turns, latency
        self.prompt_bytes, self.answer_bytes = prompt_bytes, answer_bytes

    def example(self, index: int, split: str, seed: int) -> dict[str, Any]:
        return {"question": f"{split} {seed} {index} ".ljust(self.prompt_bytes, "?")}

    async def step(self, example: dict[str, Any], messages: list[dict[str, str]], completion: str) -> dict[str, Any]:
        turn = sum(m["role"] == "assistant" for m in messages) + 1
        said = f"{messages}{completion}".encode()
        rng = np.random.default_rng(int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "big"))
        if turn == self.turns:
            return {"reward": float(rng.integers(0, 2)), "parts": {"turns": float(turn)}}
        median, sigma, low, high = self.latency
        if median:
            await asyncio.sleep(float(np.clip(median * np.exp(sigma * rng.standard_normal()), low, high)))
        return {"done": False, "messages": [{"role": "tool", "content": "a" * self.answer_bytes}]}
