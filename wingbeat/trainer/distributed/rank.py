"""The trainer of one of several processes: a :class:`PolicyTrainer` that holds a part of each tensor.

Every method is called by all processes of the policy, in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from wingbeat.core.config import PolicyConfig
from wingbeat.core.errors import SetupError, WingbeatError
from wingbeat.trainer.distributed.fsdp import Fsdp
from wingbeat.trainer.distributed.world import Complaint, World, agree
from wingbeat.trainer.export import export_model
from wingbeat.trainer.optimizer import COUNT, MASTER, MOMENTS
from wingbeat.trainer.single import PROGRESS, PolicyTrainer
from wingbeat.trainer.stored_state import StoredState, WrittenParts, write_part
from wingbeat.trainer.trainable import load_trainable


@dataclass(frozen=True, slots=True)
class Held:
    """Which rows of a parameter this process holds."""

    shape: tuple[int, ...]
    """Of the whole parameter."""
    start: int
    stop: int


class RankTrainer(PolicyTrainer):
    """One process's share of a policy's training; ``world`` are all of them.

    Where one of them cannot load the model, none goes on: SetupError or UnavailableError with its reason.
    """

    def __init__(
        self, source: Path, *, config: PolicyConfig, total_steps: int, seed: int, world: World, dtype: torch.dtype
    ) -> None:
        self._world = world
        self._dtype = dtype
        self._seed = seed
        sharding = Fsdp(world, reshard=config.trainer.reshard)
        try:
            super().__init__(
                source,
                config=config,
                total_steps=total_steps,
                seed=seed,
                device=world.device,
                dtype=dtype,
                sharding=sharding,
            )
        except (WingbeatError, ValueError) as error:
            if not sharding.has_met:
                agree(world, Complaint.of(error))
            raise
        self._held = {
            name: held_of(parameter, rank=world.rank, size=world.size)
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad
        }

    def published_tensors(self) -> dict[str, Tensor]:
        """On rank 0, on the CPU, as of one process; nothing on the others.  Gathered one at a time."""
        tensors, dtype = self._to_publish()
        return self._gathered(tensors, dtype=dtype)

    @property
    def published_bytes(self) -> int:
        tensors, dtype = self._to_publish()
        return sum(tensor.numel() * (dtype or tensor.dtype).itemsize for tensor in tensors.values())

    def trained_tensors(self) -> dict[str, Tensor]:
        """On rank 0: the trained parameters by the module's names, in the dtype of an export."""
        self._sharding.release()
        trained = {name: one for name, one in self._model.named_parameters() if one.requires_grad}
        return self._gathered(trained, dtype=self._dtype if self._lora is None else None)

    def export_tensors(self, tensors: Mapping[str, Tensor], path: Path, *, merged: bool = False) -> None:
        """Write :meth:`trained_tensors` as a folder: of rank 0 alone, with a copy of the model on the CPU."""
        if merged and self._lora is None:
            raise SetupError("cannot export merged: all weights are trained, there is no adapter; leave merged out")
        fresh = load_trainable(
            self._source, config=self._policy_config, seed=self._seed, device=torch.device("cpu"), dtype=self._dtype
        )
        parameters: dict[str, nn.Parameter] = dict(fresh.model.named_parameters())
        with torch.no_grad():
            for name, tensor in tensors.items():
                parameters[name].copy_(tensor)
        export_model(fresh.model, source=self._source, path=path, merged=merged)

    def export(self, path: Path, *, merged: bool = False) -> None:
        """As of one process.  Raises what that does, on rank 0."""
        tensors = self.trained_tensors()
        if self._world.rank == 0:
            self.export_tensors(tensors, path, merged=merged)

    def save_part(self, folder: Path) -> WrittenParts:
        """Write this process's parts of masters and moments into ``folder``."""
        self._sharding.release()
        tensors: dict[str, tuple[Tensor, tuple[int, ...], int]] = {}
        for key, tensor in self._optimizer.state_tensors().items():
            kind, name = key.split(".", 1)
            if kind != COUNT:
                held = self._held[name]
                tensors[key] = (tensor, held.shape, held.start)
            elif self._world.rank == 0:
                tensors[key] = (tensor, (), 0)
        if self._world.rank == 0:
            progress = self.progress()
            tensors[PROGRESS] = (progress, tuple(progress.shape), 0)
        return write_part(folder, tensors, rank=self._world.rank, size=self._world.size)

    def load_part(self, stored: StoredState, *, step: int) -> None:
        """Go to a checkpoint's state, whatever number of processes wrote it.

        Raises SetupError, changing nothing, if it is of another policy; DamagedCheckpoint where it cannot be read.
        """
        self._check_shapes(stored)
        ranges: dict[str, tuple[int, int]] = {}
        for key, tensor in stored.tensors.items():
            kind, name = key.split(".", 1)
            held = None if kind == COUNT else self._held.get(name)
            ranges[key] = (0, tensor.rows) if held is None else (held.start, held.stop)
        tensors = stored.read(ranges)
        progress = tensors.pop(PROGRESS, None)
        self._sharding.release()
        self._optimizer.load_state_tensors(tensors)
        self.restore_progress(progress)
        self._step = step

    def _check_shapes(self, stored: StoredState) -> None:
        for name, held in self._held.items():
            for kind in (MASTER, *MOMENTS):
                found = stored.tensors.get(f"{kind}.{name}")
                if found is not None and found.shape != held.shape:
                    raise SetupError(
                        f"the checkpoint is not of this policy: {f'{kind}.{name}'!r} should be {held.shape}, got "
                        f"{found.shape}; use the model it was made with"
                    )

    def _to_publish(self) -> tuple[Mapping[str, Tensor], torch.dtype | None]:
        """As this process holds them; and the dtype in which they go out, None: their own."""
        self._sharding.release()
        if self._lora is None:
            return dict(self._model.named_parameters()), self._dtype
        return get_peft_model_state_dict(self._model, save_embedding_layers=False), None

    @torch.no_grad()
    def _gathered(self, tensors: Mapping[str, Tensor], *, dtype: torch.dtype | None) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            one: Any = tensor.detach()
            one = one if dtype is None else one.to(dtype)
            whole = one.full_tensor() if isinstance(one, DTensor) else one
            if self._world.rank == 0:
                found[name] = whole.cpu()
        return found


def held_of(parameter: nn.Parameter, *, rank: int, size: int) -> Held:
    """A parameter is cut into ``size`` stretches of equally many rows, of which the last may be shorter or empty."""
    shape = tuple(parameter.shape)
    rows = shape[0] if shape else 1
    each = -(-rows // size)
    held = Held(shape, min(rows, rank * each), min(rows, (rank + 1) * each))
    if isinstance(parameter, DTensor) and len(parameter.to_local()) != held.stop - held.start:
        raise AssertionError(f"expected rows {held.start} to {held.stop}, torch holds {len(parameter.to_local())}")
    return held
