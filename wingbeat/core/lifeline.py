"""Ending with one's supervisor: it holds the other end of our standard input and never writes to it.

A killed supervisor cannot tell its children; the operating system closes the pipe in its place.
"""

from __future__ import annotations

import os
import signal
import threading
import time

LIFELINE_VARIABLE = "WINGBEAT_LIFELINE"
"""Set to 1 by a supervisor that holds such a pipe; only then is standard input read."""
ORPHANED_EXIT = 3
LENDING_GRACE_S = 20.0
"""How long a resources server cleans up at most once its supervisor is gone; the next one ends what is left."""

_orphaned = threading.Event()


def is_orphaned() -> bool:
    """Whether this process ends because its supervisor did, and not because somebody asked it to."""
    return _orphaned.is_set()


def end_with_supervisor(*, grace_s: float) -> None:
    """From now on, the supervisor's end is ours: SIGTERM to ourselves, a hard exit ``grace_s`` later (0: at once).

    Processes that we start ourselves are not concerned.
    """
    if os.environ.pop(LIFELINE_VARIABLE, "") != "1":
        return

    def watch() -> None:
        while os.read(0, 1):
            pass
        _orphaned.set()
        if grace_s > 0:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(grace_s)
        os._exit(ORPHANED_EXIT)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
