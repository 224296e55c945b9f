"""What the processes of one trainer do at the same time, because rank 0 says so.

*Alike or not at all.*  A command may fail with a WingbeatError or ValueError in every process, at the same point:
then it is reported, and the next one comes.  Whatever happens in one process only, a death first of all, leaves the
others in the middle of something: then all end, the supervisor starts the worker again, and it begins at the last
checkpoint.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec
import torch
from safetensors import SafetensorError

from wingbeat.core.config import PolicyConfig
from wingbeat.core.errors import SetupError, UnavailableError, WingbeatError
from wingbeat.core.lifeline import end_with_supervisor
from wingbeat.core.samples import TrainingBatch
from wingbeat.trainer.distributed.rank import RankTrainer
from wingbeat.trainer.distributed.world import RankLost, Rendezvous, World, join
from wingbeat.trainer.memory import free_garbage
from wingbeat.trainer.stored_state import StoredState, WrittenParts

logger = logging.getLogger(__name__)

ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
"""Where ranks are started by somebody else."""
ALIKE = (WingbeatError, ValueError)
"""What fails in all processes at the same point, if it fails."""
FILES = (OSError, SafetensorError)


class Build(msgspec.Struct, tag=True, frozen=True):
    """Load the policy."""

    model: str
    config: dict[str, Any]
    total_steps: int
    seed: int


class Train(msgspec.Struct, tag=True, frozen=True):
    batch: TrainingBatch


class Gather(msgspec.Struct, tag=True, frozen=True):
    what: Literal["published", "trained"]


class SaveParts(msgspec.Struct, tag=True, frozen=True):
    folder: str


class LoadParts(msgspec.Struct, tag=True, frozen=True):
    folder: str
    step: int


Command = Build | Train | Gather | SaveParts | LoadParts


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a command went in one process."""

    error: str = ""
    written: WrittenParts | None = None


class Rank:
    """One process: does what rank 0 says, and answers."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.trainer: RankTrainer | None = None

    def serve(self) -> NoReturn:
        """Of every rank but the first.  Raises RankLost when that one ends."""
        while True:
            try:
                said = self._world.broadcast(None)
            except RuntimeError as error:  # torch has no other for a connection that is closed
                raise RankLost("rank 0 has ended") from error
            command = msgspec.msgpack.decode(said, type=Command)
            answer = Answer()
            try:
                written = self.do(command)
                answer = Answer(written=written if isinstance(written, WrittenParts) else None)
            except ALIKE as error:
                logger.warning("%s failed: %s", type(command).__name__, error)
                answer = Answer(error=f"{type(error).__name__}: {error}")
            self._world.gather(msgspec.msgpack.encode(answer))

    def do(self, command: Command) -> Any:
        """Raises as the trainer does; UnavailableError where a file cannot be written."""
        if isinstance(command, Build):
            self.trainer = None
            free_garbage()  # the next one needs the memory of the last
            self.trainer = self._build(command)
            return None
        trainer = self.trainer
        assert trainer is not None, "it was built first"
        match command:
            case Train():
                return trainer.train_step(command.batch)
            case Gather(what="published"):
                return trainer.published_tensors()
            case Gather():
                return trainer.trained_tensors()
            case SaveParts():
                try:
                    return trainer.save_part(Path(command.folder))
                except FILES as error:
                    raise UnavailableError(f"cannot write a part of a checkpoint: {error}") from error
            case LoadParts():
                stored = StoredState.unverified(Path(command.folder), step=command.step)
                trainer.load_part(stored, step=command.step)
                return None

    def _build(self, command: Build) -> RankTrainer:
        config = PolicyConfig.model_validate(command.config)
        return RankTrainer(
            Path(command.model),
            config=config,
            total_steps=command.total_steps,
            seed=command.seed,
            world=self._world,
            dtype=getattr(torch, config.dtype),
        )


def run_rank(rank: int | None, size: int | None, *, meeting: Path | None, device: str, threads: int) -> NoReturn:
    """The whole life of every rank but the first; without a ``meeting``, the environment says what is None."""
    keep_exit_code()
    try:
        rendezvous = _rendezvous(rank, size, meeting=meeting)
        logging.basicConfig(level=logging.INFO, format=f"%(asctime)s rank {rendezvous.rank} %(levelname)s %(message)s")
        end_with_supervisor(grace_s=0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides
        torch.set_num_threads(threads)
        torch.set_num_interop_threads(1)
        one = Rank(join(rendezvous, device=device))
    except SetupError as error:
        end_process(error.message, code=error.exit_code)
    try:
        one.serve()
    except RankLost as error:
        end_process(str(error), code=error.exit_code)
    except RuntimeError:
        logger.exception("this rank is lost, or the others are")
        end_process("the processes of this policy are no longer together", code=1)


def _rendezvous(rank: int | None, size: int | None, *, meeting: Path | None) -> Rendezvous:
    if meeting is not None and rank is not None and size is not None:
        return Rendezvous(rank=rank, size=size, local_rank=rank, file=meeting)
    said = {"RANK": rank, "WORLD_SIZE": size}
    return rendezvous_of({**os.environ, **{name: str(value) for name, value in said.items() if value is not None}})


def rendezvous_of(environment: Mapping[str, str]) -> Rendezvous:
    """As ``torchrun`` and its like say it.  Raises SetupError where they do not."""
    try:
        return Rendezvous(
            rank=int(environment["RANK"]),
            size=int(environment["WORLD_SIZE"]),
            local_rank=int(environment.get("LOCAL_RANK", "0")),
            address=environment["MASTER_ADDR"],
            port=int(environment["MASTER_PORT"]),
        )
    except (KeyError, ValueError) as error:
        raise SetupError(
            f"expected {', '.join(ENVIRONMENT)} and LOCAL_RANK in the environment, got {error!r}; set them, or let the "
            "trainer worker start its ranks"
        ) from error


def end_process(message: str, *, code: int) -> NoReturn:
    """End this process with words that its supervisor passes on."""
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    _exit_codes.append(code)
    raise SystemExit(code)


def keep_exit_code() -> None:
    """From now on a process that ends by :func:`end_process` ends with its code.

    Taking torch down while connections are broken may abort the process, which then has another one.
    """
    atexit.register(_leave)


_exit_codes: list[int] = []


def _leave() -> None:
    if _exit_codes:
        sys.stderr.flush()
        os._exit(_exit_codes[0])
