"""Stops a session's services when the process that started them is gone, however it ended, kill -9 included.

Run as `python -m marlaas.services.watchdog FOLDER TOKEN` with a pipe from the owner as standard input: the
system closes that pipe when the owner ends, and anything written to it sends the watchdog home. Services
that were told to stay (`marlaas up`), that were stopped, or that belong to a later session are left alone. A
pipe is used rather than PR_SET_PDEATHSIG because that signal follows the thread that started the process, is
lost on a change of user, and would not stop the services in order.
"""

from __future__ import annotations

import sys
from pathlib import Path

from marlaas.services.session import end_session
from marlaas.services.state import SessionState, locked

_LOCK_SECONDS = 600


def main(folder: Path, token: str) -> None:
    """Wait for the owner's end, then stop what is still its."""
    if sys.stdin.buffer.read():
        return
    with locked(folder, _LOCK_SECONDS):
        state = SessionState.load(folder)
        if state.token == token and not state.kept:
            end_session(state, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
