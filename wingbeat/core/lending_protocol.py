"""HTTP models of ``/resources/v1``: what clients ask of a resources server.

A lease is named by the client's idempotency key, so that a request whose answer was lost can be sent again, and one
that was cancelled can be taken back without its answer.  So it is with what is done in a leased box: each call has an
id, and the same id again joins the call that runs, or gets its result.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, FiniteFloat

from wingbeat.core.protocol import Identifier, Wire
from wingbeat.core.resource_reports import ResourceStatus

PREFIX = "/resources/v1"
MAX_SPECS = 32
"""Of one lease: several resources, all of them or none."""
POLL_S = 20.0
"""How long an answer to a waiting lease or a running command takes at most; then it is asked for again."""
SILENT_HEARTBEATS = 4
MAX_BEAT = 10_000
"""Leases that one heartbeat tells of."""

CallId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
"""128 random bits, chosen by the client."""
Name = Annotated[str, Field(max_length=200)]
Owner = Annotated[str, Field(max_length=400)]
Seconds = Annotated[FiniteFloat, Field(gt=0)]


class _Bytes(Wire):
    """Bytes are base64 in JSON."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")


class SpecItem(Wire):
    """One resource, by the name that its owner gives it."""

    name: Name = ""
    spec: dict[str, Any]


class LeaseOrder(Wire):
    """``POST /resources/v1/leases``: hold these, all or none."""

    client_id: Identifier
    idempotency_key: CallId
    owner: Owner = ""
    specs: Annotated[tuple[SpecItem, ...], Field(min_length=1, max_length=MAX_SPECS)]
    wait_s: Annotated[FiniteFloat, Field(ge=0)] | None = None
    """For their turn, in all; None: the server's ``max_wait_s``."""


class LentValue(Wire):
    """What a held resource is."""

    name: str
    kind: Literal["box", "endpoint"]
    workdir: str = ""
    """Of a box."""
    model: str = ""
    """Of an endpoint."""


class LeaseAnswer(Wire):
    """``waiting``: ask again, with the same key."""

    lease_id: str
    state: Literal["waiting", "held"]
    heartbeat_s: float
    values: tuple[LentValue, ...] = ()


class Heartbeat(Wire):
    """``POST /resources/v1/heartbeat``: a client that lives, and what it holds."""

    client_id: Identifier
    leases: Annotated[tuple[CallId, ...], Field(max_length=MAX_BEAT)] = ()


class HeartbeatAnswer(Wire):
    heartbeat_s: float
    lost: dict[str, str] = Field(default={})
    """Leases that are over, and why."""


class PrefetchOrder(Wire):
    """``POST /resources/v1/prefetch``: begin to fetch what an owner will lease soon."""

    client_id: Identifier
    call_id: CallId
    owner: Annotated[str, Field(min_length=1, max_length=400)]
    specs: Annotated[tuple[SpecItem, ...], Field(min_length=1, max_length=MAX_SPECS)]


class ReleaseOrder(Wire):
    """``POST /resources/v1/release``: end all that an owner has."""

    client_id: Identifier
    owner: Annotated[str, Field(min_length=1, max_length=400)]


class Released(Wire):
    released: int


class RunOrder(_Bytes):
    """``POST .../run``: a command in a box."""

    call_id: CallId
    command: str | tuple[str, ...]
    stdin: bytes = b""
    timeout_s: Seconds | None = None
    env: dict[str, str] | None = None
    cwd: str | None = None


class RunAnswer(_Bytes):
    state: Literal["running", "done"]
    exit_code: int = 0
    stdout: bytes = b""
    stderr: bytes = b""
    seconds: float = 0.0
    truncated: bool = False
    stopped_by: str | None = None


class SendOrder(_Bytes):
    """``POST .../send``: a request of an endpoint."""

    call_id: CallId
    method: Annotated[str, Field(max_length=20)]
    path: Annotated[str, Field(max_length=8000)]
    body: Any = None
    headers: dict[str, str] = Field(default={})
    repeatable: bool | None = None


class SendAnswer(_Bytes):
    state: Literal["running", "done"]
    status: int = 0
    headers: dict[str, str] = Field(default={})
    body: bytes = b""
    url: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    words: str = ""


class BudgetUse(Wire):
    name: str
    capacity: float
    used: float
    waiting: int


class LendingStatus(Wire):
    """``GET /resources/v1/status``."""

    kinds: tuple[str, ...]
    clients: int
    leases: int
    """Held or waited for."""
    classes: tuple[ResourceStatus, ...]
    budgets: tuple[BudgetUse, ...]
