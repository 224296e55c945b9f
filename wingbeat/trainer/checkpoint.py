"""Exact-resume checkpoints: atomic, checksummed, and free of pickle.

    checkpoints/POLICY/step-00000012/
        state.safetensors   masters, optimiser moments and counts, by name
        state.json          step, lineage, format, the sha256 and size of state.safetensors, and a seal of all this

What several processes trained, each of them writes: a file per process with its part of each tensor, and state.json
says where every part lies (format 2).  Either form is loaded by any number of processes
(:mod:`wingbeat.trainer.stored_state`).

A checkpoint is written under a hidden name, synced, and renamed: it is there entirely or not at all.
Loading verifies seal and checksum before using a byte, and falls back to the next older one.  There is no
random state to save: a training step draws everything from its batch's seed.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from safetensors.torch import save_file
from torch import Tensor

from wingbeat.core.files import sha256_of, sync
from wingbeat.trainer.stored_state import (
    FORMAT,
    SCALARS,
    SHARDED_FORMAT,
    TENSORS,
    DamagedCheckpoint,
    StoredState,
    WrittenParts,
    seal_of,
)

logger = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL = ".partial-"


class Checkpointable(Protocol):
    """What can be saved: a step counter and named tensors."""

    @property
    def step(self) -> int: ...
    def state_tensors(self) -> dict[str, Tensor]: ...
    def load_state(self, tensors: Mapping[str, Tensor], *, step: int) -> None: ...


@runtime_checkable
class SharedCheckpointable(Protocol):
    """What several processes hold together: each writes and reads its parts."""

    @property
    def step(self) -> int: ...
    def save_parts(self, folder: Path) -> WrittenParts: ...
    def load_parts(self, folder: Path, *, step: int) -> None: ...


@dataclass(frozen=True, slots=True)
class SkippedCheckpoint:
    """A checkpoint that could not be used, and why."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What :meth:`CheckpointStore.load_latest` did."""

    step: int | None
    """The step restored; None where there was none to restore."""
    skipped: tuple[SkippedCheckpoint, ...] = ()
    """Newer ones that are damaged."""
    lineage: int = 0
    """The lineage in which the restored step was taken; 0 where there was none to restore."""


class CheckpointStore:
    """The checkpoints of one policy in ``directory``; the newest ``keep`` are kept."""

    def __init__(self, directory: Path, *, keep: int) -> None:
        if keep < 1:
            raise ValueError(f"expected keep >= 1, got {keep}")
        self._directory = directory
        self._keep = keep
        self._damaged: set[int] = set()
        """Steps whose checkpoint could not be used: it is none of those that are kept."""

    def steps(self) -> list[int]:
        """Steps with a complete folder, ascending; their content is verified only on loading."""
        if not self._directory.is_dir():
            return []
        found = (_NAME.fullmatch(path.name) for path in self._directory.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def path_of(self, step: int) -> Path:
        return self._directory / f"step-{step:08d}"

    def save(self, trainer: Checkpointable | SharedCheckpointable, *, lineage: int = 0) -> Path:
        """Write the trainer's state of a lineage durably, then delete what is not kept.

        Checkpoints of later steps are deleted too: the trainer went back, so they belong to an abandoned
        lineage and must not win on the next start.
        """
        step = trainer.step
        self._directory.mkdir(parents=True, exist_ok=True)
        temporary = self._directory / f"{_PARTIAL}{step:08d}-{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        try:
            _write(trainer, temporary, lineage=lineage)
            target = self.path_of(step)
            replaced = self._directory / f"{_PARTIAL}{step:08d}-{os.getpid()}-replaced"
            if target.exists():
                os.rename(target, replaced)
            os.rename(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        sync(self._directory)
        self._prune(step)
        return target

    def load_latest(self, trainer: Checkpointable | SharedCheckpointable, *, max_step: int | None = None) -> LoadReport:
        """Restore the newest intact checkpoint (not beyond ``max_step``).

        A damaged one is skipped, reported and logged.  Raises SetupError where an intact checkpoint belongs
        to another model or to another release's format: training on from an older one would lose steps.
        """
        skipped: list[SkippedCheckpoint] = []
        for step in reversed(self.steps()):
            if max_step is not None and step > max_step:
                continue
            path = self.path_of(step)
            try:
                stored = StoredState.verified(path, step=step)
                tensors = None if isinstance(trainer, SharedCheckpointable) else stored.whole()
            except DamagedCheckpoint as error:
                skipped.append(SkippedCheckpoint(path=path, reason=str(error)))
                self._damaged.add(step)
                logger.warning("checkpoint %s is damaged and was skipped: %s", path, error)
                continue
            if isinstance(trainer, SharedCheckpointable):
                trainer.load_parts(path, step=step)
            else:
                assert tensors is not None
                trainer.load_state(tensors, step=step)
            return LoadReport(step=step, skipped=tuple(skipped), lineage=stored.lineage)
        return LoadReport(step=None, skipped=tuple(skipped))

    def _prune(self, newest: int) -> None:
        self._damaged.discard(newest)
        kept = [step for step in self.steps() if step <= newest and step not in self._damaged][-self._keep :]
        for path in list(self._directory.iterdir()):
            match = _NAME.fullmatch(path.name)
            if path.name.startswith(_PARTIAL) or (match and int(match[1]) not in kept):
                shutil.rmtree(path)


def _write(trainer: Checkpointable | SharedCheckpointable, folder: Path, *, lineage: int) -> None:
    scalars: dict[str, Any] = {"format": FORMAT, "step": trainer.step, "lineage": lineage}
    if isinstance(trainer, SharedCheckpointable):
        scalars |= {"format": SHARDED_FORMAT, **trainer.save_parts(folder).facts()}
    else:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in trainer.state_tensors().items()}
        save_file(tensors, folder / TENSORS)
        sync(folder / TENSORS)
        size = (folder / TENSORS).stat().st_size
        scalars["files"] = {TENSORS: {"sha256": sha256_of(folder / TENSORS), "size": size}}
    scalars["seal"] = seal_of(scalars)
    with (folder / SCALARS).open("w", encoding="utf-8") as file:
        json.dump(scalars, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync(folder)
