"""The processes that train one policy together, and what they say to each other besides tensors.

Bytes travel over a group of their own, on the CPU whatever the device: commands of rank 0, what each rank found.
Nothing is ever pickled.  That group waits without limit, since a trainer may stand idle for hours; a process that
dies closes its connections, which ends the others' waiting at once, and the kernel asks after other machines
(:func:`keep_alive`).

Collectives of tensors give up after :data:`COLLECTIVE_TIMEOUT`: ranks agree over the first group before they start
one, so that nobody waits there for another one's forwards.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

import wingbeat
from wingbeat.core.errors import SetupError, UnavailableError

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
PATIENCE = timedelta(days=365)
"""Of the group that carries commands."""
KEEPALIVE_S = (60, 20)
"""Silence on a connection after which its other end is asked after, and time between two such questions."""
KEEPALIVE_PROBES = 6
"""Questions without an answer after which it is lost."""


class RankLost(Exception):
    """The processes are no longer at one and the same point: this one must end, and all begin again.

    No :class:`WingbeatError`, because a step that fails with one is over, and the processes are as good as before.
    """

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the processes find each other, and which of them this is."""

    rank: int
    size: int
    local_rank: int
    """Among the processes of this machine: the index of its device."""
    file: Path | None = None
    """On one machine: a file that does not exist yet, in a folder of the run's owner."""
    address: str = ""
    """On several: the host of rank 0."""
    port: int = 0

    def store(self) -> Any:
        if self.file is not None:
            return dist.FileStore(str(self.file), self.size)  # pyright: ignore[reportPrivateImportUsage]
        return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            self.address, self.port, self.size, is_master=self.rank == 0, timeout=COLLECTIVE_TIMEOUT
        )


@dataclass(frozen=True, slots=True)
class World:
    """The processes, once they have met."""

    rank: int
    size: int
    device: torch.device
    talk: dist.ProcessGroup
    """For bytes."""

    def broadcast(self, data: bytes | None) -> bytes:
        """What rank 0 says; the others give None."""
        length = torch.tensor([0 if data is None else len(data)], dtype=torch.int64)
        dist.broadcast(length, 0, group=self.talk)
        content = _tensor(data) if data is not None else torch.empty(int(length), dtype=torch.uint8)
        if len(content):
            dist.broadcast(content, 0, group=self.talk)
        return _bytes(content)

    def gather(self, data: bytes) -> list[bytes]:
        """What every rank says, by rank, to every rank."""
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)], dtype=torch.int64), group=self.talk)
        longest = int(max(lengths))
        if not longest:
            return [b""] * self.size
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = _tensor(data)
        found = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(found, padded, group=self.talk)
        return [_bytes(content[: int(length)]) for content, length in zip(found, lengths, strict=True)]


class Complaint(msgspec.Struct, frozen=True):
    """What keeps a process from going on."""

    text: str
    must_be_fixed: bool = False
    """A SetupError: the same again would fail again."""

    @classmethod
    def of(cls, error: Exception) -> Complaint:
        return cls(str(error), isinstance(error, SetupError))


def join(rendezvous: Rendezvous, *, device: str) -> World:
    """Wait for all processes of the rendezvous.

    ``device`` is ``trainer.device``: ``auto`` and a kind of accelerator take the one whose index is the local rank.
    Raises SetupError where there is no such device, or where another process runs other releases.
    """
    chosen = rank_device(device, local_rank=rendezvous.local_rank)
    backend = "gloo"
    if chosen.type != "cpu":
        torch.accelerator.set_device_index(chosen)
        backend = f"cpu:gloo,{chosen.type}:{dist.get_default_backend_for_device(chosen)}"
    if rendezvous.file is not None:
        stay_on_this_host()
    dist.init_process_group(
        backend,
        store=rendezvous.store(),
        rank=rendezvous.rank,
        world_size=rendezvous.size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    talk = dist.new_group(backend="gloo", timeout=PATIENCE)
    assert isinstance(talk, dist.ProcessGroup)
    world = World(rendezvous.rank, rendezvous.size, chosen, talk)
    check_releases(world)
    if rendezvous.file is None:
        keep_alive(Path("/proc/self/fd"))
    return world


def check_releases(world: World) -> None:
    """Raises SetupError where not all processes run the same software: their gradients would not be one."""
    own = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft"))
    said = world.gather(f"wingbeat {wingbeat.__version__}, {own}".encode())
    for rank, other in enumerate(said):
        if other != said[0]:
            raise SetupError(
                f"expected all processes of a trainer to run the same releases, got {said[0].decode()} on rank 0 and "
                f"{other.decode()} on rank {rank}; install the same on both machines"
            )


def keep_alive(descriptors: Path) -> int:
    """Have the kernel ask after the other end of every TCP connection of this process; how many there are.

    A machine that lost its power or its network closes nothing, and who waits for it would wait for ever.  Torch has no
    setting for that, so the connections are found where Linux lists them.  There is no limit to how long data may stay
    unread: a process that computes reads nothing.
    """
    found = 0
    for entry in descriptors.iterdir() if descriptors.is_dir() else ():
        try:
            connection = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:  # no socket, or closed meanwhile
            continue
        with connection:
            if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S[0])
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S[1])
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
            found += 1
    return found


def agree(world: World, complaint: Complaint | None = None) -> None:
    """Go on together, or not at all: asked by every process before it does what needs the others.

    Raises SetupError or UnavailableError with the complaint of another process.  One that complains itself knows why,
    and gets nothing raised.
    """
    said = world.gather(b"" if complaint is None else msgspec.msgpack.encode(complaint))
    if complaint is not None:
        return
    for rank, data in enumerate(said):
        if data:
            found = msgspec.msgpack.decode(data, type=Complaint)
            kind = SetupError if found.must_be_fixed else UnavailableError
            raise kind(f"rank {rank}: {found.text}")


def rank_device(name: str, *, local_rank: int) -> torch.device:
    """The device of a rank.  Raises SetupError where this machine has too few."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "cpu" or (name == "auto" and accelerator is None):
        return torch.device("cpu")
    if accelerator is None or (name != "auto" and torch.device(name).type != accelerator.type):
        found = "none" if accelerator is None else accelerator.type
        raise SetupError(
            f"trainer.device = {name!r}: expected an accelerator of that kind here, got {found}; use 'auto'"
        )
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise SetupError(
            f"trainer.processes: expected a device for each process of this machine, got {count} for at least "
            f"{local_rank + 1}; lower trainer.processes, or set trainer.device = 'cpu'"
        )
    return torch.device(accelerator.type, local_rank)


def stay_on_this_host() -> None:
    """Before processes of one host meet: on the loopback interface only, so that nothing listens on its network."""
    names = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if loopback is not None:
            os.environ.setdefault(variable, loopback)


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _bytes(content: Tensor) -> bytes:
    return content.numpy().tobytes()
