"""Small fleets for integration tests, on the tiny random model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marlaas.specs import FleetSpec
from storage import Commit, JobLayout, ObjectStore, read_commits

JOB = "whole"
TRAINED = ("narrow", "wide", "judged")

MODEL = {"source": "tiny-random", "dtype": "float32", "device": "cpu"}
POOL = {
    "max_rank": 8,
    "max_adapters": 6,
    "max_sequences": 64,
    "max_sequence_tokens": 192,
    "train_tokens": 1024,
    "threads": 1,
}
SUMS = {
    "kind": "reasoning_gym",
    "dataset": "chain_sum",
    "answer": {"extract": "last_number"},
    "settings": {"min_terms": 2, "max_terms": 2, "max_digits": 1},
}
SMALL = {
    "environment": SUMS,
    "lora": {"rank": 4, "alpha": 8},
    "group_size": 2,
    "prompts_per_step": 2,
    "sampling": {"max_tokens": 6},
    "evaluation": {"examples": 10},
}

# Rewards that a random model can earn, and two environments that go wrong.
GAMES = """
class Letters:
    def example(self, index, split, seed):
        return {"question": f"{split} {seed} {index}", "answer": "a"}

    def score(self, example, answer):
        return len(set(answer)) / 32


class Raises(Letters):
    def score(self, example, answer):
        raise RuntimeError("the judge is ill")


class Nan(Letters):
    def score(self, example, answer):
        return float("nan")
"""


def game(name: str, folder: object) -> dict[str, object]:
    return {"kind": "custom", "entry": f"games:{name}", "path": str(folder)}


@dataclass(frozen=True)
class Trained:
    fleet: FleetSpec
    folder: Path
    store: ObjectStore
    rows: dict[str, dict[str, Any]]

    def commits(self, tenant: str) -> list[Commit]:
        return read_commits(self.store, JobLayout(tenant, JOB))

    def path(self, tenant: str) -> Path:
        return self.folder / "store/tenants" / tenant / JOB
