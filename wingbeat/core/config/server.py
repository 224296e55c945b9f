"""Configuration of the server: where it listens, who may call, what it accepts."""

from __future__ import annotations

import ipaddress
from typing import Any

from pydantic import Field, field_validator, model_validator

from wingbeat.core.addresses import server_address
from wingbeat.core.config.section import Section
from wingbeat.core.keys import HASH_PREFIX, hashed, is_hashed

SECRETS = ("admin_key", "worker_key")
"""Keys of this section that nothing may show."""


def is_loopback(name: str) -> bool:
    """Whether a name or address can mean nothing but this machine."""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class ServerConfig(Section):
    """Where the server listens and what it accepts."""

    host: str = Field(
        default="127.0.0.1", description="Bind address. Beyond loopback needs an admin key (docs/security.md)."
    )
    port: int = Field(default=8321, ge=0, le=65535, description="0 takes a free port and prints it.")
    admin_key: str | None = Field(
        default=None,
        min_length=16,
        description="A key of the admin role, or `sha256:HEX` of one; on loopback none is needed. Better made with"
        " `wingbeat keys create`: what stands on a command line other users of the machine can read.",
    )
    worker_key: str | None = Field(
        default=None,
        min_length=16,
        description="A key of the worker role, or `sha256:HEX` of one, for workers on other machines.",
    )
    keys_file: str | None = Field(
        default=None,
        description="Where `wingbeat keys` keeps the digests of its keys; unset: `keys.json` in `run.dir`.",
    )
    tls_cert: str | None = Field(
        default=None,
        description="A PEM file with the server's certificate and its chain; with `tls_key`, serves https.",
    )
    tls_key: str | None = Field(default=None, description="A PEM file with the certificate's private key, unencrypted.")
    allowed_hosts: list[str] | None = Field(
        default=None,
        min_length=1,
        description="Names, without port, under which the server may be called, besides those of loopback; other `Host`"
        " headers get 421. Unset: without an admin key none (a web page must not reach the server through a name of its"
        " own that leads here), with one any.",
    )
    open_metrics: bool = Field(
        default=False, description="Where there is an admin key: whether `/metrics` needs none nevertheless."
    )
    max_body_bytes: int = Field(default=32 * 2**20, gt=0, description="Larger request bodies get 413.")
    max_connections: int = Field(
        default=8192,
        ge=1,
        description="Connections at once; one more is told 503 (with TLS: nothing) and closed. Callers of this machine"
        " have 256 more, so that workers come back to a full server.",
    )
    request_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="How long a caller may take for the TLS handshake, to send the head of a request, and its body to"
        " begin: a body that comes slower than 1 kB/s beyond that gets 408. Who reads nothing of an answer for ten"
        " times as long is cut off.",
    )
    idle_timeout_s: float = Field(
        default=600.0, gt=0, description="An episode without open request or heartbeat for so long is lost."
    )
    heartbeat_s: float = Field(default=10.0, gt=0, description="How often clients and workers report life.")
    retry_grace_s: float = Field(
        default=10.0,
        ge=0,
        description="How long a call whose caller hung up goes on, so that its retry finds it; streams end at once.",
    )
    begin_wait_s: float = Field(default=30.0, ge=0, le=30, description="How long begin and lease wait for admission.")
    lease_s: float = Field(
        default=30.0,
        ge=1,
        description="How long a lease waits for its begin; where its client died, the group waits for so long.",
    )
    peers: list[str] = Field(
        default=[],
        description="Addresses of other servers, as their clients write them (`https://west.example:8321`), that this"
        " one may ask whether an episode that they share counts. It calls no other address.",
    )
    transaction_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="How long a finish that is shared with other servers waits for its client to decide: then the"
        " server that decides aborts it, and the others ask that server to, where it is one of their `peers`.",
    )

    @field_validator("peers")
    @classmethod
    def _peers_are_addresses(cls, peers: list[str]) -> list[str]:
        return [server_address(peer) for peer in peers]

    @field_validator(*SECRETS)
    @classmethod
    def _hashes_are_whole(cls, value: str | None) -> str | None:
        if value is not None and value.startswith(HASH_PREFIX) and not is_hashed(value):
            raise ValueError(f"after {HASH_PREFIX} expected 64 hexadecimal digits, those of the key's SHA-256")
        return value

    @model_validator(mode="after")
    def _tls_is_whole(self) -> ServerConfig:
        if (self.tls_cert is None) != (self.tls_key is None):
            missing = "tls_key" if self.tls_key is None else "tls_cert"
            raise ValueError(f"TLS needs both `tls_cert` and `tls_key`, and `{missing}` is unset")
        return self

    @field_validator("allowed_hosts")
    @classmethod
    def _hosts_are_names(cls, value: list[str] | None) -> list[str] | None:
        for name in value or ():
            if not name or any(c in name for c in "/ @*"):
                raise ValueError(f"expected a name without port and scheme, such as train.example.org, got {name!r}")
        return value

    def without_keys(self) -> ServerConfig:
        """The same with hashes in place of keys, for files."""
        plain = {name: getattr(self, name) for name in SECRETS}
        return self.model_copy(update={name: hashed(key) for name, key in plain.items() if key is not None})

    def __repr_args__(self) -> Any:
        """Without the keys: a configuration may end up in a log."""
        for name, value in super().__repr_args__():
            yield name, "..." if name in SECRETS and value is not None else value
