"""What every worker process does around its compute loop: arguments, threads, signals, clean exit."""

from __future__ import annotations

import argparse
import logging
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from transformers.utils.logging import disable_progress_bar

from wingbeat import __version__
from wingbeat.core.errors import SetupError
from wingbeat.core.keys import WORKER_KEY_VARIABLE
from wingbeat.core.lifeline import end_with_supervisor
from wingbeat.core.worker_protocol import PROTOCOL_VERSION, Heartbeat, Register, Role, Shutdown
from wingbeat.weights.host import host_id
from wingbeat.workers.link import DrainAsked, Inbound, WorkerLink

logger = logging.getLogger(__name__)

TOLD_TO_END = threading.Event()
"""Set by the first signal to a worker without supervisor, for what takes long and reads no messages meanwhile."""


@dataclass(frozen=True, slots=True)
class WorkerArguments:
    """Command line of a worker; the key comes from the environment, never from the command line."""

    url: str
    key: str
    worker_id: str
    policies: tuple[str, ...]
    threads: int
    tensor_parallel: int = 1
    device: str | None = None
    """Rules over the server's ``engine.device``."""
    relay: str = ""
    """``[HOST:]PORT`` at which other hosts pull weights from this one; "" where they do not."""
    drain_s: float | None = None
    """Seconds that running generations get when a signal ends the worker; None: it has a supervisor, and they none."""

    @classmethod
    def parse(cls) -> WorkerArguments:
        parser = argparse.ArgumentParser()
        parser.add_argument("--url", required=True, help="control's address, http://host:port")
        parser.add_argument("--worker-id", required=True)
        parser.add_argument("--policies", default="", help="comma-separated; empty means all")
        parser.add_argument("--threads", type=int, default=1, help="torch threads")
        parser.add_argument("--tensor-parallel", type=int, default=1, help="processes that share each model's weights")
        parser.add_argument("--device", help="a torch device, or auto; unset: what the server's configuration says")
        parser.add_argument("--drain-s", type=float, help="seconds for running generations after a first signal")
        parser.add_argument("--relay", default="", help="[HOST:]PORT at which other hosts pull weights from this one")
        given = parser.parse_args()
        key = os.environ.get(WORKER_KEY_VARIABLE)
        if not key:
            parser.error(f"the environment variable {WORKER_KEY_VARIABLE} must hold the worker key")
        policies = tuple(p for p in given.policies.split(",") if p)
        return cls(
            given.url,
            key,
            given.worker_id,
            policies,
            given.threads,
            tensor_parallel=given.tensor_parallel,
            device=given.device,
            relay=given.relay,
            drain_s=given.drain_s,
        )


class Compute(Protocol):
    """The compute side of a worker."""

    def run(self, receive: Callable[..., list[Inbound]]) -> None: ...
    def heartbeat(self) -> Heartbeat: ...


Build = Callable[[str, Callable[..., None], Callable[[Inbound], None]], Compute]
"""Of the host's id, what sends to control, and what puts a message into the worker's own inbox from any thread."""


def run_worker(role: Role, arguments: WorkerArguments, build: Build, *, relay_url: str = "") -> None:
    """Run ``build(host_id, send, deliver)`` against control until shut down, by message or by SIGTERM.

    ``relay_url``: where it serves weights to others.
    """
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {arguments.worker_id} %(levelname)s %(message)s")
    disable_progress_bar()  # of transformers: a log has no use for bars
    torch.set_num_threads(arguments.threads)
    torch.set_num_interop_threads(1)
    identity = host_id()
    register = Register(
        protocol=PROTOCOL_VERSION,
        role=role,
        worker_id=arguments.worker_id,
        host_id=identity,
        pid=os.getpid(),
        policies=arguments.policies,
        parallelism=arguments.tensor_parallel,
        bounded=role == "engine",
        software=software(),
        relay_url=relay_url,
    )
    link = WorkerLink(arguments.url, arguments.key, register)
    compute = build(identity, link.send, link.deliver)
    link.heartbeat = compute.heartbeat
    if arguments.drain_s is None:
        _stop_on_signals(link)
    else:
        _drain_on_signals(link, arguments.drain_s)
    end_with_supervisor(grace_s=0)
    link.start()
    try:
        compute.run(link.receive)
    except SetupError as error:  # starting it again would not help: the supervisor passes its words on
        logger.exception("%s cannot work", arguments.worker_id)
        end_with(error)
    finally:
        link.close()
    if link.failed:
        if arguments.drain_s is not None and link.error is not None:  # nobody but its user starts it again
            end_with(link.error)
        sys.exit(1)


def end_with(error: SetupError) -> NoReturn:
    """End this process, with words on one line that whoever started it passes on."""
    sys.stderr.write(f"error: {' '.join(error.message.split())}\n")
    sys.exit(error.exit_code)


def _stop_on_signals(link: WorkerLink) -> None:
    def stop(signum: int, frame: Any) -> None:
        link.deliver(Shutdown(reason=signal.Signals(signum).name))

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides


def _drain_on_signals(link: WorkerLink, drain_s: float) -> None:
    """The first signal lets running generations end, the second ends the process."""
    told: list[int] = []

    def stop(signum: int, frame: Any) -> None:
        if told:
            os._exit(128 + signum)  # not even what blocks in a library holds it up
        told.append(signum)
        TOLD_TO_END.set()
        link.deliver(DrainAsked(drain_s))

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)


def software() -> dict[str, str]:
    """Versions of what decides a worker's results."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return {
        "wingbeat": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": "cpu" if accelerator is None else accelerator.type,
    }


def resolve_device(name: str) -> torch.device:
    """``auto`` is the accelerator torch sees, else the CPU."""
    if name != "auto":
        return torch.device(name)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator if accelerator is not None else torch.device("cpu")
