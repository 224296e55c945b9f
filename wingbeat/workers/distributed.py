"""A policy that several processes train, as the trainer worker sees it: rank 0, which commands the others."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from wingbeat.core.config import LoraConfig, PolicyConfig
from wingbeat.core.errors import SetupError, UnavailableError
from wingbeat.core.keys import without_keys
from wingbeat.core.lifeline import LIFELINE_VARIABLE
from wingbeat.core.samples import TrainingBatch
from wingbeat.core.worker_protocol import PolicySpec, Welcome
from wingbeat.trainer.distributed.rank import RankTrainer
from wingbeat.trainer.distributed.world import RankLost, Rendezvous, World, join
from wingbeat.trainer.single import StepResult
from wingbeat.trainer.stored_state import WrittenParts, joined_parts
from wingbeat.workers.ranks import (
    ALIKE,
    ENVIRONMENT,
    FILES,
    Answer,
    Build,
    Command,
    Gather,
    LoadParts,
    Rank,
    SaveParts,
    Train,
    end_process,
    keep_exit_code,
    rendezvous_of,
)

logger = logging.getLogger(__name__)


class DistributedTrainer:
    """Rank 0's face to the trainer worker: that of a policy trained in one process."""

    def __init__(self, world: World, *, build: Build) -> None:
        self._world = world
        self._rank = Rank(world)
        self._config = PolicyConfig.model_validate(build.config)
        self._together(build)

    @classmethod
    def start(cls, welcome: Welcome, spec: PolicySpec) -> DistributedTrainer:
        """Load a policy on all ranks; the first time, start them too.

        Raises SetupError where this machine has too few devices, or where ranks that others started are not as many
        as the configuration says.
        """
        config = PolicyConfig.model_validate(spec.config)
        build = Build(spec.model, dict(spec.config), welcome.total_steps, welcome.seed)
        return cls(_own_world(config.trainer.processes, config.trainer.device), build=build)

    @property
    def step(self) -> int:
        return self._own.step

    @property
    def lora(self) -> LoraConfig | None:
        return self._config.lora

    @property
    def kind(self) -> Literal["full", "adapter"]:
        return self._own.kind

    @property
    def published_bytes(self) -> int:
        return self._own.published_bytes

    def train_step(self, batch: TrainingBatch) -> StepResult:
        result: StepResult = self._together(Train(batch))
        return result

    def published_tensors(self) -> dict[str, Tensor]:
        """On the CPU, the caller's own."""
        found: dict[str, Tensor] = self._together(Gather("published"))
        return found

    def export(self, path: Path, *, merged: bool = False) -> None:
        tensors: dict[str, Tensor] = self._together(Gather("trained"))
        self._own.export_tensors(tensors, path, merged=merged)

    def save_parts(self, folder: Path) -> WrittenParts:
        """All ranks write into ``folder``, which all must see.  Raises UnavailableError where one cannot."""
        parts: list[WrittenParts] = []
        self._together(SaveParts(str(folder.absolute())), written=parts)
        return joined_parts(parts)

    def load_parts(self, folder: Path, *, step: int) -> None:
        self._together(LoadParts(str(folder.absolute()), step))

    @property
    def _own(self) -> RankTrainer:
        assert self._rank.trainer is not None, "it is built on construction"
        return self._rank.trainer

    def _together(self, command: Command, *, written: list[WrittenParts] | None = None) -> Any:
        """Do something on all ranks; ``written`` takes what each of them wrote.

        Raises what rank 0 raises, or UnavailableError for what another one does.  Anything else but an error that all
        share ends the process.
        """
        failure: BaseException | None = None
        result: Any = None
        try:
            self._world.broadcast(msgspec.msgpack.encode(command))
            try:
                result = self._rank.do(command)
            except ALIKE as error:
                failure = error
            own = Answer(
                error="" if failure is None else str(failure),
                written=result if isinstance(result, WrittenParts) else None,
            )
            said = self._world.gather(msgspec.msgpack.encode(own))
        except RankLost as error:
            end_process(str(error), code=error.exit_code)
        except (RuntimeError, *FILES) as error:
            logger.exception("%s failed", type(command).__name__)
            end_process(f"the processes of this policy are no longer together ({error}); all begin again", code=1)
        answers = [msgspec.msgpack.decode(data, type=Answer) for data in said]
        if failure is not None:
            raise failure
        for rank, answer in enumerate(answers):
            if answer.error:
                raise UnavailableError(f"rank {rank}: {answer.error}")
        if written is not None:
            written.extend(answer.written for answer in answers if answer.written is not None)
        return result


@functools.cache
def _own_world(processes: int, device: str) -> World:
    """Rank 0's: the process group is one of the whole process."""
    keep_exit_code()
    if all(name in os.environ for name in ENVIRONMENT):
        rendezvous = rendezvous_of(os.environ)
        if rendezvous.size != processes:
            raise SetupError(
                f"expected WORLD_SIZE = {processes} in the environment, as trainer.processes, got {rendezvous.size}"
            )
        if rendezvous.rank != 0:
            raise SetupError(
                f"the trainer worker is rank 0 of its processes, got RANK = {rendezvous.rank}; start the others with "
                "`python -m wingbeat.workers.trainer_ranks`"
            )
        return join(rendezvous, device=device)
    folder = Path(tempfile.mkdtemp(prefix="wingbeat-ranks-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    meeting = folder / "meeting"
    for rank in range(1, processes):
        _start_rank(rank, size=processes, meeting=meeting, device=device)
    return join(Rendezvous(rank=0, size=processes, local_rank=0, file=meeting), device=device)


def _start_rank(rank: int, *, size: int, meeting: Path, device: str) -> None:
    command = [sys.executable, "-m", "wingbeat.workers.trainer_ranks", "--rank", str(rank), "--world-size", str(size)]
    command += ["--meeting", str(meeting), "--device", device, "--threads", str(torch.get_num_threads())]
    environment = without_keys(os.environ) | {LIFELINE_VARIABLE: "1"}
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr, env=environment)
    threading.Thread(target=_watch, args=(child, rank, meeting.parent), name=f"rank-{rank}", daemon=True).start()


def _watch(child: subprocess.Popen[bytes], rank: int, folder: Path) -> None:
    """A rank that ends takes this process with it: without it there is nothing to wait for."""
    code = child.wait()
    logger.error("rank %d of this trainer ended (exit code %s); all its processes begin again", rank, code)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(code if code == SetupError.exit_code else 1)
