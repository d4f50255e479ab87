"""The progress board as a terminal shows it: a live table, or a plain line a step where there is no terminal."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from rich.console import Console
from rich.live import Live
from rich.table import Table

from marlaas.progress import Board, TenantProgress

_REFRESH_SECONDS = 0.5


@contextlib.contextmanager
def shown(board: Board, console: Console) -> Iterator[None]:
    """Shows the board for as long as the context lasts."""
    ended = threading.Event()
    show = _live if console.is_terminal else _lines
    thread = threading.Thread(target=show, args=(board, console, ended), name="marlaas-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _live(board: Board, console: Console, ended: threading.Event) -> None:
    with Live(console=console, auto_refresh=False) as live:
        while not ended.wait(_REFRESH_SECONDS):
            live.update(_table(board.rows()), refresh=True)
        live.update(_table(board.rows()), refresh=True)


def _table(rows: list[TenantProgress]) -> Table:
    table = Table("tenant", "step", "stage", "reward first", "reward now", "tokens/s", "note")
    for row in rows:
        table.add_row(
            row.tenant,
            f"{row.step}/{row.steps}",
            row.stage,
            _number(row.reward_first, ".3f"),
            _number(row.reward, ".3f"),
            _number(row.tokens_per_second, ".0f"),
            row.note,
        )
    return table


def _lines(board: Board, console: Console, ended: threading.Event) -> None:
    said: dict[str, TenantProgress] = {}
    while True:
        last = ended.wait(_REFRESH_SECONDS)
        for row in board.rows():
            before = said.get(row.tenant)
            if before is None or (before.step, _milestone(before)) != (row.step, _milestone(row)):
                said[row.tenant] = row
                console.print(_line(row), markup=False, highlight=False, soft_wrap=True)
        if last:
            return


def _milestone(row: TenantProgress) -> str:
    """Stages worth a line of their own; the three of every step are not."""
    return "" if row.stage in ("rollout", "update", "publish") else row.stage


def _line(row: TenantProgress) -> str:
    parts = [f"{row.tenant}: {row.stage}, step {row.step}/{row.steps}"]
    if row.reward is not None:
        parts.append(f"reward {row.reward:.3f}")
    if row.tokens_per_second is not None:
        parts.append(f"{row.tokens_per_second:.0f} tokens/s")
    return ", ".join([*parts, *([row.note] if row.note else [])])


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
