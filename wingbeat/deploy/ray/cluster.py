"""The cluster: joining it, what would not work on it, and what it has room for."""

from __future__ import annotations

import signal
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import ray

from wingbeat.core.config import Config
from wingbeat.core.config.server import is_loopback
from wingbeat.core.errors import SetupError
from wingbeat.deploy.checks import EVERY_ADDRESS

NAMESPACE = "wingbeat"
CONNECT_S = 5.0
SHOWN_NODES = 8
"""In a message; a cluster may have thousands."""


def connect(address: str) -> None:
    """Become a driver of a running cluster, on one of its nodes.  Raises SetupError where that cannot be."""
    if "://" in address:
        raise SetupError(
            f"--address {address}: Ray's client mode is not supported, as control runs on a node of the cluster: call"
            " this command on one, with `auto` or HOST:PORT"
        )
    how = (
        "start one (`ray start --head`, on other nodes `ray start --address=HEAD:6379`), or name its address with"
        " --address"
    )
    if address != "auto":  # Ray itself would try for minutes
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
        except (OSError, ValueError) as error:
            raise SetupError(f"no Ray cluster at {address!r} ({error}): {how}") from error
    ours = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise SetupError(f"no Ray cluster at {address!r} ({error}): {how}") from error
    finally:
        signal.signal(signal.SIGTERM, ours)  # Ray's own ends the process at once, and what it runs not in order


@dataclass(frozen=True, slots=True)
class Node:
    """One that lives."""

    id: str
    address: str
    resources: Mapping[str, float]

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Self:
        return cls(data["NodeID"], data["NodeManagerAddress"], data["Resources"])

    def holds(self, bundle: Mapping[str, float]) -> bool:
        """Whether it could, were it empty."""
        return all(self.resources.get(kind, 0.0) >= number for kind, number in bundle.items())


def live_nodes() -> list[Node]:
    """Blocks on the cluster's head for a moment."""
    return [Node.of(data) for data in ray.nodes() if data["Alive"]]


def check_host(host: str, *, own: str, addresses: Collection[str]) -> None:
    """Raises SetupError where workers on other nodes could not call the server by ``server.host``."""
    if host in EVERY_ADDRESS or (is_loopback(host) and len(addresses) > 1):
        raise SetupError(
            f"server.host is {host}, by which workers on the cluster's other nodes cannot call the server: set it to"
            f" this node's address, {own}, with keys and TLS"
        )


def check_lending(config: Config, *, addresses: Collection[str]) -> None:
    """Raises SetupError where a resources server could not be called, or could not listen, on another node."""
    host = config.resources.host
    if config.resources.count and host not in EVERY_ADDRESS and len(addresses) > 1:
        raise SetupError(
            f"resources.host is {host}, on which resources servers on the cluster's other nodes cannot listen for"
            " clients elsewhere: set it to 0.0.0.0, with keys and TLS"
        )


def check_own(node: Node, bundle: Mapping[str, float]) -> None:
    """Raises SetupError where this node has no room for control, full or empty."""
    if not node.holds(bundle):
        raise SetupError(
            f"control needs {amount(bundle)} of this node, {node.address}, which has {amount(node.resources)}: call"
            " this command on another node, or start this one with `ray start --num-cpus=1` or more"
        )


def amount(resources: Mapping[str, float]) -> str:
    """``4 CPU and 1 GPU``."""
    kinds = [kind for kind in ("CPU", "GPU") if kind == "CPU" or resources.get(kind)]
    return " and ".join(f"{resources.get(kind, 0.0):g} {kind}" for kind in kinds)


def room_words(bundle: Mapping[str, float], nodes: Sequence[Node], free: Mapping[str, float]) -> str:
    """What is asked of a node, and what the cluster has; ``free``: on all nodes together."""
    shown = [f"{node.address} has {amount(node.resources)}" for node in nodes[:SHOWN_NODES]]
    if len(nodes) > SHOWN_NODES:
        shown.append(f"{len(nodes) - SHOWN_NODES} more")
    words = f"a node with {amount(bundle)} free; {', '.join(shown)}; free on all together: {amount(free)}"
    if not any(node.holds(bundle) for node in nodes):
        words += "; none is large enough even when it is empty: add one, or ask for less (threads, ranks, devices)"
    return words
