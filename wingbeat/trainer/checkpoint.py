"""Exact-resume checkpoints: atomic, checksummed, and free of pickle.

    checkpoints/POLICY/step-00000012/
        state.safetensors   masters, optimiser moments and counts, by name
        state.json          step, lineage, format, the sha256 and size of state.safetensors, and a seal of all this

A checkpoint is written under a hidden name, synced, and renamed: it is there entirely or not at all.
Loading verifies seal and checksum before using a byte, and falls back to the next older one.  There is no
random state to save: a training step draws everything from its batch's seed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from wingbeat.core.errors import SetupError
from wingbeat.core.files import sha256_of, sync

logger = logging.getLogger(__name__)

FORMAT = 1
_TENSORS = "state.safetensors"
_SCALARS = "state.json"
_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL = ".partial-"


class Checkpointable(Protocol):
    """What can be saved: a step counter and named tensors."""

    @property
    def step(self) -> int: ...
    def state_tensors(self) -> dict[str, Tensor]: ...
    def load_state(self, tensors: Mapping[str, Tensor], *, step: int) -> None: ...


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


class DamagedCheckpoint(ValueError):
    """A checkpoint's files are not what was written."""


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

    def save(self, trainer: Checkpointable, *, lineage: int = 0) -> Path:
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

    def load_latest(self, trainer: Checkpointable, *, max_step: int | None = None) -> LoadReport:
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
                tensors, lineage = _read(path, step=step)
            except DamagedCheckpoint as error:
                skipped.append(SkippedCheckpoint(path=path, reason=str(error)))
                self._damaged.add(step)
                logger.warning("checkpoint %s is damaged and was skipped: %s", path, error)
                continue
            trainer.load_state(tensors, step=step)
            return LoadReport(step=step, skipped=tuple(skipped), lineage=lineage)
        return LoadReport(step=None, skipped=tuple(skipped))

    def _prune(self, newest: int) -> None:
        self._damaged.discard(newest)
        kept = [step for step in self.steps() if step <= newest and step not in self._damaged][-self._keep :]
        for path in list(self._directory.iterdir()):
            match = _NAME.fullmatch(path.name)
            if path.name.startswith(_PARTIAL) or (match and int(match[1]) not in kept):
                shutil.rmtree(path)


def _write(trainer: Checkpointable, folder: Path, *, lineage: int) -> None:
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in trainer.state_tensors().items()}
    save_file(tensors, folder / _TENSORS)
    sync(folder / _TENSORS)
    scalars = {
        "format": FORMAT,
        "step": trainer.step,
        "lineage": lineage,
        "files": {_TENSORS: {"sha256": sha256_of(folder / _TENSORS), "size": (folder / _TENSORS).stat().st_size}},
    }
    scalars["seal"] = _seal(scalars)
    with (folder / _SCALARS).open("w", encoding="utf-8") as file:
        json.dump(scalars, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync(folder)


def _read(path: Path, *, step: int) -> tuple[dict[str, Tensor], int]:
    """The verified tensors and the lineage of a checkpoint folder.

    Raises DamagedCheckpoint, or SetupError on another format.
    """
    try:
        scalars: dict[str, Any] = json.loads((path / _SCALARS).read_text(encoding="utf-8"))
        seal = scalars.pop("seal", None)  # (older checkpoints have none)
        if seal is not None and seal != _seal(scalars):
            raise DamagedCheckpoint(f"{_SCALARS} is not what was written (its seal differs)")
        form, written = scalars["format"], scalars["step"]
        lineage = int(scalars.get("lineage", 0))
        wanted_sha, wanted_size = scalars["files"][_TENSORS]["sha256"], scalars["files"][_TENSORS]["size"]
    except DamagedCheckpoint:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{_SCALARS} cannot be read ({type(error).__name__}: {error})") from error
    if form != FORMAT:
        raise SetupError(
            f"checkpoint {path} has format {form!r}, this release reads format {FORMAT}; "
            "resume with the release that wrote it, or use another run directory"
        )
    if written != step:
        raise DamagedCheckpoint(f"{_SCALARS}: expected step {step}, got {written!r}")
    try:
        size = (path / _TENSORS).stat().st_size
        if size != wanted_size:
            raise DamagedCheckpoint(f"{_TENSORS}: expected {wanted_size} bytes, got {size}")
        if sha256_of(path / _TENSORS) != wanted_sha:
            raise DamagedCheckpoint(f"{_TENSORS}: the checksum differs from the one written")
        return load_file(path / _TENSORS), lineage
    except (OSError, SafetensorError) as error:
        raise DamagedCheckpoint(f"{_TENSORS} cannot be read ({error})") from error


def _seal(scalars: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(scalars, sort_keys=True).encode()).hexdigest()
