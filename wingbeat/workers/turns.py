"""What came for a worker that hosts several policies, and whose turn it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from wingbeat.core.worker_protocol import TrainStep
from wingbeat.workers.link import Inbound


class FairInbox:
    """Messages in the order they came, but policies by turns.

    Many steps of one policy may wait (a replay): another policy's step is taken after the next of them, not after the
    last.  Messages of one policy keep their order, and none overtakes a message that is of no policy, or is overtaken
    by one.
    """

    def __init__(self) -> None:
        self._waiting: list[Inbound] = []
        self._served: dict[str, int] = {}
        """By policy, when it had its last turn."""
        self._turn = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __iter__(self) -> Iterator[Inbound]:
        return iter(tuple(self._waiting))

    def extend(self, messages: Iterable[Inbound]) -> None:
        self._waiting.extend(messages)

    def remove(self, message: Inbound) -> None:
        """Take this one out, before its turn.  Raises ValueError where it does not wait."""
        self._waiting.remove(message)

    def take(self) -> Inbound:
        """The next message: the first of the policy that has waited longest for a turn."""
        best: tuple[int, int, str] | None = None
        for place, message in enumerate(self._waiting):
            policy = policy_of(message)
            if policy is None:
                break
            served = self._served.get(policy, 0)
            if best is None or served < best[0]:
                best = (served, place, policy)
        if best is None:
            return self._waiting.pop(0)
        self._turn += 1
        self._served[best[2]] = self._turn
        return self._waiting.pop(best[1])


def policy_of(message: Inbound) -> str | None:
    """The policy that a message is about, if it is about one."""
    if isinstance(message, TrainStep):
        return message.batch.policy
    return getattr(message, "policy", None)
