"""The demo's tiny model: built from a seed, warmed up on noisy demonstrations, written to a folder.

    python -m wingbeat.environments.calculator.model --out DIR --seed N

writes a complete Hugging Face folder and one JSON line of statistics. Warm-up is plain supervised
learning on `CarelessAgent` episodes and stops as soon as the model is about as careless as they
are: good enough to earn a reward at times, far from good.

Letters: B episodes, T tokens, A sampled (trained) tokens, V vocabulary.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from wingbeat.environments.calculator.demonstrations import CarelessAgent, Message
from wingbeat.environments.calculator.rollouts import Sampler, render_ids
from wingbeat.environments.calculator.tasks import CalculatorTask, make_split
from wingbeat.environments.calculator.tokenizer import (
    END_TOKEN,
    MAX_MODEL_TOKENS,
    PAD_TOKEN,
    START_TOKEN,
    build_tokenizer,
    write_tokenizer,
)
from wingbeat.environments.imitation import imitation_loss, tiny_qwen3, written_by_assistant

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class WarmUpConfig:
    """How the model imitates, and when it has imitated enough."""

    agent: CarelessAgent = field(default_factory=CarelessAgent)
    learning_rate: float = 4e-3
    weight_decay: float = 0.0
    ramp_steps: int = 10
    num_episodes: int = 32
    """Demonstrations per step."""

    round_steps: int = 480
    """Steps of the first round. The learning rate falls to zero within a round: at a constant rate
    the model's error rates swing from step to step, and so would the reward it starts RL with."""

    extra_round_steps: int = 120
    max_extra_rounds: int = 1
    min_reward: float = 0.2
    """Another round follows while the sampled reward on training tasks is below this."""

    check_episodes: int = 512


@dataclass(frozen=True, slots=True)
class WarmUpStats:
    """What warm-up did; `rewards` are the sampled rewards of its checks."""

    steps: int
    seconds: float
    first_loss: float
    last_loss: float
    rewards: tuple[float, ...]


def build_model(seed: int) -> Qwen3ForCausalLM:
    """A randomly initialised model; the caller's random state is left alone."""
    tokenizer = build_tokenizer()
    eos, pad = tokenizer.token_to_id(END_TOKEN), tokenizer.token_to_id(PAD_TOKEN)
    assert eos is not None and pad is not None, "the tokenizer is ours"
    return tiny_qwen3(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        layers=2,
        max_tokens=MAX_MODEL_TOKENS,
        eos=eos,
        pad=pad,
        seed=seed,
    )


def warm_up(
    model: Qwen3ForCausalLM,
    tokenizer: "PreTrainedTokenizerBase",
    seed: int,
    *,
    config: WarmUpConfig = WarmUpConfig(),
) -> WarmUpStats:
    """Imitate the careless agent on the training tasks of `seed`'s split."""
    started = time.perf_counter()
    tasks, _ = make_split(seed)
    rng = random.Random(seed)
    sampler = Sampler(model, tokenizer, torch.Generator().manual_seed(seed))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=config.weight_decay
    )
    pad: Any = tokenizer.pad_token_id
    losses: list[float] = []
    rewards: list[float] = []
    for extra_round in range(config.max_extra_rounds + 1):
        num_steps = config.extra_round_steps if extra_round else config.round_steps
        for step in range(num_steps):
            ramp = min(1.0, (step + 1) / config.ramp_steps)
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate * ramp * min(1.0, 4 * (1 - step / num_steps))
            episodes = [config.agent.demonstrate(rng.choice(tasks), rng) for _ in range(config.num_episodes)]
            batch = [encode_demonstration(tokenizer, messages) for messages in episodes]
            loss = imitation_loss(model, batch, pad=pad)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        rewards.append(_sampled_reward(sampler, tasks, rng, config.check_episodes))
        if rewards[-1] >= config.min_reward:
            break
    return WarmUpStats(
        steps=len(losses),
        seconds=time.perf_counter() - started,
        first_loss=losses[0],
        last_loss=sum(losses[-20:]) / len(losses[-20:]),
        rewards=tuple(rewards),
    )


def encode_demonstration(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]
) -> tuple[list[int], list[bool]]:
    """An episode's tokens [T], and which of them [T] the assistant wrote."""
    ids = render_ids(tokenizer, messages)
    marks: Any = tokenizer.convert_tokens_to_ids([START_TOKEN, tokenizer.tokenize("assistant\n")[0], END_TOKEN])
    start, assistant, end = marks
    return ids, written_by_assistant(ids, start=start, assistant=assistant, end=end)


def write_model(folder: Path, seed: int) -> WarmUpStats:
    """Build, warm up and write everything that a server needs to load the model."""
    write_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = build_model(seed)
    stats = warm_up(model, tokenizer, seed)
    model.save_pretrained(folder)
    return stats


def _sampled_reward(sampler: Sampler, tasks: Sequence[CalculatorTask], rng: random.Random, num_episodes: int) -> float:
    rollouts = sampler.play(rng.choices(tasks, k=num_episodes))
    return sum(rollout.reward for rollout in rollouts) / num_episodes


def main() -> None:
    """Command line: see the module's docstring."""
    parser = argparse.ArgumentParser(description="Write the demo's warmed-up model.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    stats = write_model(arguments.out, arguments.seed)
    sys.stdout.write(json.dumps(asdict(stats)) + "\n")


if __name__ == "__main__":
    main()
