"""Block sizes of the Triton kernels, by type of device and by how long the segments are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Shape(StrEnum):
    """decode: at most 16 tokens a segment, so that reading the adapters is the work; long: prefill and training."""

    DECODE = "decode"
    LONG = "long"

    @staticmethod
    def of(longest_segment: int) -> Shape:
        """The class of a batch by its longest segment, in tokens."""
        return Shape.DECODE if longest_segment <= DECODE_TOKENS else Shape.LONG


@dataclass(frozen=True)
class Tiles:
    """What one program works on, all powers of two and at least 16, the smallest operand of a matrix unit.

    tokens: of one segment, the table's block size; rows: of A (ranks of all parts in a row); inputs: elements of x
    and A that a step of a loop reads; columns: of the output; splits: at most so many programs share the inputs of
    one shrink, each with at least `split_inputs` of them; launch: options of the compiler.
    max_programs: the device's limit on programs in one launch.
    """

    tokens: int
    rows: int
    inputs: int
    columns: int
    splits: int = 1
    split_inputs: int = 512
    launch: Mapping[str, int] = field(default_factory=dict)
    max_programs: int = 2**31 - 1

    def splits_of(self, inputs: int) -> int:
        """How many programs share the inputs of a fused linear."""
        return max(1, min(self.splits, inputs // self.split_inputs))


DECODE_TOKENS = 16
MIN_RANKS, MAX_RANKS = 16, 64  # of one rank block: a larger rank is a loop, a smaller one is masked

# An Ascend vector core holds its operands in a unified buffer of 192 KB, half of it when transfers overlap with work.
# The largest tiles below are rows x inputs = 64 x 256 (decode) and tokens x columns = 64 x 256 (long): 64 KB in fp32.
# Its programs are at most 65535 a launch: at 64 tokens by 256 columns that is 48,000 tokens of 22,016 outputs.
# It has no warps or stages to set. "cpu" is Triton's interpreter: tiles so small that small tests cross their borders.
_TILES = {
    ("cuda", Shape.DECODE): Tiles(DECODE_TOKENS, 64, 128, 128, splits=8, launch={"num_warps": 4, "num_stages": 3}),
    ("cuda", Shape.LONG): Tiles(64, 64, 64, 128, launch={"num_warps": 4, "num_stages": 3}),
    ("npu", Shape.DECODE): Tiles(DECODE_TOKENS, 64, 256, 256, splits=8, max_programs=65535),
    ("npu", Shape.LONG): Tiles(64, 64, 128, 256, max_programs=65535),
    ("cpu", Shape.DECODE): Tiles(DECODE_TOKENS, 16, 16, 16, splits=3, split_inputs=16),
    ("cpu", Shape.LONG): Tiles(32, 32, 16, 32),
}


def tiles_of(device_type: str, shape: Shape) -> Tiles:
    """The tiles of a device type (`torch.device.type`). Raises ValueError for one that the kernels do not know."""
    if (device_type, shape) not in _TILES:
        known = sorted({device for device, _ in _TILES})
        raise ValueError(f"no tiles for device type {device_type!r}; known are {', '.join(known)}")
    return _TILES[device_type, shape]


def rank_block(max_rank: int) -> int:
    """Ranks that one program handles at a time: the next power of two, within the limits above."""
    return min(max(1 << (max_rank - 1).bit_length(), MIN_RANKS), MAX_RANKS)
