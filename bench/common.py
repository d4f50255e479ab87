"""What all benchmarks share: the machine, the versions, the table and the JSON document."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

__all__ = ["machine", "median", "table", "versions", "write_json"]

PACKAGES = ("marlaas", "torch", "transformers", "peft", "prefect", "mlflow", "pyarrow", "simpy")


def machine() -> dict[str, Any]:
    """The machine that the benchmark runs on. memory_gb: of RAM."""
    import torch

    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "torch_threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def versions(*packages: str) -> dict[str, str]:
    """The installed versions of `packages`, or of those that matter to most benchmarks."""
    found = {}
    for package in packages or PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def write_json(
    path: Path | None, bench: str, rows: Sequence[Mapping[str, Any]], ratios: Mapping[str, float], **more: Any
) -> None:
    """Writes the benchmark's document: what ran, on what, its rows, and its headline ratios (medians)."""
    if path is None:
        return
    document = {
        "bench": bench,
        "command": " ".join(["python", "-m", f"bench.{bench}", *sys.argv[1:]]),
        "machine": machine(),
        "versions": versions(),
        "rows": list(rows),
        "ratios": dict(ratios),
        **more,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], title: str | None = None) -> None:
    """Prints the rows' columns."""
    shown = Table(*columns, title=title)
    for row in rows:
        shown.add_row(*(_text(row.get(column)) for column in columns))
    Console(width=None if sys.stdout.isatty() else 140).print(shown)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
