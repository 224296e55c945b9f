"""What ranks do in the tests of several processes, and the processes: each new, and none of them a fork of a test's.

Threads of the test's process (of torch, of tokenizers, of tests before) hold locks that a fork would keep locked.  So
ranks are forked from a server that has loaded torch and started no thread.

This is a module of its own because the ranks import it.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed import distributed_c10d
from transformers.utils import logging

from wingbeat.core.config import LoraConfig, PolicyConfig, TrainerConfig
from wingbeat.core.errors import ConflictError, SetupError, UnavailableError
from wingbeat.core.samples import TrainingBatch
from wingbeat.trainer.checkpoint import CheckpointStore
from wingbeat.trainer.distributed.rank import RankTrainer
from wingbeat.trainer.distributed.world import RankLost, Rendezvous, World, join
from wingbeat.workers.distributed import DistributedTrainer
from wingbeat.workers.ranks import Build, Rank

SEED, STEPS = 3, 100
PATIENCE_S = 150
PRELOADED = [
    "wingbeat.trainer.distributed.rank",
    "wingbeat.workers.ranks",
    "wingbeat.trainer.checkpoint",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gemma3.modeling_gemma3",
    "transformers.models.gpt_oss.modeling_gpt_oss",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.mixtral.modeling_mixtral",
]
"""What this module imports, so that no rank does; it is none of them, as the server does not see where tests lie."""
Body = Callable[..., Any]


@contextmanager
def running(ranks: Sequence[Rendezvous], body: Body, *arguments: Any) -> Iterator[list[Any]]:
    """These ranks, and from each a pipe by which it answers once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    pipes = [context.Pipe(duplex=False) for _ in ranks]
    processes = [
        context.Process(target=_main, args=(rank, sender, body, arguments), daemon=True)
        for rank, (_, sender) in zip(ranks, pipes, strict=True)
    ]
    for process, (_, sender) in zip(processes, pipes, strict=True):
        process.start()
        sender.close()
    try:
        yield [receiver for receiver, _ in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def everywhere(body: Body) -> Body:
    """Done by every rank, which all answer; any other body is done by rank 0, which commands the others."""
    body.everywhere = True  # type: ignore[attr-defined]
    return body


def is_everywhere(body: Body) -> bool:
    return getattr(body, "everywhere", False)


def _main(rank: Rendezvous, pipe: Connection, body: Body, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()  # it has semaphores, and ranks are killed
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)  # where it hangs, if it does
    for pickles in ("_object_to_tensor", "_tensor_to_object"):
        setattr(distributed_c10d, pickles, None)  # nothing of torch's may use them
    world = join(rank, device="cpu")
    if world.rank == 0 or is_everywhere(body):
        pipe.send(body(world, *arguments))
        return
    try:
        Rank(world).serve()
    except RankLost:  # rank 0 has ended, and its connections with it
        pipe.send(None)


def config(lora: LoraConfig | None = None, **settings: Any) -> PolicyConfig:
    trainer = TrainerConfig.model_validate({"learning_rate": 1e-2, "max_grad_norm": 1e9} | settings)
    return PolicyConfig(model="x", context_tokens=32, trainer=trainer, lora=lora)


def distributed(world: World, folder: Path, settings: PolicyConfig) -> DistributedTrainer:
    return DistributedTrainer(world, build=Build(str(folder), settings.model_dump(mode="json"), STEPS, SEED))


# --- bodies ------------------------------------------------------------------------------------


def trained(
    world: World, folder: Path, settings: PolicyConfig, batches: list[TrainingBatch], store: Path
) -> list[dict[str, float]]:
    """Metrics of each step, from the last checkpoint on; the state is saved."""
    trainer = distributed(world, folder, settings)
    checkpoints = CheckpointStore(store, keep=9)
    checkpoints.load_latest(trainer)
    metrics = [trainer.train_step(batch).metrics for batch in batches if batch.step > trainer.step]
    checkpoints.save(trainer)
    return metrics


def trained_twice(world: World, folder: Path, batches: list[TrainingBatch], store: Path) -> None:
    trainer = distributed(world, folder, config())
    for batch in batches:
        trainer.train_step(batch)
        CheckpointStore(store, keep=9).save(trainer)


def resaved(
    world: World, folder: Path, settings: PolicyConfig, batches: list[TrainingBatch], store: Path, to: Path
) -> int | None:
    """The step of the last checkpoint, which is saved again before it is trained on."""
    trainer = distributed(world, folder, settings)
    report = CheckpointStore(store, keep=9).load_latest(trainer)
    CheckpointStore(to, keep=9).save(trainer)
    for batch in batches:
        trainer.train_step(batch)
    CheckpointStore(store, keep=9).save(trainer)
    return report.step


def replayed(world: World, folder: Path, batches: list[TrainingBatch], store: Path) -> list[str]:
    """Twice the same steps on the same ranks; in between, what is refused is refused by all, and nobody waits."""
    heard: list[str] = []
    for run in ("first", "second"):
        trainer = distributed(world, folder, config(updates_per_batch=2))
        for batch in batches:
            trainer.train_step(batch)
        CheckpointStore(store / run, keep=1).save(trainer)
        try:
            trainer.train_step(batches[0])
        except ConflictError as error:
            heard.append(str(error))
        try:
            trainer.save_parts(store / "nowhere")
        except UnavailableError as error:
            heard.append(str(error))
    return heard


def exported(world: World, folder: Path, settings: PolicyConfig, store: Path, to: Path) -> None:
    trainer = distributed(world, folder, settings)
    CheckpointStore(store, keep=9).load_latest(trainer)
    trainer.export(to / "plain")
    if settings.lora:
        trainer.export(to / "merged", merged=True)
    published = trainer.published_tensors()
    assert trainer.published_bytes == sum(tensor.nbytes for tensor in published.values())
    save_file(published, to / "published.safetensors")


@everywhere
def held_and_tried_again(world: World, folder: Path, batches: list[TrainingBatch]) -> dict[str, Any]:
    """What a rank holds; then rank 1 runs out of memory once, and after that fails for a reason of its own."""
    trainer = RankTrainer(folder, config=config(), total_steps=STEPS, seed=SEED, world=world, dtype=torch.bfloat16)
    trainer.train_step(batches[0])
    held = sum(tensor.numel() for name, tensor in trainer.state_tensors().items() if name.startswith("exp_avg."))
    dtypes = {tensor.dtype for tensor in trainer.state_tensors().values()}
    errors: list[BaseException] = [torch.OutOfMemoryError("out of memory")]
    logprobs = trainer._logprobs
    score = logprobs.score

    def failing(*arguments: Any) -> Any:
        if world.rank == 1 and errors:
            raise errors.pop()
        return score(*arguments)

    logprobs.score = failing  # type: ignore[method-assign]
    metrics = trainer.train_step(batches[1]).metrics
    said = ""
    errors.append(ValueError("a bad row"))
    try:
        trainer.train_step(batches[2])
    except (ValueError, UnavailableError) as error:
        said = f"{type(error).__name__}: {error}"
    after = trainer.train_step(batches[2]).metrics
    return {"held": held, "dtypes": dtypes, "retried": metrics, "said": said, "after": after, "step": trainer.step}


@everywhere
def built_at_the_second_try(world: World, folder: Path) -> list[str]:
    """What each rank hears when rank 1 alone cannot load the model."""
    heard: list[str] = []
    for source in (folder if world.rank == 0 else folder / "elsewhere", folder):
        try:
            RankTrainer(source, config=config(), total_steps=STEPS, seed=SEED, world=world, dtype=torch.float32)
        except SetupError as error:
            heard.append(f"{type(error).__name__}: {error}")
        else:
            heard.append("built")
    return heard


@everywhere
def connections_kept_alive(world: World) -> tuple[int, list[tuple[int, ...]]]:
    """How many connections there are, and what the kernel was told of each."""
    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    found: list[tuple[int, ...]] = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            one = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:
            continue
        with one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockopt(
                socket.SOL_SOCKET, socket.SO_KEEPALIVE
            ):
                found.append(tuple(one.getsockopt(socket.IPPROTO_TCP, option) for option in options))
    return world.rank, found
