"""How long a device takes for a pass: curves through measured points, read from a JSON file."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

Point = tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)]]
Seconds = Annotated[float, Field(ge=0)]


class ServiceCurves(BaseModel):
    """Seconds of one device's passes, and of the host that orchestrates them.

    decode: `[rows, seconds]` of a decoding step under no adapter. adapters: `[distinct adapters, seconds]` that they
    add to it. measured: False marks placeholders. Between points lines; beyond the last one, the last line goes on.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    measured: bool
    note: str = ""
    decode: tuple[Point, ...] = Field(min_length=1)
    adapters: tuple[Point, ...] = ((0.0, 0.0),)
    prefill_seconds_per_token: Seconds
    prefill_fixed_seconds: Seconds
    train_seconds_per_token: Seconds
    train_fixed_seconds: Seconds
    update_fixed_seconds: Seconds = Field(description="of the optimizer, for each job's update")
    host_seconds_per_step: Seconds = Field(description="of orchestration, storage and tracking, for each tenant's step")

    @field_validator("decode", "adapters")
    @classmethod
    def _ascending(cls, points: tuple[Point, ...]) -> tuple[Point, ...]:
        where = [x for x, _ in points]
        if any(a >= b for a, b in pairwise(where)):
            raise ValueError(f"the points' first numbers are {where}; they must ascend")
        return points

    def decode_seconds(self, rows: int, adapters: int) -> float:
        """One step of so many rows under so many distinct adapters; 0 for no rows."""
        return _on_line(self.decode, rows) + _on_line(self.adapters, adapters) if rows else 0.0

    def prefill_seconds(self, tokens: int) -> float:
        """What computing so many new tokens adds to a step; 0 for none."""
        return self.prefill_fixed_seconds + tokens * self.prefill_seconds_per_token if tokens else 0.0

    def train_seconds(self, tokens: int, updates: int) -> float:
        """A training pass of so many tokens that ends so many updates."""
        return self.train_fixed_seconds + tokens * self.train_seconds_per_token + updates * self.update_fixed_seconds

    def scaled(self, factor: float) -> ServiceCurves:
        """The curves of a device that is `factor` times as fast in everything; the host stays as it is."""
        if factor == 1.0:
            return self
        device = {
            name: value / factor
            for name, value in self
            if name.endswith(("_fixed_seconds", "_seconds_per_token")) and isinstance(value, float)
        }
        lines = {
            name: tuple((x, seconds / factor) for x, seconds in points)
            for name, points in (("decode", self.decode), ("adapters", self.adapters))
        }
        named = {"name": f"{self.name}, each device taken {factor:g} times as fast", "measured": False}
        return self.model_copy(update={**device, **lines, **named})


def read_curves(path: Path) -> ServiceCurves:
    """The curves in a file. Raises OSError, pydantic's ValidationError."""
    return ServiceCurves.model_validate_json(path.read_text())


def _on_line(points: Sequence[Point], x: float) -> float:
    """Linear between the points, and on beyond the last; before the first, the first's value."""
    if x <= points[0][0] or len(points) == 1:
        return points[0][1]
    after = min(bisect_right(points, x, key=lambda point: point[0]), len(points) - 1)
    (x0, y0), (x1, y1) = points[after - 1], points[after]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
