"""HTTP models of the episode contract (``/api``), version 1.  Pydantic validates; unknown fields fail."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, Strict, field_validator, model_validator
from pydantic_core import PydanticCustomError

from wingbeat.core.engine_protocol import EngineReply
from wingbeat.core.resource_reports import ResourceStatus
from wingbeat.core.types import OUTCOME_OF, REPORTABLE, Cause, Outcome, Split

PROTOCOL_HEADER = "x-wingbeat-protocol"
"""A client sends the versions that it speaks (``"1"``, ``"1-2"``), the server the one that it answers in."""
PROTOCOL_VERSIONS = (1, 1)
"""The oldest and the newest version of this contract that this release speaks."""
CLIENT_HEADER = "x-wingbeat-client"
"""Who calls, in calls without a body that says so (``client_id``)."""
MAX_GROUP_SIZE = 1024
MAX_PAYLOAD_DEPTH = 64
MAX_NAME = 200
"""Characters of an identifier."""

CodeDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{0,64}$")]
"""Names the code that runs an episode (hexadecimal digest of its files); "" where nobody says."""
Identifier = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
Number = Annotated[FiniteFloat, Strict()]
"""A finite JSON number; neither true nor "1.0" is one."""


def _children(node: Any) -> Iterable[Any]:
    if isinstance(node, dict):
        return cast(dict[str, Any], node).values()
    return cast(list[Any], node) if isinstance(node, list) else ()


class Wire(BaseModel):
    """Base of all wire models: strict about unknown keys, immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TaskModel(Wire):
    """What to solve."""

    source: Identifier = "default"
    id: Identifier
    payload: dict[str, Any] = {}

    @field_validator("payload")
    @classmethod
    def _is_shallow(cls, payload: dict[str, Any]) -> dict[str, Any]:
        """What is taken here must be written again, by encoders that recurse."""
        level: list[Any] = [payload]
        for _ in range(MAX_PAYLOAD_DEPTH):
            level = [child for node in level for child in _children(node)]
            if not level:
                return payload
        raise ValueError(f"nested deeper than {MAX_PAYLOAD_DEPTH} levels")


def source_fault(name: str) -> str:
    """Why a name cannot be that of a task source, which stands in paths, or ""."""
    if 1 <= len(name) <= MAX_NAME and name not in (".", "..") and name.isprintable():
        return ""
    return f"source {name!r:.60}: expected a name of 1 to {MAX_NAME} printable characters that is no `.` or `..`"


class GroupModel(Wire):
    """The group an episode belongs to; all members must name the same size."""

    id: Identifier
    size: int = Field(ge=1, le=MAX_GROUP_SIZE)


class TaskSourceRequest(Wire):
    """``PUT /api/tasks/{source}``: add (or replace) a task source that the server deals out."""

    split: Split = Split.TRAIN
    tasks: list[TaskModel] = Field(min_length=1)
    ratio: Number | None = Field(default=None, gt=0, lt=1)
    """The share of a source that joins a mix with ratios; the others shrink in proportion."""

    @field_validator("ratio", mode="before")
    @classmethod
    def _is_a_share(cls, ratio: Any) -> Any:
        """In words, where the bounds of the schema would say less; what is no number the type tells."""
        if isinstance(ratio, int | float) and not isinstance(ratio, bool) and not 0 < ratio < 1:
            raise PydanticCustomError("share", "expected a ratio above 0 and below 1")
        return ratio


class TaskSourceReply(Wire):
    source: str
    split: Split
    num_tasks: int
    ratio: float | None = None
    """Its share of the training groups; None where sizes decide."""


class RemovedSourceReply(Wire):
    """``DELETE /api/tasks/{source}``."""

    source: str
    num_open_groups: int
    """Groups of it that go on to their end."""
    ratios: dict[str, float]
    """Of what is left."""


class MixingRequest(Wire):
    """``PUT /api/mixing``: the shares of the training groups, from now on."""

    ratios: dict[str, Number]
    """Of every source with training tasks; they sum to 1.  Empty: by the number of tasks."""


class SourceReply(Wire):
    """One training source in ``GET /api/mixing``."""

    ratio: float | None
    """Its share of the groups that count; None where sizes decide."""
    num_tasks: int
    """0: ratios name it, and its tasks have not come."""
    epoch: int
    position: int
    """Tasks dealt in this epoch."""
    exhausted: bool
    groups_dealt: int
    groups_counted: int
    share: float
    """Of all groups that counted so far."""
    ahead: float
    """Groups ahead of its share; negative: behind."""


class MixingReply(Wire):
    """``GET /api/mixing``."""

    ratios: dict[str, float]
    """Empty where sizes decide."""
    sources: dict[str, SourceReply]


class LeaseRequest(Wire):
    """``POST /api/tasks/lease``: ask for up to ``max_leases`` episodes to run; waits up to ``wait_s``."""

    max_leases: int = Field(default=1, ge=1, le=256)
    splits: list[Split] = [Split.TRAIN, Split.EVAL]
    wait_s: float = Field(default=30.0, ge=0, le=30)
    client_id: str = Field(default="", max_length=200)
    code: CodeDigest = ""
    label: str = Field(default="", max_length=200)
    instance: str = Field(default="", max_length=200)
    """Tells the processes of a client apart, so that one can leave (``POST /api/tasks/release``)."""
    sources: list[Identifier] | None = Field(default=None, min_length=1, max_length=1000)
    """The task sources that this client can run; None: all."""
    idempotency_key: Identifier | None = None
    """The same key again, after a lost answer, gets the same leases, as long as they are neither begun nor lapsed."""


class Lease(Wire):
    lease_id: str
    task: TaskModel
    group: GroupModel
    split: Split
    policies: list[str]
    expires_s: float
    """Seconds until the lease lapses if no episode begins under it."""


class LeaseReply(Wire):
    leases: list[Lease]
    stop: bool = False
    """The run is complete: ask no more."""
    reason: str = ""
    """Why no lease came, where none did."""


class BeginRequest(Wire):
    """``POST /api/episodes``: begin an attempt.  Exactly one of ``lease_id`` and ``task``."""

    idempotency_key: Identifier
    lease_id: str | None = None
    task: TaskModel | None = None
    group: GroupModel | None = None
    split: Split = Split.TRAIN
    policies: list[str] | None = None
    """``"solver"`` follows the live weights, ``"solver@12"`` pins a version (eval only). None = all."""
    label: str = Field(default="", max_length=200)
    """Names a variant of the agent, for people and for comparison; under a lease, "" takes the lease's."""
    client_id: str = Field(default="", max_length=200)
    """Whose quota it counts against; under a lease, "" takes the lease's."""
    code: CodeDigest = ""
    """Under a lease, "" takes the lease's."""
    idle_timeout_s: float | None = Field(default=None, gt=0, le=86400)
    heartbeats: bool = False
    """The client promises heartbeats: silence tells from the begin on, not from its first one."""
    tentative_s: float | None = Field(default=None, gt=0, le=300)
    """Begin on trial, as one server of several: unless it is confirmed within so many seconds, the attempt lapses
    and uses up nothing."""


class BeginReply(Wire):
    episode_id: str
    attempt: int
    base_url: str
    api_key: str
    policies: list[str]
    """In the order of the configuration (or of the request), those that train first; frozen ones follow."""
    heartbeat_s: float
    task: TaskModel
    group: GroupModel
    split: Split


class Rewards(Wire):
    """Who earned what.  ``policies`` sets the reward of a policy, ``agents`` (``"policy:agent"``)
    overrides it for one agent, ``turns`` (response ids) adds to the agent of that turn."""

    policies: dict[str, Number] = {}
    agents: dict[str, Number] = {}
    turns: dict[str, Number] = {}


TransactionId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{22,64}$")]


class TransactionModel(Wire):
    """What makes a finish the first phase of two: it is durable, and counts once the transaction is committed."""

    id: TransactionId
    """Random, chosen by the client: whoever knows it may decide."""
    decider: str = Field(default="", max_length=2000)
    """Address of the server whose decision counts; "": this one's."""


class FinishRequest(Wire):
    """``POST /api/episodes/{id}/finish``.  A bare number as ``rewards`` goes to every policy."""

    outcome: Outcome = Outcome.AGENT
    rewards: Number | Rewards = Rewards()
    metrics: dict[str, Number] = {}
    message: str = Field(default="", max_length=10_000)
    transaction: TransactionModel | None = None


class FinishReply(Wire):
    episode_id: str
    attempt: int
    state: str
    num_turns: int
    num_sampled_tokens: int
    warning: str = ""
    """Why a training episode, or a reward of it, trains nothing although it counts as finished."""


class DecisionRequest(Wire):
    """``POST /api/transactions/{id}``: the second phase, at the server that decides first, then at the others."""

    decision: Literal["commit", "abort"]


class TransactionReply(Wire):
    """``GET /api/transactions/{id}``."""

    transaction_id: str
    state: str
    """unknown, prepared, committed or aborted."""
    decider: str = ""
    """While it is prepared: address of the server whose decision counts; "": this one's."""
    episodes: list[str] = []
    """While it is prepared: ids of the episodes that wait here."""
    waiting_s: float = 0.0
    """While it is prepared: for how long, since this server began or resumed to wait."""
    warning: str = ""
    """Of a commit: why something of these episodes trains nothing."""


class AbortRequest(Wire):
    """``POST /api/episodes/{id}/abort``: end without a reward; the slot reopens."""

    outcome: Outcome = Outcome.CLIENT
    cause: Cause | None = None
    """Of those that a client can know (``REPORTABLE``), one of that outcome; None: the outcome says it all."""
    message: str = Field(default="", max_length=10_000)

    @model_validator(mode="after")
    def _cause_fits(self) -> AbortRequest:
        fitting = sorted(cause for cause in REPORTABLE if OUTCOME_OF[cause] is self.outcome)
        if self.cause is not None and self.cause not in fitting:
            raise PydanticCustomError(
                "cause",
                "expected a cause of outcome {outcome}: {fitting}",
                {"outcome": self.outcome, "fitting": ", ".join(fitting) or "none is reported"},
            )
        return self


class DeletedReply(Wire):
    """``DELETE /api/episodes/{id}`` of a collected conversation."""

    episode_id: str
    in_batches: int = 0
    """Logged training batches that still hold its tokens, since a trainer may have to repeat them."""


class ConversationReply(Wire):
    """One entry of ``GET /api/conversations``: a collected conversation that waits for feedback."""

    episode_id: str
    conversation_id: str
    """As its application calls it; "" where it does not say."""
    key: str
    """The name of its key."""
    train: bool
    num_turns: int
    opened_s: float
    """Seconds since 1970."""
    last_s: float
    """Of its last turn."""


class HeartbeatReply(Wire):
    episode_id: str
    state: str
    heartbeat_s: float


class EpisodeReply(Wire):
    """``GET /api/episodes/{id}``."""

    episode_id: str
    attempt: int
    state: str
    task: TaskModel
    group: GroupModel
    split: Split
    policies: list[str]
    num_turns: int
    num_sampled_tokens: int
    label: str
    client_id: str = ""
    code: str = ""
    outcome: Outcome | None = None
    cause: Cause | None = None
    """Why it ended so; None while it runs."""
    message: str = ""
    """Why it ended so, as whoever ended it said."""


class PolicyReply(Wire):
    """One entry of ``GET /api/policies``."""

    name: str
    model: str
    version: int
    context_tokens: int
    trainer: str
    """absent, ready, training, replaying, rolling_back or frozen."""
    engines: int
    served_version: int | None
    served_checksum: str | None
    published_checksum: str | None


class StatusReply(Wire):
    """``GET /api/status``: where the run stands and what it waits for."""

    state: str
    """starting, running, evaluating, complete or stopping."""
    blockers: list[str]
    """In plain words, most important first; empty when work flows."""
    warnings: list[str] = []
    """What people should look at although work flows: health alarms, quarantined operators."""
    ended: str = ""
    """Why a complete run ended before its last step, where that is no fault: its tasks are exhausted."""
    policies: list[PolicyReply]
    engines: list[EngineReply] = []
    resources: list[ResourceStatus] = []
    """Of the pools of clients and of resources servers, added up by kind and label."""
    open_episodes: int
    endings: dict[str, int] = {}
    """Attempts that ended since this process began, as ``outcome/cause``."""
    groups_in_flight: int
    groups_buffered: int
    train_steps: int
    total_steps: int | None
    metrics: dict[str, float]


class DrainRequest(Wire):
    """``POST /api/engines/{name}/drain``: let an engine end what it has, and leave."""

    drain_s: float = Field(default=60.0, ge=0)
    """Seconds that running generations get; what is left then goes on elsewhere."""


class EvaluationRequest(Wire):
    """``POST /api/evaluations``: score a pinned version on a source's eval tasks."""

    source: str | None = None
    policy: str | None = None
    version: int | None = Field(default=None, ge=0)
    """None pins the live version at the moment of the call."""
    samples_per_task: int = Field(default=1, ge=1, le=256)
    max_tasks: int | None = Field(default=None, ge=1)
    name: Identifier = "eval"


class ScoreReply(Wire):
    """One task source's part of an evaluation."""

    mean_reward: float | None
    stderr: float | None
    num_tasks: int
    """Tasks with a reward."""


class EvaluationReply(Wire):
    evaluation_id: str
    policy: str
    version: int
    state: str
    """running or done."""
    num_expected: int
    num_finished: int
    mean_reward: float | None = None
    stderr: float | None = None
    rewards: dict[str, list[float]] = {}
    """Per task id (``source/id`` where several sources are scored), in order of finishing."""
    sources: dict[str, ScoreReply] = {}
    agents: dict[str, int] = {}
    """Finished episodes by version of the agent (``label (code)``), where its clients say which."""


class ErrorBody(Wire):
    message: str
    type: str
    code: str
    param: str | None = None


class ErrorReply(Wire):
    """The one error shape, as OpenAI clients expect it."""

    error: ErrorBody
