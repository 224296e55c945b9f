"""The operators of one policy in the order of the configuration.

The chain runs each closed group through them once, keeps the books, and lets no operator harm the run:
one that raises, or decides what does not fit, is left out from then on (or training stops, by its
``on_error``) and the group goes on as that operator got it.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from wingbeat.core.samples import TrainingBatch
from wingbeat.core.types import Task
from wingbeat.dataflow.aging import AttemptKey
from wingbeat.dataflow.operators.base import Operator, OperatorFault
from wingbeat.dataflow.operators.decisions import Applied, apply_operator, view_group
from wingbeat.dataflow.operators.past import PastGroups
from wingbeat.dataflow.operators.views import BatchView, view_episodes
from wingbeat.dataflow.records import Dropped, ReadyGroup, Shaping

if TYPE_CHECKING:
    from wingbeat.dataflow.buffer import BatchDraft

logger = logging.getLogger(__name__)

SHOWN_AFTER = 5
"""Groups dropped whole in a row, from which on people should know."""
MAX_REFUSALS = 256
"""Tasks refused in a row, after which one is issued: no curriculum may starve the run."""

ResultT = TypeVar("ResultT")
OnError = Literal["quarantine", "stop"]


@dataclass(frozen=True, slots=True)
class Fault:
    """An operator failed."""

    policy: str
    operator: str
    hook: str
    error: str
    stops: bool
    """Training of the policy must end; else the operator is left out from now on."""

    @property
    def text(self) -> str:
        then = "training stopped" if self.stops else "it is left out from now on"
        return f"operator {self.operator!r} of {self.policy!r} failed in {self.hook}: {self.error}; {then}"


@dataclass(frozen=True, slots=True)
class ChainOutcome:
    """A closed group after all operators."""

    group: ReadyGroup | None
    """None where nobody stays: it does not count for a batch."""
    dropped: tuple[Dropped, ...] = ()

    @property
    def shaping(self) -> tuple[Shaping, ...]:
        """What was added to the rewards of those who stay, for the ledger."""
        members = self.group.members if self.group is not None else ()
        return tuple(Shaping(m.episode_id, m.attempt, m.policy, m.agent, m.shaping) for m in members if m.shaping)


@dataclass(slots=True)
class Counts:
    """What an operator did so far, over restarts."""

    dropped: int = 0
    """Episodes."""
    dropped_tokens: int = 0
    shaped: int = 0
    """Episodes."""
    refused: int = 0
    """Tasks."""
    replayed: int = 0
    """Episodes added to batches."""


@dataclass(slots=True)
class Link:
    """One operator in a chain."""

    label: str
    operator: Operator[Any]
    on_error: OnError = "quarantine"
    fingerprint: str = ""
    """Of its code and options: a quarantine ends when they change."""
    counts: Counts = field(default_factory=Counts)
    error: str = ""
    """Set where it failed and is left out."""
    saved: str = ""
    """Its state when it last could tell it: what it goes on from once it is repaired."""


class OperatorChain:
    """Runs on control's event loop; deterministic, given the seed and the order of the calls."""

    def __init__(
        self,
        policy: str,
        links: Sequence[Link] = (),
        *,
        max_staleness: int = 0,
        on_fault: Callable[[Fault], None] = lambda fault: None,
    ) -> None:
        self.policy = policy
        self.stopped = ""
        """Why training must stop, where an operator with ``on_error = "stop"`` failed."""
        self._links = tuple(links)
        self._on_fault = on_fault
        self._version = 0
        self._refusals = 0
        self._lost_in_a_row = 0
        self._last_reasons = ""
        self._past = PastGroups(max_staleness=max_staleness)
        self._composes = any(_overrides(link.operator, "compose") for link in links)

    @property
    def quarantined(self) -> tuple[str, ...]:
        """Operators that failed and are left out."""
        return tuple(link.label for link in self._links if link.error)

    @property
    def warnings(self) -> list[str]:
        """What people should know of operators that failed, though training goes on."""
        return [self._fault(link).text for link in self._links if link.error and link.on_error != "stop"]

    @property
    def blocker(self) -> str:
        """What people should know when nothing is left to train, or ""."""
        if self._lost_in_a_row < SHOWN_AFTER:
            return ""
        return (
            f"operators dropped every episode of the last {self._lost_in_a_row} groups of {self.policy!r}"
            f" ({self._last_reasons})"
        )

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(link.label for link in self._links)

    # --- tasks and groups ---------------------------------------------------------------------

    def should_issue(self, task: Task) -> bool:
        """Whether the curricula let a new group start on this task."""
        for link in self._links:
            if not self._call(link, "should_issue", partial(_wants, link.operator, task), True):
                if self._refusals >= MAX_REFUSALS:
                    break
                link.counts.refused += 1
                self._refusals += 1
                return False
        self._refusals = 0
        return True

    def on_group(self, group: ReadyGroup) -> ChainOutcome:
        """Run a closed group through the operators; call it once for each group."""
        if not self._links:
            return ChainOutcome(group)
        shown = replace(group, task=deepcopy(group.task))
        whole = view_group(shown, version=self._version)
        for link in self._links:
            self._call(link, "observe", partial(link.operator.observe, whole), None)
        dropped: list[Dropped] = []
        for link in self._links:
            applied = self._call(link, "on_group", partial(self._apply, link, shown), Applied(shown))
            dropped += applied.dropped
            link.counts.dropped += len(applied.dropped)
            link.counts.dropped_tokens += applied.dropped_tokens
            link.counts.shaped += applied.num_shaped
            if applied.group is None:
                self._lost_in_a_row += 1
                self._last_reasons = ", ".join(sorted({one.reason for one in dropped}))
                return ChainOutcome(None, tuple(dropped))
            shown = applied.group
        self._lost_in_a_row = 0
        return ChainOutcome(replace(shown, task=group.task), tuple(dropped))

    def _apply(self, link: Link, group: ReadyGroup) -> Applied:
        return apply_operator(link.operator, group, version=self._version, label=link.label)

    def on_version(self, version: int) -> None:
        """The policy reached a version; those that were missed come first, so that no operator skips one.

        A lower version than before (a rollback) is noted and not announced.
        """
        for reached in range(self._version + 1, version + 1):
            for link in self._links:
                self._call(link, "on_version", partial(link.operator.on_version, reached), None)
        self._version = version

    # --- batches ------------------------------------------------------------------------------

    def compose(self, draft: BatchDraft, *, version: int) -> BatchDraft:
        """Add past groups to a batch that will be logged and trained next."""
        if not self._composes:
            return draft
        for link in self._links:
            draft = self._call(link, "compose", partial(self._add, link, draft, version), draft)
        self._past.note(version + 1, draft.episodes, replayed=draft.replayed)
        return draft

    def _add(self, link: Link, draft: BatchDraft, version: int) -> BatchDraft:
        past = self._past.eligible(version, excluded=draft.episodes)
        view = BatchView(self.policy, version, view_episodes(draft.episodes), tuple(past.values()))
        chosen = list(link.operator.compose(view))
        unknown = [group_id for group_id in chosen if group_id not in past]
        if unknown or len(set(chosen)) < len(chosen):
            raise OperatorFault(f"compose must name groups out of `batch.past`, each once; got {chosen}")
        added = tuple(member for group_id in chosen for member in self._past.members(group_id))
        keys = tuple(dict.fromkeys((member.episode_id, member.attempt) for member in added))
        link.counts.replayed += len(keys)
        return replace(draft, episodes=(*draft.episodes, *added), replayed=(*draft.replayed, *keys))

    def recall(self, batches: Sequence[TrainingBatch], *, erased: Collection[AttemptKey] = ()) -> None:
        """Rebuild what may be trained again from the logged batches of the lineage, in their order.

        Call it after a restart and after a rollback; those of the last ``max_staleness`` steps do.  ``erased``:
        attempts that must not train again.
        """
        if self._composes:
            self._past.rebuild(batches, erased=erased)

    def forget(self, group_id: str) -> None:
        """A group must not train again; harmless where nothing of it is known."""
        self._past.forget(group_id)

    # --- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that must outlive this process, as JSON data; save it with each group that closes."""
        if not self._links:
            return {}
        return {
            "version": self._version,
            "refusals": self._refusals,
            "operators": {link.label: self._link_state(link) for link in self._links},
        }

    def _link_state(self, link: Link) -> dict[str, Any]:
        link.saved = self._call(link, "state_dict", partial(_dump_state, link.operator), link.saved)
        counts = link.counts
        return {
            "state": link.saved,
            "counts": [counts.dropped, counts.dropped_tokens, counts.shaped, counts.refused, counts.replayed],
            **({"error": link.error, "fingerprint": link.fingerprint} if link.error else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; operators that it does not know begin anew, others' is ignored.

        One that had failed stays out until its code or options change, and then goes on from its last good state.
        """
        self._version = int(state.get("version", 0))
        self._refusals = int(state.get("refusals", 0))
        saved: Mapping[str, Mapping[str, Any]] = state.get("operators", {})
        for link in self._links:
            own = saved.get(link.label)
            if own is None:
                continue
            link.counts, link.saved = Counts(*own["counts"]), own["state"]
            if own.get("error") and own.get("fingerprint") == link.fingerprint:
                hook, _, said = own["error"].partition(": ")
                self._fail(link, hook, said)
            elif own["state"]:
                self._call(link, "load_state_dict", partial(_load_state, link.operator, own["state"]), None)

    def metrics(self) -> dict[str, float]:
        """What each operator did, and what it tells of itself."""
        found: dict[str, float] = {}
        for link in self._links:
            name = f"operator/{link.label}"
            own = self._call(link, "metrics", partial(_own_metrics, link.operator), {})
            for key, value in {**_counted(link), **own, "quarantined": float(bool(link.error))}.items():
                found[f"{name}/{key}"] = value
        return found

    # --- faults -------------------------------------------------------------------------------

    def _call(self, link: Link, hook: str, call: Callable[[], ResultT], otherwise: ResultT) -> ResultT:
        """What an operator answers, or ``otherwise`` where it fails or has failed before."""
        if link.error:
            return otherwise
        try:
            return call()
        except Exception as error:  # code of users': no failure of it may end control
            logger.warning("operator %s of %s failed in %s", link.label, self.policy, hook, exc_info=True)
            said = error.message if isinstance(error, OperatorFault) else f"{type(error).__name__}: {error}"
            self._fail(link, hook, said)
            return otherwise

    def _fail(self, link: Link, hook: str, said: str) -> None:
        link.error = f"{hook}: {said}"
        fault = self._fault(link)
        if fault.stops and not self.stopped:
            self.stopped = fault.text
        self._on_fault(fault)

    def _fault(self, link: Link) -> Fault:
        hook, _, said = link.error.partition(": ")
        return Fault(self.policy, link.label, hook, error=said, stops=link.on_error == "stop")


def _wants(operator: Operator[Any], task: Task) -> bool:
    answer: object = operator.should_issue(deepcopy(task))
    if answer is not True and answer is not False:
        raise OperatorFault(f"should_issue must return true or false, got {answer!r}")
    return answer


def _counted(link: Link) -> dict[str, float]:
    """The counts that this kind of operator can have."""
    operator, counts = link.operator, link.counts
    found: dict[str, float] = {}
    if _overrides(operator, "on_episode") or _overrides(operator, "on_group"):
        found |= {"dropped": counts.dropped, "dropped_tokens": counts.dropped_tokens, "shaped": counts.shaped}
    if _overrides(operator, "should_issue"):
        found["refused"] = counts.refused
    if _overrides(operator, "compose"):
        found["replayed"] = counts.replayed
    return {name: float(value) for name, value in found.items()}


def _overrides(operator: Operator[Any], method: str) -> bool:
    return getattr(type(operator), method) is not getattr(Operator, method)


def _dump_state(operator: Operator[Any]) -> str:
    state = operator.state_dict()
    text = msgspec.json.encode(state).decode()
    if "null" in text:  # what it makes of NaN, too
        json.dumps(state, allow_nan=False)
    return text


def _load_state(operator: Operator[Any], text: str) -> None:
    operator.load_state_dict(json.loads(text))


def _own_metrics(operator: Operator[Any]) -> dict[str, float]:
    found = {str(name): float(value) for name, value in operator.metrics().items()}
    wrong = [name for name, value in found.items() if not math.isfinite(value)]
    if wrong:
        raise OperatorFault(f"metrics must be finite numbers, got {found[wrong[0]]} for {wrong[0]!r}")
    return found
