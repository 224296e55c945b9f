"""``python -m wingbeat.workers.tensor_parallel``: the other processes of an engine worker that spans several devices.

    engine worker (rank 0: control's messages, requests, sampling)
        ├─ rank 1  ┐  same interpreter and host, a device each; started by the worker, and gone with it
        └─ rank 2 ─┘

All models of the worker share these processes.  One that dies takes the worker with it, by name, since the others
would wait for it forever; whoever supervises the worker starts it again.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented there
from transformers import PreTrainedModel

from wingbeat.core.config import EngineConfig
from wingbeat.core.errors import SetupError
from wingbeat.core.keys import without_keys
from wingbeat.core.lifeline import LIFELINE_VARIABLE, end_with_supervisor
from wingbeat.core.worker_protocol import PolicySpec
from wingbeat.engines.embedded import EmbeddedEngine, GrammarCompiler
from wingbeat.engines.embedded.parallel import shard_model
from wingbeat.engines.embedded.parallel_commands import Close, Load, Peers, Pipe
from wingbeat.engines.embedded.parallel_runner import Follower, LeadRunner
from wingbeat.trainer.distributed.world import stay_on_this_host
from wingbeat.trainer.models import load_model, resolve_model
from wingbeat.workers.hosting import EmbeddedHost, engine_options
from wingbeat.workers.main import resolve_device

logger = logging.getLogger(__name__)

COLLECTIVE_TIMEOUT = timedelta(minutes=5)
"""Longer than any step or load takes one process more than another."""
END_S = 3.0
"""What the other ranks get to end by themselves; a worker's supervisor has little more patience."""
EXIT_CODE = 1


def end_worker(rank: int, code: int) -> None:
    """A rank is gone: end this process at once, since its compute thread may wait for that rank forever."""
    logger.error(
        "tensor parallel rank %d ended with exit code %d: the engine cannot go on without it, so this worker ends and"
        " is to be started again",
        *(rank, code),
    )
    logging.shutdown()
    os._exit(EXIT_CODE)


class RankGroup:
    """The ranks above 0, started and joined at construction, which takes seconds.

    Raises SetupError where the machine has too few devices.
    """

    def __init__(
        self,
        size: int,
        *,
        device: torch.device,
        on_death: Callable[[int, int], None] = end_worker,
    ) -> None:
        self.device = rank_device(device, rank=0, size=size)
        self._on_death = on_death
        self._closing = False
        stay_on_this_host()
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            port = listener.getsockname()[1]
            store = TCPStore(
                *("127.0.0.1", port, size, True, COLLECTIVE_TIMEOUT),
                wait_for_workers=False,
                master_listen_fd=os.dup(listener.fileno()),
            )
        pipes: list[Pipe] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, size):
            process, pipe = _start_rank(rank, size=size, port=port, device=device)
            self._processes.append(process)
            pipes.append(pipe)
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank-{rank}", daemon=True).start()
        self._pipes = pipes
        self.peers = Peers(pipes)
        _join(store, rank=0, size=size, device=self.device)

    def close(self) -> None:
        """End the other ranks; no model of theirs may be used any more."""
        self._closing = True
        for pipe in self._pipes:
            pipe.close()
        for rank, process in enumerate(self._processes, start=1):
            try:
                code = process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                code = 0
            assert process.stdin is not None
            process.stdin.close()
            if code:  # it had died already, and its end is why we close
                self._on_death(rank, code)
        dist.destroy_process_group()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._closing:
            self._on_death(rank, code)


def rank_device(base: torch.device, *, rank: int, size: int) -> torch.device:
    """The device of a rank: the base's and those behind it; all ranks of a CPU engine share the CPU.

    Raises SetupError where there are too few.
    """
    if base.type == "cpu":
        return base
    first, there = base.index or 0, torch.accelerator.device_count()
    if first + size > there:
        raise SetupError(
            f"engine.tensor_parallel = {size} needs {size} devices from {base.type}:{first} on, and this machine has"
            f" {there}; set engine.tensor_parallel to {max(1, there - first)} or less"
        )
    return torch.device(base.type, first + rank)


def _start_rank(rank: int, *, size: int, port: int, device: torch.device) -> tuple[subprocess.Popen[bytes], Pipe]:
    command_read, command_write = os.pipe()
    reply_read, reply_write = os.pipe()
    arguments = {"rank": rank, "size": size, "port": port, "device": device, "threads": torch.get_num_threads()}
    arguments |= {"commands": command_read, "replies": reply_write}
    process = subprocess.Popen(
        [sys.executable, "-m", __spec__.name if __name__ == "__main__" else __name__]
        + [f"--{name}={value}" for name, value in arguments.items()],
        stdin=subprocess.PIPE,
        pass_fds=(command_read, reply_write),
        env=without_keys(os.environ) | {LIFELINE_VARIABLE: "1"},
    )
    os.close(command_read)
    os.close(reply_write)
    return process, Pipe(read_fd=reply_read, write_fd=command_write)


def _join(store: TCPStore, *, rank: int, size: int, device: torch.device) -> None:
    """Make torch.distributed's default group.  The back-end is the one of the device's type."""
    accelerator = None if device.type == "cpu" else device
    if accelerator is not None:
        torch.accelerator.set_device_index(accelerator)
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        store=store,
        rank=rank,
        world_size=size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=accelerator,
    )


class ParallelBackend:
    """Models on the embedded engine over ``engine.tensor_parallel`` processes, of which this is the first."""

    def __init__(self, config: EngineConfig, *, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._size = config.tensor_parallel
        self._ranks = RankGroup(self._size, device=resolve_device(config.device))
        self._numbers = itertools.count()
        self._grammars = cache(GrammarCompiler)

    def load(self, spec: PolicySpec, *, pinned: bool = False) -> EmbeddedHost:
        """Every rank reads the folder and keeps its slices.  Raises ModelSourceError where it cannot be split."""
        folder, dtype, peers = resolve_model(spec.model), spec.config["dtype"], self._ranks.peers
        number = next(self._numbers)
        try:
            with peers.together(Load(number, str(folder), dtype)):
                model = _load(str(folder), dtype)
                shards = shard_model(model, rank=0, size=self._size)
            engine = EmbeddedEngine(
                model,
                config=engine_options(self._config, context_tokens=spec.context_tokens),
                grammars=self._grammars(folder),
                device=self._ranks.device,
                seed=self._seed,
                make_runner=partial(LeadRunner, shards=shards, peers=peers, number=number),
            )
        except BaseException:
            peers.tell(Close(number))
            raise
        runner = engine.runner
        assert isinstance(runner, LeadRunner)
        return EmbeddedHost(
            engine,
            lambda manifest, weights: runner.prepare_weights(weights.path, manifest.adapter),
            close=runner.close,
        )

    def close(self) -> None:
        self._ranks.close()


def _load(folder: str, dtype: str) -> PreTrainedModel:
    loaded = load_model(folder, dtype=getattr(torch, dtype), device="cpu")
    return loaded.model


def main() -> None:
    """Entry point of a rank above 0."""
    parser = argparse.ArgumentParser()
    for name in ("rank", "size", "port", "commands", "replies", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--device", type=torch.device, required=True)
    given: Any = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s rank {given.rank} %(levelname)s %(message)s")
    for signum in (signal.SIGINT, signal.SIGTERM):  # rank 0 decides
        signal.signal(signum, signal.SIG_IGN)
    end_with_supervisor(grace_s=0)
    torch.set_num_threads(given.threads)
    torch.set_num_interop_threads(1)
    device = rank_device(given.device, rank=given.rank, size=given.size)
    store = TCPStore("127.0.0.1", given.port, given.size, False, COLLECTIVE_TIMEOUT)
    _join(store, rank=given.rank, size=given.size, device=device)
    pipe = Pipe(read_fd=given.commands, write_fd=given.replies)
    Follower(pipe, rank=given.rank, size=given.size, device=device, load_model=_load).run()
    logging.shutdown()
    os._exit(0)  # there is nothing to save, and the worker, which has seconds to end, waits for this


if __name__ == "__main__":
    main()
