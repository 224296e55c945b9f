"""A request inside the engine: its tokens, its phase, its row."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from wingbeat.core.ports import GenerateRequest
from wingbeat.engines.embedded.grammar import Constraint
from wingbeat.engines.embedded.rows import Row
from wingbeat.engines.embedded.sampler import Draw


class Phase(Enum):
    """Where a request stands."""

    COMPILING = "compiling"
    """Held until its grammar is compiled."""
    WAITING = "waiting"
    """Queued, without a row."""
    RUNNING = "running"
    """Owns a row; some of its tokens are fed each step."""
    FINISHED = "finished"


class Move(Enum):
    """What happens to a request."""

    READY = "ready"
    ADMIT = "admit"
    PREEMPT = "preempt"
    FINISH = "finish"


TRANSITIONS = {
    (Phase.COMPILING, Move.READY): Phase.WAITING,
    (Phase.COMPILING, Move.FINISH): Phase.FINISHED,
    (Phase.WAITING, Move.ADMIT): Phase.RUNNING,
    (Phase.RUNNING, Move.PREEMPT): Phase.WAITING,
    (Phase.RUNNING, Move.FINISH): Phase.FINISHED,
    (Phase.WAITING, Move.FINISH): Phase.FINISHED,
}


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """``tokens`` is prompt plus sampled tokens; those beyond ``row.computed`` are still to be fed."""

    id: str
    tokens: list[int]
    prompt_tokens: int
    max_tokens: int
    cache_key: str
    stops: frozenset[int]
    draw: Draw
    phase: Phase = Phase.WAITING
    row: Row | None = field(default=None, repr=False)
    ever_admitted: bool = False
    resumed_tokens: int = 0
    """How many of the prompt's last tokens its grammar has yet to consume."""
    constraint: Constraint | None = None
    """Set once the grammar is compiled; None for requests without one."""
    adapter: str = ""
    """Whose weights sample it; "": the model's own."""

    @property
    def sampled(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def attached(self) -> Row:
        assert self.row is not None, f"request {self.id} is {self.phase.value} and has no row"
        return self.row


def apply(request: ActiveRequest, move: Move) -> None:
    """The one place where phases change."""
    phase = TRANSITIONS.get((request.phase, move))
    assert phase is not None, f"request {request.id}: {move.value} is impossible while {request.phase.value}"
    request.phase = phase


def activate(request: GenerateRequest, *, stops: frozenset[int], draw: Draw) -> ActiveRequest:
    """The engine's view of a validated request."""
    prompt = list(request.prompt_ids)
    return ActiveRequest(
        id=request.request_id,
        tokens=prompt,
        prompt_tokens=len(prompt),
        max_tokens=request.sampling.max_tokens,
        cache_key=request.cache_key,
        stops=stops,
        draw=draw,
        phase=Phase.COMPILING if request.sampling.grammar else Phase.WAITING,
        resumed_tokens=request.sampling.resumed_tokens,
        adapter=request.adapter,
    )
