"""Which device and place a rank gets, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from wingbeat.core.config import PolicyConfig, TrainerConfig
from wingbeat.core.errors import SetupError
from wingbeat.core.worker_protocol import PolicySpec, Welcome
from wingbeat.trainer.distributed.world import Rendezvous, rank_device
from wingbeat.workers.distributed import DistributedTrainer
from wingbeat.workers.ranks import rendezvous_of

TORCHRUN = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "16", "RANK": "9", "LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"processes": 2, "algorithm": "ppo"}, "ppo's critic is trained in one process"),
        ({"processes": 4, "device": "cuda:1"}, "each of the 4 processes takes its own"),
        ({"reshard": "layer"}, "reshard is of several processes"),
        ({"processes": 2, "reshard": "layer", "prefix_tree_backend": "depth_first"}, "use reshard = 'step'"),
    ],
)
def test_keys_that_contradict_several_processes_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainerConfig(**settings)


def test_each_rank_of_a_machine_takes_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_device("cpu", local_rank=3) == torch.device("cpu")
    with pytest.raises(SetupError, match="got none"):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
        rank_device("cuda", local_rank=0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert rank_device("auto", local_rank=1) == torch.device("cuda", 1)
    assert rank_device("cuda", local_rank=0) == torch.device("cuda", 0)
    with pytest.raises(SetupError, match="got 2 for at least 3; lower trainer"):
        rank_device("auto", local_rank=2)
    with pytest.raises(SetupError, match="got cuda; use 'auto'"):
        rank_device("xpu", local_rank=0)


def test_the_rendezvous_is_that_of_torchrun() -> None:
    found = rendezvous_of(TORCHRUN)
    assert found == Rendezvous(rank=9, size=16, local_rank=1, address="10.0.0.1", port=29500)
    with pytest.raises(SetupError, match="LOCAL_RANK in the environment"):
        rendezvous_of({"RANK": "0"})


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"WORLD_SIZE": "3"}, "expected WORLD_SIZE = 5 in the environment"), ({"WORLD_SIZE": "5"}, "got RANK = 9")],
)
def test_a_worker_that_is_not_rank_0_of_its_processes_is_refused(
    changed: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (TORCHRUN | changed).items():
        monkeypatch.setenv(name, value)
    config = PolicyConfig.model_validate({"model": "x", "trainer": {"processes": 5, "device": "cpu"}})
    spec = PolicySpec("solver", str(tmp_path), 64, config.model_dump(mode="json"))
    with pytest.raises(SetupError, match=message):
        DistributedTrainer.start(Welcome("trainer", 1.0, (spec,), str(tmp_path), seed=1, total_steps=10), spec)
