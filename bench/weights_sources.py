"""Versions of weights to encode: synthetic ones of a chosen density, and those that real training publishes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from bench.calculator_training import POLICY, Played, Player, TaskStream
from wingbeat.core.config import PolicyConfig
from wingbeat.core.samples import EpisodeSamples, TrainingBatch
from wingbeat.engines.embedded import EngineOptions
from wingbeat.environments.calculator import CalculatorTask, make_split
from wingbeat.trainer.single import PolicyTrainer

Versions = Iterator[Mapping[str, Tensor]]
ADAM_STEPS = 30
"""After these the moments of noise have settled."""
SEARCH_STEPS = 24
SAMPLE = 2**20
"""Elements that the search for a density looks at."""


def synthetic_update(density: float, *, elements: int, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One bfloat16 tensor of Gaussian weights before and after an update that changes this share of its elements.

    The update is Adam's on gradients that are noise; the learning rate is searched.
    """
    generator = torch.Generator().manual_seed(seed)
    masters = torch.randn(elements, generator=generator) * 0.02
    direction = adam_direction(elements, generator=generator)
    low, high = 1e-10, 1.0
    for _ in range(SEARCH_STEPS):
        rate = (low * high) ** 0.5
        part = masters[:SAMPLE]
        moved = (part.bfloat16() != (part - rate * direction[:SAMPLE]).bfloat16()).float().mean()
        low, high = (rate, high) if float(moved) < density else (low, rate)
    return {"weight": masters.bfloat16()}, {"weight": (masters - high * direction).bfloat16()}


def adam_direction(elements: int, *, generator: torch.Generator, betas: tuple[float, float] = (0.9, 0.95)) -> Tensor:
    """Adam's normalised step for independent Gaussian gradients, bias-corrected."""
    first, second = torch.zeros(elements), torch.zeros(elements)
    for _ in range(ADAM_STEPS):
        gradient = torch.randn(elements, generator=generator)
        first.lerp_(gradient, 1 - betas[0])
        second.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    return (first / (1 - betas[0] ** ADAM_STEPS)) / (second / (1 - betas[1] ** ADAM_STEPS)).sqrt()


@dataclass(frozen=True, slots=True)
class RealRun:
    """Reinforcement learning in one process: the embedded engine and the trainer, both in bfloat16."""

    updates: int
    learning_rate: float
    groups_per_step: int = 2
    group_size: int = 4
    is_calculator: bool = False
    """The demo's agent, tool and reward; otherwise one reply to the question, scored by its share of digits, which
    even a model that was never taught the task earns in part."""

    def versions(self, folder: Path, *, rewards: list[float], seed: int = 0) -> Versions:
        """What the trainer publishes: the model as it was, and after each update; mean rewards are appended."""
        settings: Any = {"learning_rate": self.learning_rate, "algorithm": "rloo"}
        config = PolicyConfig(model=str(folder), context_tokens=512, trainer=settings)
        trainer = PolicyTrainer(
            folder, config=config, total_steps=self.updates, seed=seed, device="cpu", dtype=torch.bfloat16
        )
        player = (Player if self.is_calculator else DigitsPlayer)(
            folder, trainer.model, seed=seed, options=EngineOptions(max_running=16, kv_tokens=4096)
        )
        yield published(trainer)
        dealer = TaskStream(make_split(seed)[0], seed=seed)
        for step in range(1, self.updates + 1):
            tasks = [dealer.next() for _ in range(self.groups_per_step)]
            episodes = player.play([task for task in tasks for _ in range(self.group_size)])
            rewards.append(fmean(episode.reward for episode in episodes))
            samples = self._samples(episodes, step=step)
            trainer.train_step(TrainingBatch(f"{POLICY}-{step}", POLICY, step, samples, seed=step))
            player.update(trainer)
            yield published(trainer)

    def _samples(self, episodes: Sequence[Played], *, step: int) -> tuple[EpisodeSamples, ...]:
        return tuple(
            episode.samples(group=index // self.group_size, member=index % self.group_size, step=step)
            for index, episode in enumerate(episodes)
        )


class DigitsPlayer(Player):
    """One reply to each question, scored by the share of digits in it."""

    def _ended(self, episode: Played) -> bool:
        text = str(self.tokenizer.decode(episode.token_ids[episode.turn_starts[-1] :], skip_special_tokens=True))
        episode.reward = sum(character.isdigit() for character in text) / max(1, len(text))
        return True

    def _question(self, task: CalculatorTask) -> list[int]:
        """As plain text, for models without a chat template."""
        return list(self.tokenizer(f"{task.question}\n")["input_ids"])


def published(trainer: PolicyTrainer) -> dict[str, Tensor]:
    """A copy of the version's tensors."""
    return {name: tensor.cpu().clone() for name, tensor in trainer.published_tensors().items()}
