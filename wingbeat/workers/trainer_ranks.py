"""``python -m wingbeat.workers.trainer_ranks``: the processes beside the trainer worker that train with it.

The trainer worker is rank 0.  It talks to control, and it tells the others each thing that is to be done, as msgpack
over the process group; they do it at the same time and answer (:mod:`wingbeat.workers.ranks`).

    control ──▶ rank 0 (the trainer worker) ──▶ ranks 1 ... N-1, which it starts, or which somebody else starts
                        ◀── answers ─────────

Ranks on one machine are started by rank 0, meet by a file and talk over the loopback interface; they end when rank 0
does, however that ends.  On several machines they are started by hand, by ``torchrun`` or by a cluster's launcher, with
``MASTER_ADDR``, ``MASTER_PORT``, ``WORLD_SIZE``, ``RANK`` and ``LOCAL_RANK`` in their environment, and rank 0 likewise.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

from wingbeat.core.errors import SetupError
from wingbeat.core.lifeline import LIFELINE_VARIABLE, end_with_supervisor

logger = logging.getLogger(__name__)

PAUSE_S = 1.0
"""Before a rank that stays begins again."""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="One more process of a trainer; rank 0 is the trainer worker.", allow_abbrev=False
    )
    parser.add_argument("--rank", type=int, help="unset: RANK in the environment")
    parser.add_argument("--world-size", type=int, help="unset: WORLD_SIZE in the environment")
    parser.add_argument("--meeting", type=Path, help="the file by which ranks of one machine meet")
    parser.add_argument("--device", default="auto", help="trainer.device")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument(
        "--stay",
        action="store_true",
        help="however this rank ends, begin again with the next trainer (as a launcher does)",
    )
    return parser.parse_args()


def main() -> None:
    """Entry point of the process."""
    given = _arguments()
    if given.stay:
        _stay(given.rank)
    from wingbeat.workers.ranks import run_rank  # here: it loads torch, which a process that only stays must not hold

    run_rank(given.rank, given.world_size, meeting=given.meeting, device=given.device, threads=given.threads)


def _stay(rank: int | None) -> NoReturn:
    """A process of its own for each trainer: however one ends, nothing of its memory or connections is left."""
    name = os.environ.get("RANK") if rank is None else rank
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s rank {name} %(levelname)s %(message)s")
    end_with_supervisor(grace_s=0)
    command = [sys.executable, "-m", "wingbeat.workers.trainer_ranks", *(a for a in sys.argv[1:] if a != "--stay")]
    environment = os.environ | {LIFELINE_VARIABLE: "1"}  # it ends with us
    while True:
        code = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment).wait()
        if code == SetupError.exit_code:
            raise SystemExit(code)  # its words said why
        logger.warning("this rank ended (exit code %d); waiting for the next trainer", code)
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
