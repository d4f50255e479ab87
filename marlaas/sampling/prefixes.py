"""Keys and values of conversations that have left the batch: kept while their environment answers."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from marlaas.attention import KeyValues


@dataclass(frozen=True)
class _Prefix:
    tokens: tuple[int, ...]
    values: KeyValues


class PrefixCache:
    """At most `max_tokens` tokens' keys and values; what was left longest ago goes first when it is full.

    An entry belongs to one session and one adapter version (None: the base), so it is never used for another's
    tokens or under other weights.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.tokens = 0
        self._entries: OrderedDict[tuple[str, str | None], _Prefix] = OrderedDict()
        self._of_session: dict[str, set[tuple[str, str | None]]] = defaultdict(set)

    def __len__(self) -> int:
        return len(self._entries)

    def sessions(self) -> list[str]:
        """The session of each entry."""
        return [session for session, _ in self._entries]

    def keep(self, session: str, adapter: str | None, tokens: Sequence[int], values: KeyValues) -> None:
        """Keeps the keys and values of `tokens`, in place of what the session had under this adapter."""
        self._drop((session, adapter))
        if len(tokens) > self.max_tokens:
            return
        while self.tokens + len(tokens) > self.max_tokens:
            self._drop(next(iter(self._entries)))
        self._entries[session, adapter] = _Prefix(tuple(tokens), values)
        self._of_session[session].add((session, adapter))
        self.tokens += len(tokens)

    def take(self, session: str, adapter: str | None, tokens: Sequence[int]) -> KeyValues | None:
        """Removes and returns what the session has, if it is of a proper prefix of `tokens`."""
        entry = self._drop((session, adapter))
        if entry is None or len(entry.tokens) >= len(tokens) or tuple(tokens[: len(entry.tokens)]) != entry.tokens:
            return None
        return entry.values

    def drop_session(self, session: str) -> None:
        """The conversation is over."""
        for key in list(self._of_session.get(session, ())):
            self._drop(key)

    def drop_adapter(self, adapter: str) -> None:
        """The adapter version is gone."""
        for key in [key for key in self._entries if key[1] == adapter]:
            self._drop(key)

    def _drop(self, key: tuple[str, str | None]) -> _Prefix | None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.tokens -= len(entry.tokens)
            self._of_session[key[0]].discard(key)
            if not self._of_session[key[0]]:
                del self._of_session[key[0]]
        return entry
