"""A trainer worker that is played a script, and the steps in it."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from wingbeat.core.samples import EpisodeSamples, TrainingBatch, TrainingSample
from wingbeat.core.weight_protocol import Published
from wingbeat.core.worker_protocol import PolicySpec, Shutdown, TrainerReady, TrainStep, Welcome, WorkerMessage
from wingbeat.workers.link import Connected, Inbound
from wingbeat.workers.trainer import TrainerWorker

Turn = list[Inbound] | Inbound | Callable[[], list[Inbound] | Inbound]


def training_step(policy: str, step: int, *, lineage: int = 0, empty: bool = False) -> TrainStep:
    """Two episodes of a group, of rewards 0 and 1; ``empty`` has none, and cannot be trained."""
    rng = np.random.default_rng(step)
    episodes: list[EpisodeSamples] = []
    for member in range(0 if empty else 2):
        sample = TrainingSample.build(
            f"{step}-{member}",
            token_ids=rng.integers(0, 96, 6).astype(np.int32),
            sampled=np.array([0, 0, 1, 1, 1, 1], np.uint8),
            sampling_logprobs=np.array([0, 0, -4, -4, -4, -4], np.float32),
            versions=np.array([-1, -1, *[step - 1] * 4], np.int32),
        )
        episodes.append(EpisodeSamples(f"{step}-{member}", 1, f"g{step}", policy, "", float(member), (sample,)))
    name = f"{policy}-{lineage}.{step}" if lineage else f"{policy}-{step}"
    return TrainStep(TrainingBatch(name, policy, step, tuple(episodes), seed=step, lineage=lineage))


class Driver:
    """Plays a script to a worker of a run, one entry per time that it listens and publishes nothing."""

    def __init__(self, run_dir: Path, *specs: PolicySpec) -> None:
        self.sent: list[WorkerMessage] = []
        self.slept: list[float] = []
        self.on_sleep: Callable[[], None] = lambda: None
        self.own: queue.SimpleQueue[Inbound] = queue.SimpleQueue()
        """What the worker tells itself."""
        self.worker = TrainerWorker(
            "host", lambda *messages: self.sent.extend(messages), self.own.put, sleep=self._sleep
        )
        self.welcome = Connected(Welcome("trainer", 1.0, specs, str(run_dir), seed=1, total_steps=10))

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.on_sleep()

    def play(self, *script: Turn) -> None:
        turns = iter([self.welcome, *script, Shutdown()])

        def receive(*, block: bool) -> list[Inbound]:
            if self.is_publishing:
                return [self.own.get(timeout=20)] if block else []
            turn = next(turns) if block else []
            turn = turn() if callable(turn) else turn
            return turn if isinstance(turn, list) else [turn]

        self.worker.run(receive)

    @property
    def is_publishing(self) -> bool:
        return not self.own.empty() or any(hosted.publishing.is_busy for hosted in self.worker._hosted.values())

    def published(self, *steps: int) -> list[Published]:
        return [message for message in self.of(Published) if message.step in steps]

    def files(self) -> list[Path]:
        """The weights that are there."""
        return sorted(Path(self.of(TrainerReady)[0].manifest.path).parent.iterdir())

    def of(self, kind: type, policy: str | None = None) -> list[Any]:
        """What it sent, of one policy or of all."""
        found = [message for message in self.sent if isinstance(message, kind)]
        return [message for message in found if policy in (None, getattr(message, "policy", None))]
