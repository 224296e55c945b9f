"""What goes with several processes that train one policy (``trainer.processes``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wingbeat.core.config.trainer import TrainerConfig


def check_processes(trainer: TrainerConfig) -> None:
    """Raises ValueError where a key contradicts the number of processes."""
    if trainer.processes == 1:
        if trainer.reshard != "step":
            raise ValueError("reshard is of several processes; set processes above 1, or leave it unset")
        return
    if trainer.algorithm == "ppo":
        raise ValueError("ppo's critic is trained in one process; set processes = 1, or use another algorithm")
    if ":" in trainer.device:
        raise ValueError(
            f"device = {trainer.device!r} is one device, and each of the {trainer.processes} processes takes its own;"
            " use 'auto', or a kind of device without a number"
        )
    if trainer.reshard == "layer" and trainer.prefix_tree_backend == "depth_first":
        raise ValueError(
            "prefix_tree_backend = 'depth_first' runs forwards in an order of each process's own, and reshard = 'layer'"
            " needs the same in all; use reshard = 'step', or another backend"
        )
