"""What every worker process does around its compute loop: arguments, threads, signals, clean exit."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from wingbeat.core.errors import SetupError
from wingbeat.core.keys import WORKER_KEY_VARIABLE
from wingbeat.core.lifeline import end_with_supervisor
from wingbeat.core.worker_protocol import PROTOCOL_VERSION, Heartbeat, Register, Role, Shutdown
from wingbeat.weights.host import host_id
from wingbeat.workers.link import Inbound, WorkerLink

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerArguments:
    """Command line of a worker; the key comes from the environment, never from the command line."""

    url: str
    key: str
    worker_id: str
    policies: tuple[str, ...]
    threads: int

    @classmethod
    def parse(cls) -> WorkerArguments:
        parser = argparse.ArgumentParser()
        parser.add_argument("--url", required=True, help="control's address, http://host:port")
        parser.add_argument("--worker-id", required=True)
        parser.add_argument("--policies", default="", help="comma-separated; empty means all")
        parser.add_argument("--threads", type=int, default=1, help="torch threads")
        given = parser.parse_args()
        key = os.environ.get(WORKER_KEY_VARIABLE)
        if not key:
            parser.error(f"the environment variable {WORKER_KEY_VARIABLE} must hold the worker key")
        policies = tuple(p for p in given.policies.split(",") if p)
        return cls(given.url, key, given.worker_id, policies, given.threads)


class Compute(Protocol):
    """The compute side of a worker."""

    def run(self, receive: Callable[..., list[Inbound]]) -> None: ...
    def heartbeat(self) -> Heartbeat: ...


def run_worker(role: Role, arguments: WorkerArguments, build: Callable[[str, Callable[..., None]], Compute]) -> None:
    """Run ``build(host_id, send)`` against control until shut down, by message or by SIGTERM."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {arguments.worker_id} %(levelname)s %(message)s")
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
        bounded=role == "engine",
    )
    link = WorkerLink(arguments.url, arguments.key, register)
    compute = build(identity, link.send)
    link.heartbeat = compute.heartbeat
    _stop_on_signals(link)
    end_with_supervisor(grace_s=0)
    link.start()
    try:
        compute.run(link.receive)
    except SetupError as error:  # starting it again would not help: the supervisor passes its words on
        logger.exception("%s cannot work", arguments.worker_id)
        sys.stderr.write(f"error: {' '.join(error.message.split())}\n")
        sys.exit(error.exit_code)
    finally:
        link.close()
    if link.failed:
        sys.exit(1)


def _stop_on_signals(link: WorkerLink) -> None:
    def stop(signum: int, frame: Any) -> None:
        link.deliver(Shutdown(reason=signal.Signals(signum).name))

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides


def resolve_device(name: str) -> torch.device:
    """``auto`` is the accelerator torch sees, else the CPU."""
    if name != "auto":
        return torch.device(name)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator if accelerator is not None else torch.device("cpu")
