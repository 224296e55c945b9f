"""``python -m bench.chaos_server CONFIG.json [--resume RUN_DIR]``: ``wingbeat serve`` with clocks that can jump."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from wingbeat.core.config import Config
from wingbeat.core.errors import SetupError
from wingbeat.core.lifeline import end_with_supervisor
from wingbeat.deploy.local import run_server

GRACE_S = 20.0


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("--resume", type=Path, default=None)
    given = parser.parse_args()
    end_with_supervisor(grace_s=GRACE_S)
    path: Path = given.config
    try:
        run_server(
            Config.model_validate_json(path.read_bytes()),
            path.parent,
            resume=given.resume,
            on_ready=lambda supervisor: None,
            control_module="bench.chaos_control",
        )
    except SetupError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
