"""The client's part in a two-phase commit: what to tell which server next.  Pure; ``team_commit.py`` does it.

::

    PREPARING ──all yes──▶ COMMITTING ──the decider committed──▶ TELLING ──all told──▶ DONE
        │                      ╲
        └──a no──▶ ABORTING ◀───╲── the decider had aborted meanwhile

The first server decides.  It prepares before the others do, so that whoever waits for it can be told; and nobody
hears "commit" before it has made that durable.  Who dies in ABORTING or PREPARING never says "commit" again,
so its successor aborts; who dies after that says it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum


class Verb(Enum):
    """What a server is told."""

    PREPARE = "prepare"
    COMMIT = "commit"
    ABORT = "abort"


class Phase(Enum):
    """Where the client stands."""

    PREPARING = "preparing"
    COMMITTING = "committing"
    """Everybody has prepared; the decider's word is asked for, and from here on it alone counts."""
    TELLING = "telling"
    """The decider has committed: the episode counts."""
    ABORTING = "aborting"
    DONE = "done"


class Answer(Enum):
    """What a server said."""

    DONE = "done"
    REFUSED = "refused"
    """To prepare: no.  To a decision: it stands otherwise here, for good."""


TRANSITIONS: Mapping[tuple[Phase, Answer], Phase] = {
    (Phase.PREPARING, Answer.DONE): Phase.COMMITTING,
    (Phase.PREPARING, Answer.REFUSED): Phase.ABORTING,
    (Phase.COMMITTING, Answer.DONE): Phase.TELLING,
    (Phase.COMMITTING, Answer.REFUSED): Phase.ABORTING,
    (Phase.TELLING, Answer.DONE): Phase.DONE,
    (Phase.ABORTING, Answer.DONE): Phase.DONE,
}
"""By the last answer of a phase (REFUSED ends PREPARING at once)."""

VERBS: Mapping[Phase, Verb] = {
    Phase.PREPARING: Verb.PREPARE,
    Phase.COMMITTING: Verb.COMMIT,
    Phase.TELLING: Verb.COMMIT,
    Phase.ABORTING: Verb.ABORT,
}


@dataclass(frozen=True, slots=True)
class Coordinator:
    """One transaction."""

    servers: tuple[str, ...]
    """The decider first."""
    phase: Phase = Phase.PREPARING
    heard: frozenset[str] = frozenset()
    """Servers that have answered in this phase."""
    committed: bool = False
    contrary: frozenset[str] = frozenset()
    """Servers that stand otherwise than was decided: somebody had told them so."""

    @property
    def decider(self) -> str:
        return self.servers[0]

    def todo(self) -> tuple[tuple[str, Verb], ...]:
        """Whom to tell what now, all at once."""
        if self.phase is Phase.DONE:
            return ()
        if self.phase is Phase.COMMITTING or (self.phase is Phase.PREPARING and not self.heard):
            whom: tuple[str, ...] = (self.decider,)
        else:
            whom = self.servers
        return tuple((server, VERBS[self.phase]) for server in whom if server not in self.heard)

    def after(self, server: str, answer: Answer) -> Coordinator:
        """What a server answered to what :meth:`todo` said."""
        if (server, VERBS.get(self.phase)) not in self.todo():
            raise ValueError(f"{server!r} was not asked anything in {self.phase.value}")
        now = replace(self, heard=self.heard | {server})
        if self.phase is Phase.PREPARING and answer is Answer.REFUSED:
            return now._enter(Phase.ABORTING)
        if self.phase is Phase.COMMITTING:
            return replace(now, committed=answer is Answer.DONE)._enter(TRANSITIONS[self.phase, answer])
        if answer is Answer.REFUSED:
            now = replace(now, contrary=now.contrary | {server})
        if now.heard >= set(self.servers):
            return now._enter(TRANSITIONS[self.phase, Answer.DONE])
        return now

    def _enter(self, phase: Phase) -> Coordinator:
        """The decider needs not be told again what it decided itself."""
        heard = frozenset({self.decider}) if phase is Phase.TELLING else frozenset[str]()
        entered = replace(self, phase=phase, heard=heard)
        return replace(entered, phase=Phase.DONE) if heard >= set(self.servers) else entered

    @classmethod
    def resumed(cls, servers: tuple[str, ...], *, was_committing: bool) -> Coordinator:
        """The successor of a client that died."""
        return cls(servers, phase=Phase.COMMITTING if was_committing else Phase.ABORTING)
