"""The vocabulary of Wingbeat as frozen values (no torch, no numpy: the light client imports this).

A *task* is what to solve; an *episode* is one attempt at it; a *turn* is one model call; a *group* is
the episodes of one task that share a baseline; a *policy* is a named trainable model whose *version*
grows by one per published optimiser step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple


class Outcome(StrEnum):
    """How an episode ended.  Only ``AGENT`` outcomes ever reach a baseline."""

    AGENT = "agent"
    """The episode ran to its end, well or badly: trained with its reward."""
    ENVIRONMENT = "environment"
    """The environment (simulator, scorer, tool) broke."""
    INFRASTRUCTURE = "infrastructure"
    """Our side broke: engine, server, network."""
    CLIENT = "client"
    """The agent's own code raised, or the client vanished."""
    TIMEOUT = "timeout"
    """A deadline passed."""


class Cause(StrEnum):
    """Why an attempt ended so.  Each cause belongs to one outcome (:data:`OUTCOME_OF`)."""

    AGENT_FINISHED = "agent_finished"
    ENVIRONMENT_ERROR = "environment_error"
    """The client said that its environment broke."""
    INFRASTRUCTURE_ERROR = "infrastructure_error"
    """The client said so: it could not reach the server, for one."""
    MODEL_CALL_FAILED = "model_call_failed"
    """The agent gave up after its last model call had failed through a fault of the server or an engine."""
    NO_ENGINE = "no_engine"
    """As before, and no engine was there."""
    SERVER_RESTART = "server_restart"
    """The server ended, and could not go on with the attempt when it came back."""
    AGENT_RAISED = "agent_raised"
    AGENT_UNFINISHED = "agent_unfinished"
    """The agent returned without a reward."""
    CLIENT_STOPPED = "client_stopped"
    """The client was told to stop while the agent ran."""
    CLIENT_ABORTED = "client_aborted"
    """Aborted by a client that gave no cause."""
    HEARTBEAT_LOST = "heartbeat_lost"
    """The client's heartbeats ceased."""
    CLIENT_VANISHED = "client_vanished"
    """No call for ``idle_timeout_s``, of a client without heartbeats."""
    LEASE_EXPIRED = "lease_expired"
    """Leased and never begun; uses up no attempt."""
    TENTATIVE_LAPSED = "tentative_lapsed"
    """Begun on trial and not confirmed; uses up no attempt."""
    TRANSACTION_ABORTED = "transaction_aborted"
    """Another server of its transaction could not count it."""
    AGENT_DEADLINE = "agent_deadline"
    """The client's own limit of an episode's time."""
    EPISODE_DEADLINE = "episode_deadline"
    """``dataflow.episode_deadline_s``."""
    CALL_DEADLINE = "call_deadline"
    """The agent gave up after its last model call had lasted longer than ``limits.call_s``."""
    GROUP_DEADLINE = "group_deadline"
    """Its group closed without it."""
    FEEDBACK_MISSING = "feedback_missing"
    """A collected conversation of which nobody said in time how good it was."""


OUTCOME_OF: Mapping[Cause, Outcome] = MappingProxyType(
    {
        Cause.AGENT_FINISHED: Outcome.AGENT,
        Cause.ENVIRONMENT_ERROR: Outcome.ENVIRONMENT,
        Cause.INFRASTRUCTURE_ERROR: Outcome.INFRASTRUCTURE,
        Cause.MODEL_CALL_FAILED: Outcome.INFRASTRUCTURE,
        Cause.NO_ENGINE: Outcome.INFRASTRUCTURE,
        Cause.SERVER_RESTART: Outcome.INFRASTRUCTURE,
        Cause.AGENT_RAISED: Outcome.CLIENT,
        Cause.AGENT_UNFINISHED: Outcome.CLIENT,
        Cause.CLIENT_STOPPED: Outcome.CLIENT,
        Cause.CLIENT_ABORTED: Outcome.CLIENT,
        Cause.HEARTBEAT_LOST: Outcome.CLIENT,
        Cause.CLIENT_VANISHED: Outcome.CLIENT,
        Cause.LEASE_EXPIRED: Outcome.CLIENT,
        Cause.TENTATIVE_LAPSED: Outcome.CLIENT,
        Cause.TRANSACTION_ABORTED: Outcome.CLIENT,
        Cause.AGENT_DEADLINE: Outcome.TIMEOUT,
        Cause.EPISODE_DEADLINE: Outcome.TIMEOUT,
        Cause.CALL_DEADLINE: Outcome.TIMEOUT,
        Cause.GROUP_DEADLINE: Outcome.TIMEOUT,
        Cause.FEEDBACK_MISSING: Outcome.TIMEOUT,
    }
)
UNSAID: Mapping[Outcome, Cause] = MappingProxyType(
    {
        Outcome.AGENT: Cause.AGENT_FINISHED,
        Outcome.ENVIRONMENT: Cause.ENVIRONMENT_ERROR,
        Outcome.INFRASTRUCTURE: Cause.INFRASTRUCTURE_ERROR,
        Outcome.CLIENT: Cause.CLIENT_ABORTED,
        Outcome.TIMEOUT: Cause.AGENT_DEADLINE,
    }
)
"""The cause of what a client reports by its outcome alone."""
REPORTABLE = frozenset(
    {
        Cause.ENVIRONMENT_ERROR,
        Cause.INFRASTRUCTURE_ERROR,
        Cause.AGENT_RAISED,
        Cause.AGENT_UNFINISHED,
        Cause.CLIENT_STOPPED,
        Cause.CLIENT_ABORTED,
        Cause.AGENT_DEADLINE,
    }
)
"""What the client of an attempt can know; everything else the server finds out itself."""


class Split(StrEnum):
    """Whether an episode may train (``TRAIN``) or only measures (``EVAL``)."""

    TRAIN = "train"
    EVAL = "eval"


class FinishReason(StrEnum):
    """Why generation of a turn ended."""

    STOP = "stop"
    """An end-of-turn token or a stop string was sampled."""
    LENGTH = "length"
    """``max_tokens`` or the context ran out; the text is truncated."""
    ABORT = "abort"
    """The caller went away or asked to stop."""
    ERROR = "error"
    """The engine failed on this request."""


class Provenance(StrEnum):
    """Where a token came from.  Only ``SAMPLED`` tokens train."""

    SAMPLED = "sampled"
    RENDERED = "rendered"
    FORCED = "forced"


@dataclass(frozen=True, slots=True)
class Task:
    """What to solve: ``source`` names the collection, ``id`` is unique in it."""

    source: str
    id: str
    payload: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Group:
    """The episodes of one task that share a baseline."""

    id: str
    size: int


CODE_SHOWN = 12
"""Digits of a code digest by which people know it."""


class Variant(NamedTuple):
    """A version of an agent: what its people call it, and the digest of its code; ("", "") where nobody says."""

    label: str = ""
    code: str = ""

    @property
    def name(self) -> str:
        """For metrics and tables: the label, else the beginning of the digest."""
        return self.label or self.code[:CODE_SHOWN]

    def __str__(self) -> str:
        """For messages: both, as far as they are known."""
        code = self.code[:CODE_SHOWN]
        return f"{self.label} ({code})" if self.label and code else self.label or code or "without a name"


NO_VARIANT = Variant()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How an engine draws tokens.

    Logprobs are always those of the distribution sampled from, that is after temperature, grammar,
    top-k and top-p.  ``temperature`` 0 means greedy (allowed in evaluation only; its logprobs are those of the
    untempered distribution).
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 switches top-k off."""
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    grammar: str = ""
    """What the reply must match, as llguidance's Lark dialect; "" leaves it free."""
    resumed_tokens: int = 0
    """How many of the prompt's last tokens this reply already sampled, on an engine that is gone: the
    grammar has consumed them, and they count for nothing else."""
