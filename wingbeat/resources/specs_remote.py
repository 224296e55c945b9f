"""Specs of what runs elsewhere (containers, pods, actors, endpoints, models), and any spec from plain data."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, Self, get_args
from urllib.parse import urlsplit

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from wingbeat.core.errors import ConfigError
from wingbeat.resources.specs import (
    BoxSpec,
    Count,
    Needs,
    Positive,
    Reuse,
    SandboxSpec,
    Share,
    Spec,
    SubprocessSpec,
    Texts,
    words_of,
)


class Pull(StrEnum):
    """Where a container's image comes from."""

    MISSING = "missing"
    """From its registry, if the host does not have it."""
    NEVER = "never"
    """The host has it, else the start fails."""


UserId = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,9}(:[1-9][0-9]{0,9})?$")]
"""``UID`` or ``UID:GID`` in numbers, never root."""


class DockerSpec(BoxSpec, frozen=True):
    """A container of a Docker daemon."""

    kind: Literal["docker"] = "docker"
    image: Annotated[str, Field(min_length=1)]
    pull: Pull = Pull.MISSING
    host: str = ""
    """The daemon's address; "": that of the environment (``DOCKER_HOST``)."""
    user: UserId = "65534:65534"


class KubernetesSpec(BoxSpec, frozen=True):
    """A pod of a Kubernetes cluster."""

    kind: Literal["kubernetes"] = "kubernetes"
    image: Annotated[str, Field(min_length=1)]
    namespace: Annotated[str, Field(min_length=1)] = "default"
    pull: Pull = Pull.MISSING
    context: str = ""
    """Of the kubeconfig; "": its current one, or that of the pod this runs in."""
    user: UserId = "65534:65534"
    network_policies: bool = False
    """Says that the cluster's network plugin enforces NetworkPolicy objects, which the API does not tell:
    ``network=False`` is refused without."""
    service_account: str = ""
    """Of the pod, without a token in it; "": the namespace's default one."""
    node_selector: Texts = Field(default_factory=dict[str, str])


class RaySpec(Spec, frozen=True):
    """A box inside an actor on some node of a Ray cluster."""

    kind: Literal["ray"] = "ray"
    box: Annotated[SubprocessSpec | SandboxSpec, Field(discriminator="kind")]
    address: str = ""
    """The cluster's; "": the one this process is connected to."""

    @property
    def holds(self) -> Needs:
        """Nothing of this machine, unless said otherwise: the cluster has its own books."""
        return self.needs or Needs()


class EndpointSpec(Spec, frozen=True):
    """HTTP endpoints that do the same: a judge, a simulator, an opponent, a search service."""

    kind: Literal["endpoint"] = "endpoint"
    reuse: Reuse = Reuse.SHARED
    urls: Annotated[tuple[str, ...], Field(min_length=1)]
    """Each with what all paths begin with, such as ``https://host/v1``; a request goes to the one with the fewest
    in flight."""
    model: str = ""
    """What ``chat`` asks for where its caller does not say."""
    api_key_env: str = ""
    """The environment variable that holds the key: keys are no part of a spec."""
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    """Of all leases of this spec; of the tokens that replies say they used."""
    max_concurrent: Count | None = None
    """Requests in flight at once, at each URL."""
    request_timeout_s: Positive = 60.0
    """Of one try."""
    queue_s: Positive = 300.0
    """How long a request may wait for its turn: rates, budgets, ``max_concurrent``."""
    retry_budget_s: Share = 60.0
    """After a failure of infrastructure another try may begin within so many seconds; 0: one try."""
    breaker_failures: Count = 5
    """Failures in a row after which a URL is left alone."""
    breaker_s: Positive = 30.0
    prompt_price: Share = 0.0
    """Of a thousand tokens."""
    completion_price: Share = 0.0
    budget: str = ""
    """The pool's named budget that its requests, tokens and costs are taken from."""

    @model_validator(mode="after")
    def _urls_are_addresses(self) -> Self:
        for url in self.urls:
            _check_url(url, "urls")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("urls: expected each address once")
        return self


class ModelSpec(Spec, frozen=True):
    """A policy of a Wingbeat server, used as a resource (a judge, a simulator, an opponent): nothing of it trains."""

    kind: Literal["model"] = "model"
    url: Annotated[str, Field(min_length=1)]
    """The server's, without ``/v1``."""
    policy: Annotated[str, Field(min_length=1, max_length=200)]
    version: Annotated[int, Field(ge=0)] | None = None
    """One that the server holds (an evaluation pins it); None: follows the live weights."""
    key_env: str = ""
    """The environment variable that holds a client key or an admin key."""
    max_concurrent: Count | None = None
    request_timeout_s: Positive = 600.0
    queue_s: Positive = 300.0
    retry_budget_s: Share = 120.0
    """Long enough for a restart of the server."""
    budget: str = ""
    """The pool's named budget that its requests and tokens are taken from."""

    @model_validator(mode="after")
    def _url_is_an_address(self) -> Self:
        _check_url(self.url, "url")
        if "@" in self.policy or ":" in self.policy:
            raise ValueError(f"policy: expected a policy's name (its version is a field), got {self.policy!r}")
        return self


def command_timeout_s(spec: Spec) -> float:
    """How long a command may take in a box of this spec, unless it is told otherwise."""
    box = spec.box if isinstance(spec, RaySpec) else spec
    assert isinstance(box, BoxSpec), f"expected the spec of a box, got kind {spec.kind}"
    return box.command_timeout_s


def answer_timeout_s(spec: Spec) -> float:
    """How long a request of an endpoint or a model of this spec takes at most, its waits and tries included."""
    assert isinstance(spec, EndpointSpec | ModelSpec), f"expected the spec of an endpoint or model, got {spec.kind}"
    return spec.queue_s + spec.retry_budget_s + spec.request_timeout_s


def _check_url(url: str, field: str) -> None:
    """Only what names a server and a path: a key has no place in a spec, which is logged."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        raise ValueError(f"{field}: expected an address like https://host/v1") from None
    if parts.username is not None or parts.password is not None:
        raise ValueError(f"{field}: expected no key or password in an address; api_key_env names where a key is")
    if parts.query or parts.fragment:
        raise ValueError(f"{field}: expected an address like https://host/v1, without what follows ? or #")
    if not is_address or any(c.isspace() for c in url):
        raise ValueError(f"{field}: expected an address like https://host/v1, got {url!r}")


AnyWireSpec = SubprocessSpec | SandboxSpec | DockerSpec | KubernetesSpec | RaySpec | EndpointSpec | ModelSpec
WireSpec = Annotated[AnyWireSpec, Field(discriminator="kind")]
"""Every kind that may cross a process or a file."""

_SPECS: Mapping[str, type[Spec]] = {spec.model_fields["kind"].default: spec for spec in get_args(AnyWireSpec)}
WIRE_KINDS = tuple(sorted(_SPECS))

_WIRE: TypeAdapter[Spec] = TypeAdapter(WireSpec)


def parse_spec(data: Mapping[str, Any]) -> Spec:
    """A spec from plain data.  Raises ConfigError for an unknown kind or a field that does not validate."""
    kind = data.get("kind")
    if kind not in WIRE_KINDS:
        hint = " (local objects cannot leave their process)" if kind == "local" else ""
        raise ConfigError(f"kind: expected one of {', '.join(WIRE_KINDS)}, got {kind!r}{hint}", param="kind")
    try:
        return _WIRE.validate_python(dict(data))
    except ValidationError as error:
        raise ConfigError(words_of(error, str(kind), tuple(_SPECS[kind].model_fields))) from None
