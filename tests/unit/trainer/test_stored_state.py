"""Checkpoints in parts: any range of rows comes back, whoever wrote it, and nothing that was not checked."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from wingbeat.trainer.checkpoint import CheckpointStore
from wingbeat.trainer.stored_state import SCALARS, StoredState, WrittenParts, joined_parts, seal_of, write_part

WHOLE = {
    "master.w": torch.arange(21, dtype=torch.float32).reshape(7, 3),
    "exp_avg.b": torch.arange(5, dtype=torch.bfloat16),
    "master.one": torch.ones(1, 4),
    "step.w": torch.tensor(3.0),
}


def stretch(rows: int, *, rank: int, size: int) -> tuple[int, int]:
    each = -(-rows // size)
    return min(rows, rank * each), min(rows, (rank + 1) * each)


class Several:
    """So many processes, played one after the other."""

    def __init__(self, size: int, *, step: int = 1) -> None:
        self.size, self.step = size, step
        self.loaded: dict[str, Tensor] = {}

    def save_parts(self, folder: Path) -> WrittenParts:
        return joined_parts([self._save(folder, rank) for rank in range(self.size)])

    def load_parts(self, folder: Path, *, step: int) -> None:
        self.step, self.loaded = step, StoredState.unverified(folder, step=step).whole()

    def _save(self, folder: Path, rank: int) -> WrittenParts:
        parts: dict[str, tuple[Tensor, tuple[int, ...], int]] = {}
        for name, tensor in WHOLE.items():
            if tensor.ndim:
                start, stop = stretch(len(tensor), rank=rank, size=self.size)
                parts[name] = (tensor[start:stop], tuple(tensor.shape), start)
            elif rank == 0:
                parts[name] = (tensor, (), 0)
        return write_part(folder, parts, rank=rank, size=self.size)


def test_every_stretch_of_every_number_of_processes_is_read(tmp_path: Path) -> None:
    """More processes than rows, too: some of them have nothing to write."""
    for wrote in (1, 2, 3, 9):
        folder = CheckpointStore(tmp_path / str(wrote), keep=1).save(Several(wrote))
        stored = StoredState.verified(folder, step=1)
        assert stored.tensors.keys() == WHOLE.keys()
        for name, tensor in WHOLE.items():
            for size in (1, 2, 3, 5, 8):
                for rank in range(size):
                    start, stop = stretch(stored.tensors[name].rows, rank=rank, size=size) if tensor.ndim else (0, 1)
                    found = stored.read({name: (start, stop)})[name]
                    wanted = tensor[start:stop] if tensor.ndim else tensor
                    assert found.dtype == wanted.dtype and torch.equal(found, wanted), (wrote, name, size, rank)


def test_a_part_in_a_file_without_a_checksum_is_not_read(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "store", keep=3)
    store.save(Several(2))
    path = store.save(Several(2, step=2)) / SCALARS
    (tmp_path / "elsewhere").write_bytes((path.parent / "part-00000-of-00002.safetensors").read_bytes())
    scalars = json.loads(path.read_text())
    del scalars["seal"]
    scalars["tensors"]["master.w"]["parts"][0][0] = "../../elsewhere"
    path.write_text(json.dumps(scalars | {"seal": seal_of(scalars)}))
    trainer = Several(1)
    report = store.load_latest(trainer)
    assert (report.step, trainer.step) == (1, 1)
    assert "no checksum of ['../../elsewhere']" in report.skipped[0].reason
    assert all(torch.equal(trainer.loaded[name], tensor) for name, tensor in WHOLE.items())
