"""The agent of environments that ask one question: put it, score the answer."""

from __future__ import annotations

from wingbeat.client import Episode
from wingbeat.core.types import Task
from wingbeat.environments.asking import Message, OutOfContext, ask


class SingleTurn:
    """A base class: ``play`` asks ``payload["question"]`` in one turn, and scores the whole reply.

    A subclass has ``score``; it may change what is asked (:meth:`messages`) and how long a reply may be.
    """

    max_tokens: int | None = None
    """Of a reply; None: what the policy allows."""

    def messages(self, task: Task) -> list[Message]:
        """What the policy is asked."""
        return [{"role": "user", "content": str(task.payload["question"])}]

    def score(self, task: Task, answer: str) -> float:
        """The reward of a reply; a subclass says."""
        raise TypeError(f"{type(self).__name__} has no score(task, answer)")

    async def play(self, episode: Episode) -> float:
        """Ask once; a question that is longer than the policy's context scores as an empty answer."""
        try:
            reply = await ask(episode, self.messages(episode.task), max_tokens=self.max_tokens)
        except OutOfContext:
            return self.score(episode.task, "")
        return self.score(episode.task, reply.content or "")
