"""A conversation with feedback is a group of one: whether it may train, and into which buffers it goes.

It was sampled without asking any staleness gate, since nobody knows when feedback comes.  So it asks when it is
ready: it joins a policy's buffer only if that policy can train it in time together with all that runs and waits,
and never holds anything back (:mod:`wingbeat.dataflow.staleness`, rule A).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from wingbeat.core.types import Split
from wingbeat.dataflow.aging import attempt_key, drop_over_age, mask_over_age
from wingbeat.dataflow.ledger import Ledger
from wingbeat.dataflow.operators import ChainOutcome
from wingbeat.dataflow.records import ClosedGroup, Dropped, DropReason, ReadyGroup
from wingbeat.server.policies.host import PolicyHost

RECORDED = "recorded"
TRAINED = "trained"
FILTERED = "filtered"


@dataclass(frozen=True, slots=True)
class Settled:
    """What became of a conversation with feedback."""

    result: str
    """``trained`` (it waits in a buffer), ``recorded`` (it must not train), or why it does not train."""
    warning: str = ""
    """For whoever gave the feedback."""
    policies: tuple[str, ...] = ()
    """That train it."""


class CollectedGroups:
    """Runs on control's event loop."""

    def __init__(
        self, policies: Mapping[str, PolicyHost], ledger: Ledger, *, watch: Callable[[Future[Any]], None]
    ) -> None:
        self._policies = policies
        self._ledger = ledger
        self._watch = watch

    def settle(self, group: ClosedGroup) -> Settled:
        """Through each policy's operators into its buffer, where it may; and close it in the ledger."""
        faults: dict[str, tuple[str, str]] = {}
        outcomes: dict[str, ChainOutcome] = {}
        trained: list[str] = []
        for host in self._policies.values() if group.spec.split is Split.TRAIN else ():
            ready = group.ready(host.name) if host.config.trainable else None
            if ready is None:
                continue
            fault = self._take(host, ready, outcomes)
            if fault is None:
                trained.append(host.name)
            else:
                faults[host.name] = fault
        reason = None if trained or not faults else "; ".join(sorted({name for name, _ in faults.values()}))
        self._watch(
            self._ledger.close_group(
                group.spec.id,
                reason=reason,
                dropped={name: outcome.dropped for name, outcome in outcomes.items()},
                shaping=[shaping for outcome in outcomes.values() for shaping in outcome.shaping],
                operators={name: state for name in outcomes if (state := self._policies[name].chain.state_dict())},
            )
        )
        told = {name: text for name, (_, text) in faults.items()}
        told |= {name: text for name in trained if (text := _waits(self._policies[name]))}
        warning = "; ".join(f"policy {name!r}: {text}" for name, text in told.items())
        if trained:
            return Settled(TRAINED, warning, tuple(trained))
        if faults:
            return Settled(next(iter(faults.values()))[0], f"recorded, and trains nothing: {warning}")
        if group.spec.split is Split.TRAIN:
            return Settled(
                DropReason.NO_TOKENS, "recorded, and trains nothing: no token of it can train (docs/howto/passive.md)"
            )
        return Settled(RECORDED)

    def _take(self, host: PolicyHost, ready: ReadyGroup, outcomes: dict[str, ChainOutcome]) -> tuple[str, str] | None:
        """Give a policy its part; else why not, as a word and in words."""
        part, fault = self._fitting(host, ready)
        if part is None:
            outcomes[host.name] = ChainOutcome(None, _all(ready, fault[0]))
            host.buffer.count_dropped(ready, outcomes[host.name].dropped)
            return fault
        outcome = outcomes[host.name] = host.chain.on_group(part)
        host.buffer.count_dropped(ready, outcome.dropped)
        if outcome.group is None:
            return FILTERED, "an operator dropped it: " + ", ".join(sorted({one.reason for one in outcome.dropped}))
        if not host.halted:  # else the ledger keeps it for the run's continuation
            host.buffer.add(outcome.group)
        return None

    def _fitting(self, host: PolicyHost, ready: ReadyGroup) -> tuple[ReadyGroup | None, tuple[str, str]]:
        """What of it the policy can still train; None with the reason where that is nothing."""
        trainer, gate = host.config.trainer, host.rule.gate
        if not trainer.learns_from_groups_of_one:
            return None, (
                DropReason.NO_BASELINE,
                f"its algorithm, {trainer.algorithm}, compares the episodes of a group, and a conversation has no"
                " others: use reinforce, reinforce_plus_plus, ppo or sft",
            )
        if not any(member.num_sampled for member in ready.members):
            return None, (DropReason.NO_TOKENS, "no token of it can train (greedy ones, for one, cannot)")
        version = host.version + host.in_step
        age = drop_over_age if host.rule.straggler == "drop" else mask_over_age
        left = age(ready, version=version, max_staleness=gate.max_staleness).group
        floors = [floor for m in left.members if (floor := m.min_version) is not None] if left is not None else []
        if left is None or not floors:
            return None, (
                DropReason.STALE,
                f"it was sampled by version {ready.floor_version} and is too old for version {version + 1}"
                f" (dataflow.max_staleness = {gate.max_staleness})",
            )
        running = [*host.running_floors(), *host.buffer.floors()]
        if not host.complete and not gate.may_admit(running, version=version, floor=min(floors)):
            return None, (
                DropReason.STALE,
                f"it was sampled by version {min(floors)}, and what waits before it fills the steps until it is too"
                f" old (dataflow.max_staleness = {gate.max_staleness})",
            )
        return replace(left, floor_version=min(floors)), ("", "")


def _waits(host: PolicyHost) -> str:
    """Why what a policy took waits for more than its turn, or ""."""
    if host.halted:
        return f"recorded, and waits for the run to go on: {host.halted}"
    return "recorded, and waits for the run to go on: its steps (run.steps) are done" if host.complete else ""


def _all(ready: ReadyGroup, reason: str) -> tuple[Dropped, ...]:
    return tuple(Dropped(*key, reason) for key in dict.fromkeys(attempt_key(member) for member in ready.members))
