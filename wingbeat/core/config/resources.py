"""Configuration of a resources server: what it lends, to whom, and how much of it."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import unquote, urlsplit

from pydantic import Field, field_validator, model_validator

from wingbeat.core.config.section import Section

ResourceKind = Literal["docker", "endpoint", "kubernetes", "model", "ray", "sandbox", "subprocess"]
WRITABLE = ":rw"
"""At the end of a mount that clients may write to."""
Above = Annotated[float, Field(gt=0)]


class ResourcesConfig(Section):
    """What `wingbeat resources` lends to clients, where it listens, and what all its instances may take together."""

    count: int = Field(
        default=0,
        ge=0,
        le=64,
        description="Resources servers that `serve`, `train` and `deploy ray` keep running beside the engines; clients"
        " find them with `--resources auto`. With `port` set, the next ones take the ports after it.",
    )
    host: str = Field(
        default="127.0.0.1",
        description="Bind address. Beyond loopback needs an admin key (docs/security.md). With 0.0.0.0, a server"
        " is told the address by which this machine reaches it.",
    )
    port: int = Field(default=8322, ge=0, le=65535, description="0 takes a free port and prints it.")
    kinds: list[ResourceKind] = Field(
        default=["sandbox"], min_length=1, description="Kinds that clients may lease; others are refused."
    )
    cpus: float | None = Field(
        default=None, gt=0, description="Processors of all instances together; unset: this machine's."
    )
    memory_mb: int | None = Field(
        default=None, ge=1, description="MiB of all instances together; unset: this machine's."
    )
    gpus: int | None = Field(default=None, ge=0, description="GPUs of all instances together; unset: this machine's.")
    max_idle: int = Field(default=256, ge=1, description="Unused instances kept for the next lease.")
    requests_per_minute: dict[str, Above] = Field(default={}, description="Budgets of requests, by name.")
    tokens_per_minute: dict[str, Above] = Field(default={}, description="Budgets of tokens, by name.")
    cost: dict[str, Above] = Field(default={}, description="Budgets of money, by name, for the server's life.")
    network: bool = Field(default=False, description="Whether boxes may have `network = true`.")
    network_policies: bool = Field(
        default=False,
        description="Whether the cluster of `kubernetes` enforces NetworkPolicy objects, so that specs may say so.",
    )
    mounts: list[str] = Field(
        default=[],
        description="Folders of this machine that boxes may mount: read-only, each folder and file below, too; with"
        " `:rw` after it also for writing, and then the folder itself only.",
    )
    images: list[str] = Field(
        default=[], description="Images of `docker` and `kubernetes` that clients may use; a `*` at the end: any rest."
    )
    namespaces: list[str] = Field(default=["default"], description="Namespaces of `kubernetes` that clients may use.")
    urls: list[str] = Field(
        default=[],
        description="Addresses that `endpoint` and `model` may call, with what is below; the server calls no other.",
    )
    key_variables: dict[str, list[str]] = Field(
        default={},
        description="Environment variables whose keys clients may have sent, each with those of `urls` that it is for.",
    )
    leases_per_client: int = Field(
        default=256, ge=1, description="Resources that one client may hold, wait for or have fetched ahead at once."
    )
    total_leases: int = Field(default=4096, ge=1, description="The same of all clients together.")
    requests_per_s: float = Field(
        default=1000.0,
        gt=0,
        description="Requests of one client per second, on average; more get 429. A body counts as one more for every"
        " 64 KiB.",
    )
    request_burst: int = Field(default=10_000, ge=1, description="Requests of one client that may come at once.")
    body_bytes: int = Field(
        default=256 * 2**20, ge=1, description="Request bodies of one client that are received or read at once."
    )
    total_body_bytes: int = Field(default=2**30, ge=1, description="Request bodies of all at once.")
    heartbeat_s: float = Field(
        default=5.0, ge=0.1, description="How often clients report life; silent for four times as long, one is gone."
    )
    max_hold_s: float = Field(default=14_400.0, gt=0, description="A lease that is held for longer is ended.")
    max_wait_s: float = Field(default=3600.0, gt=0, description="How long a lease waits for its turn at most.")
    max_command_s: float = Field(default=3600.0, gt=0, description="How long a command in a box may take at most.")
    ledger: str | None = Field(
        default=None,
        description="Folder that notes what would outlive a crash, which the next server ends; unset: the user's own.",
    )

    @field_validator("mounts")
    @classmethod
    def _mounts_are_paths(cls, mounts: list[str]) -> list[str]:
        for mount in mounts:
            path = mount.removesuffix(WRITABLE)
            if not path.startswith("/") or ".." in path.split("/"):
                raise ValueError(f"expected an absolute path such as /data or /scratch:rw, got {mount!r}")
        written = [mount.removesuffix(WRITABLE).rstrip("/") for mount in mounts if mount.endswith(WRITABLE)]
        for mount in mounts:
            path = mount.removesuffix(WRITABLE).rstrip("/")
            for outer in written:
                if path.startswith(f"{outer}/"):
                    raise ValueError(
                        f"{mount!r} is below {outer + WRITABLE!r}: whoever writes there could have {path!r} lead"
                        " anywhere; name folders that are not within each other"
                    )
        return mounts

    @field_validator("urls")
    @classmethod
    def _urls_are_addresses(cls, urls: list[str]) -> list[str]:
        for url in urls:
            if place_of(url) is None:
                raise ValueError(f"expected an address like https://host/v1, got {url!r}")
        return urls

    @model_validator(mode="after")
    def _keys_have_places(self) -> ResourcesConfig:
        for name, urls in self.key_variables.items():
            if not urls:
                raise ValueError(f"key_variables: {name} names no address, so its key could never be sent")
            for url in urls:
                if not any(is_below(url, allowed) for allowed in self.urls):
                    raise ValueError(
                        f"key_variables: {name} is for {url}, which is none of urls, nor below one: add it there"
                    )
        return self

    @model_validator(mode="after")
    def _totals_hold_a_client(self) -> ResourcesConfig:
        for name, total in (("leases_per_client", "total_leases"), ("body_bytes", "total_body_bytes")):
            one, all_ = getattr(self, name), getattr(self, total)
            if all_ < one:
                raise ValueError(f"`{total}` = {all_} is less than what one client may have, `{name}` = {one}")
        return self


Place = tuple[str, str, int, tuple[str, ...]]


def place_of(url: str) -> Place | None:
    """Scheme, host, port and parts of the path; None for what is no address, or one that could lead elsewhere."""
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    except ValueError:
        return None
    steps = tuple(step for step in parts.path.split("/") if step)
    odd = any(step in (".", "..") or unquote(step) != step or "\\" in step for step in steps)
    if not port or not parts.hostname or odd or parts.username is not None or parts.query or parts.fragment:
        return None
    return parts.scheme, parts.hostname.rstrip(".").lower(), port, steps


def is_below(url: str, allowed: str) -> bool:
    """Whether an address is an allowed one, or leads below it."""
    place, root = place_of(url), place_of(allowed)
    return place is not None and root is not None and place[:3] == root[:3] and place[3][: len(root[3])] == root[3]
