"""Trains the calculator's model in one process: the real engine and the real trainer, no HTTP between.

    tasks ─▶ engine: call, tool result, answer ─▶ groups of episodes ─▶ trainer ─▶ weights ─▶ engine

What is left out against a server is all that the algorithms do not see; the agent's loop is that of ``wingbeat demo``.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from wingbeat.core.config import PolicyConfig
from wingbeat.core.ports import GenerateRequest
from wingbeat.core.samples import EpisodeSamples, TrainingBatch, TrainingSample, TurnCredit
from wingbeat.core.types import SamplingParams
from wingbeat.engines.embedded import EmbeddedEngine, EngineOptions
from wingbeat.environments.calculator import DEMO_PRESET, CalculatorTask, make_split, score
from wingbeat.environments.calculator.rollouts import encode, observe, parse_call, render_ids
from wingbeat.trainer.single import PolicyTrainer

POLICY = "solver"
CONTEXT_TOKENS = 128
SAMPLING = SamplingParams(max_tokens=DEMO_PRESET.max_turn_tokens)
OPTIONS = EngineOptions(max_running=512, kv_tokens=65536)


class Played:
    """One episode's tokens, with what is known of each."""

    def __init__(self, task: CalculatorTask, prompt_ids: Sequence[int]) -> None:
        self.task = task
        self.token_ids: list[int] = []
        self.sampled: list[bool] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.turn_starts: list[int] = []
        self.reward = 0.0
        self.render(prompt_ids)

    def render(self, token_ids: Sequence[int]) -> None:
        """Tokens that nobody sampled: a question, a tool's result."""
        count = len(token_ids)
        self.token_ids += token_ids
        self.sampled += [False] * count
        self.logprobs += [0.0] * count
        self.versions += [-1] * count

    def begin_turn(self) -> None:
        """What is sampled from now on is a reply of its own."""
        self.turn_starts.append(len(self.token_ids))

    def sample(self, token_ids: Sequence[int], logprobs: Sequence[float], *, version: int) -> None:
        """More tokens of the turn that has begun."""
        self.token_ids += token_ids
        self.sampled += [True] * len(token_ids)
        self.logprobs += logprobs
        self.versions += [version] * len(token_ids)

    def samples(self, *, group: int, member: int, step: int) -> EpisodeSamples:
        """As a server would hand them to the trainer."""
        episode_id = f"{step}-{group}-{member}"
        turn_ids = tuple(f"{episode_id}-{index}" for index in range(len(self.turn_starts)))
        sample = TrainingSample.build(
            episode_id,
            token_ids=np.array(self.token_ids, np.int32),
            sampled=np.array(self.sampled, np.uint8),
            sampling_logprobs=np.array(self.logprobs, np.float32),
            versions=np.array(self.versions, np.int32),
            turn_ids=turn_ids,
            turn_starts=tuple(self.turn_starts),
        )
        parents = ("", *turn_ids[:-1])
        return EpisodeSamples(
            episode_id,
            1,
            f"{step}-{group}",
            POLICY,
            "",
            self.reward,
            (sample,),
            turns=tuple(TurnCredit(turn_id, parent) for turn_id, parent in zip(turn_ids, parents, strict=True)),
        )


class Player:
    """Plays episodes with an engine, all at once."""

    def __init__(self, folder: Path, model: Any, *, seed: int, options: EngineOptions = OPTIONS) -> None:
        """``model`` stays the caller's: the engine gets a copy."""
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._engine = EmbeddedEngine(
            copy.deepcopy(model),
            config=options,
            stop_token_ids=(int(self.tokenizer.eos_token_id),),
            device="cpu",
            seed=seed,
        )
        self._serial = 0

    def update(self, trainer: PolicyTrainer) -> None:
        """Sample with the trainer's weights from now on."""
        self._engine.update_weights(trainer.published_tensors(), policy_version=trainer.step)

    def play(self, tasks: Sequence[CalculatorTask]) -> list[Played]:
        """One episode of each task: a call of the tool and an answer, or an answer at once."""
        episodes = [Played(task, self._question(task)) for task in tasks]
        active = {self._submit(episode): episode for episode in episodes}
        while active:
            for event in self._engine.step():
                if event.error:
                    raise RuntimeError(event.error)
                episode = active[event.request_id]
                episode.sample(event.token_ids, event.logprobs, version=event.policy_version)
                if event.finish_reason is not None:
                    del active[event.request_id]
                    if not self._ended(episode):
                        active[self._submit(episode)] = episode
        return episodes

    def _question(self, task: CalculatorTask) -> list[int]:
        return render_ids(self.tokenizer, [{"role": "user", "content": task.question}], add_generation_prompt=True)

    def _submit(self, episode: Played) -> str:
        self._serial += 1
        request_id = str(self._serial)
        episode.begin_turn()
        self._engine.submit(GenerateRequest(request_id, tuple(episode.token_ids), SAMPLING))
        return request_id

    def _ended(self, episode: Played) -> bool:
        """Answer a tool call, or score the episode."""
        text = str(self.tokenizer.decode(episode.token_ids[episode.turn_starts[-1] :], skip_special_tokens=True))
        expression = parse_call(text)
        if expression is None:
            episode.reward = score(episode.task, text)
            return True
        if len(episode.turn_starts) == DEMO_PRESET.max_turns:
            return True
        body = f"<|im_start|>tool\n<tool_response>{observe(expression)}</tool_response><|im_end|>"
        episode.render(encode(self.tokenizer, f"\n{body}\n<|im_start|>assistant\n"))
        return False


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one algorithm is run; what differs between algorithms is in its trainer settings."""

    trainer: dict[str, Any]
    steps: int = 50
    groups_per_step: int = 8
    group_size: int = 8
    samples_equal_groups_again: bool = False
    """Dynamic sampling: groups whose rewards are all equal do not count."""
    export: Path | None = None
    """A folder for the trained model."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What came of one training."""

    final_reward: float
    """Held-out."""
    time_s: float
    """Sampling and training."""
    cpu_s: float
    """The same, as CPU time of this process."""
    curve: tuple[float, ...]
    """Mean training reward of each step."""


MAX_ROUNDS = 4
"""Of dynamic sampling; then the batch is what it is."""


def train(folder: Path, recipe: Recipe, *, seed: int, eval_samples: int) -> Trained:
    """Train the model of ``folder`` on the tasks of a seed, and score it on held-out ones."""
    config = PolicyConfig(model=str(folder), context_tokens=CONTEXT_TOKENS, trainer=recipe.trainer)  # pyright: ignore[reportArgumentType]
    trainer = PolicyTrainer(
        folder, config=config, total_steps=recipe.steps, seed=seed, device="cpu", dtype=torch.float32
    )
    player = Player(folder, trainer.model, seed=seed)
    tasks, held_out = make_split(seed)
    dealer = TaskStream(tasks, seed=seed)
    curve: list[float] = []
    started, cpu_before_s = time.perf_counter(), time.process_time()
    for step in range(1, recipe.steps + 1):
        groups, rewards = sample_groups(player, dealer, recipe, step=step)
        curve.append(fmean(rewards))
        batch = TrainingBatch(f"{POLICY}-{step}", POLICY, step, tuple(groups), seed=seed * 1_000_003 + step)
        trainer.train_step(batch)
        player.update(trainer)
    time_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_before_s
    if recipe.export is not None:
        trainer.export(recipe.export)
    final = fmean(episode.reward for episode in player.play([task for task in held_out for _ in range(eval_samples)]))
    return Trained(final, time_s, cpu_s, tuple(curve))


class TaskStream:
    """Tasks in epochs, each shuffled anew."""

    def __init__(self, tasks: Sequence[CalculatorTask], *, seed: int) -> None:
        self._tasks = list(tasks)
        self._rng = random.Random(seed)
        self._left: list[CalculatorTask] = []

    def next(self) -> CalculatorTask:
        if not self._left:
            self._left = self._rng.sample(self._tasks, len(self._tasks))
        return self._left.pop()


def sample_groups(
    player: Player, dealer: TaskStream, recipe: Recipe, *, step: int
) -> tuple[list[EpisodeSamples], list[float]]:
    """The episodes of one batch, and the rewards of all that were sampled for it."""
    kept: list[list[Played]] = []
    rewards: list[float] = []
    for round_ in range(MAX_ROUNDS):
        tasks = [dealer.next() for _ in range(recipe.groups_per_step - len(kept))]
        episodes = player.play([task for task in tasks for _ in range(recipe.group_size)])
        rewards += [episode.reward for episode in episodes]
        for start in range(0, len(episodes), recipe.group_size):
            group = episodes[start : start + recipe.group_size]
            is_equal = len({episode.reward for episode in group}) == 1
            if not is_equal or not recipe.samples_equal_groups_again or round_ == MAX_ROUNDS - 1:
                kept.append(group)
        if len(kept) == recipe.groups_per_step:
            break
    samples = [
        episode.samples(group=index, member=member, step=step)
        for index, group in enumerate(kept)
        for member, episode in enumerate(group)
    ]
    return samples, rewards
