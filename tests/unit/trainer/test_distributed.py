"""Several processes train what one would: real processes over gloo (:mod:`rank_play`).

Rank 0 drives the others through the trainer worker's own face (:class:`DistributedTrainer`).
"""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from wingbeat.core.config import LoraConfig, PolicyConfig
from wingbeat.core.errors import SetupError
from wingbeat.core.samples import TrainingBatch
from wingbeat.trainer.checkpoint import CheckpointStore
from wingbeat.trainer.distributed.world import Rendezvous
from wingbeat.trainer.single import PROGRESS, PolicyTrainer
from wingbeat.trainer.stored_state import StoredState

sys.path.insert(0, str(Path(__file__).parent))  # test folders are no packages

import rank_play
from rank_play import SEED, STEPS, config

MakeBatch = Callable[..., TrainingBatch]
ModelFolder = Callable[..., Path]
RunRanks = Callable[..., Any]
pytestmark = pytest.mark.slow


def single(folder: Path, settings: PolicyConfig, dtype: torch.dtype = torch.float32) -> PolicyTrainer:
    alone = settings.trainer.model_copy(update={"processes": 1, "reshard": "step"})
    return PolicyTrainer(
        folder,
        config=settings.model_copy(update={"trainer": alone}),
        total_steps=STEPS,
        seed=SEED,
        device="cpu",
        dtype=dtype,
    )


@pytest.fixture
def run_ranks(tmp_path: Path) -> RunRanks:
    """``body(world, *arguments)`` in rank 0 of new processes, or in all; what rank 0 returns, or all in a list."""
    worlds: list[int] = []

    def run(size: int, body: rank_play.Body, *arguments: Any) -> Any:
        worlds.append(size)
        meeting = tmp_path / f"meeting-{len(worlds)}"
        ranks = [Rendezvous(rank, size, rank, file=meeting) for rank in range(size)]
        with rank_play.running(ranks, body, *arguments) as pipes:
            found = [pipe.recv() for pipe in pipes]
        return found if rank_play.is_everywhere(body) else found[0]

    return run


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def whole_state(store: Path, step: int) -> dict[str, Tensor]:
    return StoredState.verified(CheckpointStore(store, keep=9).path_of(step), step=step).whole()


def relative(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> float:
    """L2 distance of all tensors as a share of their norm."""
    assert wanted.keys() == found.keys()
    weights = [name for name in wanted if name != PROGRESS]
    total = sum(float((wanted[name] - found[name]).double().square().sum()) for name in weights)
    return math.sqrt(total / sum(float(wanted[name].double().square().sum()) for name in weights))


def same_bytes(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


MEASURED = ("perf/", "time/", "tree/")
"""Metrics of how it was done, not of what was learnt."""
FULL = {"kl_coef": 0.1, "entropy_coef": 0.01, "prefix_tree": "on"}
ADAPTERS = {"kl_coef": 0.1, "reshard": "layer", "gradient_checkpointing": True, "micro_batch_tokens": 40}
EXPERTS = {"reshard": "layer", "micro_batch_tokens": 20}
"""Forwards so short that hardly any sends tokens to all experts, and a rank has others than its neighbour."""


@pytest.mark.parametrize(
    ("size", "kind", "lora", "settings"),
    [
        (2, "qwen3", None, FULL),
        (2, "llama", LoraConfig(rank=2), ADAPTERS),
        pytest.param(1, "qwen3", None, FULL),
        pytest.param(3, "qwen3", None, FULL),
        pytest.param(2, "qwen3", None, {"reshard": "layer", "micro_batch_tokens": 40}),
        pytest.param(2, "qwen3", LoraConfig(rank=2), {"kl_coef": 0.1}),
        pytest.param(2, "gptoss", None, {"algorithm": "m2po"}),
        pytest.param(2, "qwen3moe", None, EXPERTS),
        pytest.param(2, "mixtral", None, EXPERTS | {"gradient_checkpointing": True}),
        pytest.param(
            *(2, "qwen3moe", LoraConfig(rank=2), EXPERTS),
            marks=pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern:RuntimeWarning"),  # of peft
        ),
        pytest.param(
            3,
            "gemma3",
            None,
            {"prefix_tree": "on", "prefix_tree_backend": "depth_first", "micro_batch_tokens": 20},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_gradients_and_metrics_are_those_of_one_process(
    size: int,
    kind: str,
    lora: LoraConfig | None,
    settings: dict[str, Any],
    tmp_path: Path,
    model_folder: ModelFolder,
    make_batch: MakeBatch,
    run_ranks: RunRanks,
) -> None:
    """The first moment after one step is (1 - beta) times the gradient: nothing is clipped."""
    settings_ = config(lora, **settings, **({"processes": size} if size > 1 else {}))
    batch = make_batch()
    alone = single(model_folder(kind), settings_)
    wanted = alone.train_step(batch).metrics
    (found,) = run_ranks(size, rank_play.trained, model_folder(kind), settings_, [batch], tmp_path)
    state = whole_state(tmp_path, 1)
    gradient = {name: tensor for name, tensor in alone.state_tensors().items() if name.startswith("exp_avg.")}
    assert relative(gradient, {name: state[name] for name in gradient}) <= 1e-5
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if not name.startswith(MEASURED):
            assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_number_of_processes_goes_on_from_any_other_s_checkpoint(
    dtype: str, tmp_path: Path, model_folder: ModelFolder, make_batch: MakeBatch, run_ranks: RunRanks
) -> None:
    """2, then 1, then 3: what is loaded is bit for bit what was saved, and the steps are those of one process."""
    folder, batches = model_folder("qwen3"), [make_batch(step=step, seed=step) for step in range(1, 5)]
    settings = config(updates_per_batch=2).model_copy(update={"dtype": dtype})
    store = tmp_path / "store"
    run_ranks(2, rank_play.trained, folder, settings, batches[:2], store)
    assert sorted(path.name for path in (store / "step-00000002").iterdir()) == [
        "part-00000-of-00002.safetensors",
        "part-00001-of-00002.safetensors",
        "state.json",
    ]

    middle = single(folder, settings, getattr(torch, dtype))
    assert CheckpointStore(store, keep=9).load_latest(middle).step == 2
    assert same_bytes(whole_state(store, 2), middle.state_tensors())
    middle.train_step(batches[2])
    CheckpointStore(store, keep=9).save(middle)
    again = tmp_path / "again"
    assert run_ranks(3, rank_play.resaved, folder, settings, batches[3:], store, again) == 3
    assert same_bytes(whole_state(store, 3), whole_state(again, 3))

    straight = single(folder, settings, getattr(torch, dtype))
    for batch in batches:
        straight.train_step(batch)
    close = 1e-5 if dtype == "float32" else 2e-2
    assert relative(straight.state_tensors(), whole_state(store, 4)) <= close


def test_a_replay_on_as_many_processes_gives_the_same_bytes(
    tmp_path: Path, model_folder: ModelFolder, make_batch: MakeBatch, run_ranks: RunRanks
) -> None:
    batches = [make_batch(step=step, seed=step) for step in (1, 2)]
    heard = run_ranks(2, rank_play.replayed, model_folder("llama"), batches, tmp_path)
    assert same_bytes(whole_state(tmp_path / "first", 2), whole_state(tmp_path / "second", 2))
    assert len(heard) == 4
    assert "stands at step 2" in heard[2]
    assert "cannot write a part of a checkpoint" in heard[3]


@pytest.mark.parametrize(
    ("lora", "dtype"),
    [(None, "bfloat16"), pytest.param(LoraConfig(rank=3), "float32")],
)
def test_exports_and_published_weights_are_those_of_one_process(
    lora: LoraConfig | None,
    dtype: str,
    tmp_path: Path,
    model_folder: ModelFolder,
    make_batch: MakeBatch,
    run_ranks: RunRanks,
) -> None:
    settings = config(lora).model_copy(update={"dtype": dtype})
    alone = single(model_folder("qwen3"), settings, getattr(torch, dtype))
    alone.train_step(make_batch())
    CheckpointStore(tmp_path / "store", keep=1).save(alone)
    run_ranks(2, rank_play.exported, model_folder("qwen3"), settings, tmp_path / "store", tmp_path / "shared")
    assert same_bytes(load_file(tmp_path / "shared" / "published.safetensors"), alone.published_tensors())
    alone.export(tmp_path / "alone" / "plain")
    kinds = {"plain": "model.safetensors" if lora is None else "adapter_model.safetensors"}
    if lora:
        alone.export(tmp_path / "alone" / "merged", merged=True)
        kinds["merged"] = "model.safetensors"
    for kind, name in kinds.items():
        ours, theirs = (tmp_path / whose / kind for whose in ("shared", "alone"))
        assert sorted(path.name for path in ours.iterdir()) == sorted(path.name for path in theirs.iterdir())
        assert same_bytes(load_file(ours / name), load_file(theirs / name))


def test_each_process_holds_its_share_and_all_fail_alike(
    model_folder: ModelFolder, make_batch: MakeBatch, run_ranks: RunRanks
) -> None:
    folder = model_folder("llama")
    batches = [make_batch(step=step, seed=step) for step in (1, 2, 3)]
    first, second = run_ranks(2, rank_play.held_and_tried_again, folder, batches)
    total = sum(parameter.numel() for parameter in single(folder, config()).model.parameters())
    assert first["held"] == second["held"] == total / 2
    assert first["dtypes"] == {torch.float32}
    for rank in (first, second):
        assert rank["retried"]["perf/oom_retries"] == 1
        assert rank["step"] == 3
    assert first["said"] == "UnavailableError: rank 1 gave up this step, and so do all, by an error that its log shows"
    assert second["said"] == "ValueError: a bad row"
    assert first["after"]["grad_norm"] == second["after"]["grad_norm"] > 0


def test_a_model_that_one_process_cannot_load_is_refused_by_all(model_folder: ModelFolder, run_ranks: RunRanks) -> None:
    first, second = run_ranks(2, rank_play.built_at_the_second_try, model_folder("llama"))
    assert first[0].startswith("SetupError: rank 1: expected a model folder")
    assert second[0].startswith("ModelSourceError: expected a model folder")
    assert first[1] == second[1] == "built"


def test_a_damaged_part_condemns_its_checkpoint_alone(
    tmp_path: Path, model_folder: ModelFolder, make_batch: MakeBatch, run_ranks: RunRanks
) -> None:
    folder, batches = model_folder("llama"), [make_batch(step=step, seed=step) for step in (1, 2)]
    run_ranks(2, rank_play.trained_twice, folder, batches, tmp_path)
    part = tmp_path / "step-00000002" / "part-00001-of-00002.safetensors"
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    report = CheckpointStore(tmp_path, keep=9).load_latest(single(folder, config()))
    assert report.step == 1
    assert [skipped.reason for skipped in report.skipped] == [f"{part.name}: the checksum differs from the one written"]
    with pytest.raises(SetupError, match="not of this policy"):
        CheckpointStore(tmp_path, keep=9).load_latest(single(model_folder("gemma2"), config()))


def test_a_rank_that_stays_joins_one_trainer_after_the_other(
    tmp_path: Path, model_folder: ModelFolder, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on several machines: the ranks meet at an address, and nobody here starts or ends the second one."""
    port = free_port()
    settings = config(processes=2)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": "1"}
    command = [sys.executable, "-m", "wingbeat.workers.trainer_ranks", "--device", "cpu", "--stay"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, env=os.environ | place, stderr=log) as other:
        try:
            for run in ("first", "second"):
                first = Rendezvous(0, 2, 0, address="127.0.0.1", port=port)
                body = rank_play.trained, model_folder("llama"), settings, [make_batch()], tmp_path / run
                with rank_play.running([first], *body) as (pipe,):
                    assert pipe.poll(rank_play.PATIENCE_S), (tmp_path / "log").read_text()
                    pipe.recv()
            assert "torch" not in Path(f"/proc/{other.pid}/maps").read_text(), "what only waits holds no torch"
        finally:
            other.kill()
    assert same_bytes(whole_state(tmp_path / "first", 1), whole_state(tmp_path / "second", 1))
    assert "this rank ended (exit code 1); waiting for the next trainer" in (tmp_path / "log").read_text()


def test_the_kernel_asks_after_ranks_of_other_machines_and_of_no_other(tmp_path: Path) -> None:
    near = [Rendezvous(rank, 2, rank, file=tmp_path / "meeting") for rank in range(2)]
    port = free_port()
    far = [Rendezvous(rank, 2, rank, address="127.0.0.1", port=port) for rank in range(2)]
    for ranks, wanted in ((near, set()), (far, {(60, 20, 6)})):
        with rank_play.running(ranks, rank_play.connections_kept_alive) as pipes:
            for _, found in sorted(pipe.recv() for pipe in pipes):
                assert set(found) == wanted, found
