"""``python -m wingbeat.workers engine|trainer``: a worker process.

What torch and transformers make while they are imported stays, and the collector would walk all of it again and again:
without it a worker starts in four fifths of the time, and its later collections are short.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module

ROLES = ("engine", "trainer")


def main() -> None:
    """Entry point of the process."""
    role = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if role not in ROLES:
        sys.exit(f"error: expected one of {', '.join(ROLES)}, got {role!r}")
    gc.disable()
    module = import_module(f"wingbeat.workers.{role}")
    gc.freeze()
    gc.enable()
    module.main()


if __name__ == "__main__":
    main()
