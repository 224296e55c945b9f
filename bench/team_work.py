"""The work of the multi-policy benchmark: a team of two policies whose tools take long-tailed times.

An episode has three turns of two policies, with a tool between them::

    planner ── tool ──▶ worker ── tool ──▶ planner

Each policy sees its own conversation: the task, what the other one said, what the tool returned.  Tools
only sleep.  How long follows from the task, the member of the group and the turn alone, so every way to schedule
meets the same latencies.  Each policy is rewarded for the characters of its replies that are of its own kind: from
random weights that is learnt within some tens of steps, and an update that does not reach the engine would show.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from wingbeat.core.config.trainer import Algorithm
from wingbeat.core.types import Task

SOURCE = "team"
POLICIES = ("planner", "worker")
NUM_TOOLS = 2
MIXTURE = ((0.61, 0.1, 1.0), (0.27, 1.0, 10.0), (0.08, 10.0, 60.0), (0.04, 60.0, 120.0))
"""Share of the tool calls and the seconds between which they lie, log-uniformly."""
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 .\n"
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CONTEXT_TOKENS = 1024
TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


@dataclass(frozen=True, slots=True)
class Work:
    """How much there is to do; the same in all modes."""

    steps: int = 16
    """Optimiser steps of each policy."""
    groups_per_step: int = 8
    group_size: int = 4
    max_staleness: int = 5
    """Of the asynchronous modes."""
    time_scale: float = 1 / 15
    """Real seconds per second of :data:`MIXTURE`."""
    reply_tokens: int = 4
    task_chars: int = 48
    result_chars: tuple[int, ...] = (144, 64)
    """Of what each tool returns: both policies read as much in all."""
    hidden: int = 256
    layers: int = 4
    algorithm: Algorithm = "cispo"
    """No token loses its gradient to a clip, however many versions ago it was sampled."""
    learning_rate: float = 1e-3
    kl_coef: float = 0.01
    eval_tasks: int = 16
    eval_samples: int = 4

    @property
    def groups(self) -> int:
        """Training groups of a run."""
        return self.steps * self.groups_per_step

    @property
    def capacity(self) -> int:
        """Episodes that an asynchronous run may have in flight or buffered."""
        return (self.max_staleness + 1) * self.groups_per_step * self.group_size

    def describe(self) -> str:
        return (
            f"{self.steps} steps per policy of {self.groups_per_step} groups of {self.group_size} episodes by "
            f"{self.algorithm}, two Qwen3 of {self.layers} layers and hidden size {self.hidden}, replies of at most "
            f"{self.reply_tokens} tokens, tool results of {' and '.join(map(str, self.result_chars))}"
        )


def draw_latency(rng: random.Random) -> float:
    """Seconds of one tool call, unscaled."""
    _, low, high = rng.choices(MIXTURE, [share for share, _, _ in MIXTURE])[0]
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def latencies(seed: int, task: int, *, members: int, scale: float) -> list[list[float]]:
    """Seconds that the tools of each member of a task's group sleep, by turn."""
    return [
        [scale * draw_latency(random.Random(f"{seed}:{task}:{member}:{turn}")) for turn in range(NUM_TOOLS)]
        for member in range(members)
    ]


def make_tasks(work: Work, *, seed: int) -> tuple[list[Task], list[Task]]:
    """(training, evaluation); a run trains each training task once, and evaluation does not wait for tools."""
    train = [
        Task(
            SOURCE,
            f"train-{index}",
            _payload(work, f"{seed}:train:{index}")
            | {"sleep_s": latencies(seed, index, members=work.group_size, scale=work.time_scale)},
        )
        for index in range(work.groups)
    ]
    evaluation = [
        Task(SOURCE, f"eval-{index}", _payload(work, f"{seed}:eval:{index}")) for index in range(work.eval_tasks)
    ]
    return train, evaluation


def _payload(work: Work, name: str) -> dict[str, Any]:
    rng = random.Random(name)
    return {
        "question": _text(rng, work.task_chars),
        "results": [_text(rng, length) for length in work.result_chars],
        "reply_tokens": work.reply_tokens,
    }


def _text(rng: random.Random, length: int) -> str:
    return "".join(rng.choice(ALPHABET[:-3]) for _ in range(length))


TASKS_FILE = '''\
"""Written by bench.multipolicy: the tasks beside it."""

import json
from pathlib import Path

from wingbeat import Task

TASKS = json.loads((Path(__file__).parent / "tasks.json").read_text())


def train_tasks():
    return [Task(**task) for task in TASKS["train"]]


def eval_tasks():
    return [Task(**task) for task in TASKS["eval"]]
'''


def write_tasks(folder: Path, train: Sequence[Task], evaluation: Sequence[Task]) -> Path:
    """A file for ``tasks.file``."""
    found = {"train": train, "eval": evaluation}
    data = {
        split: [{"source": task.source, "id": task.id, "payload": dict(task.payload)} for task in tasks]
        for split, tasks in found.items()
    }
    (folder / "tasks.json").write_text(json.dumps(data), encoding="utf-8")
    path = folder / "tasks.py"
    path.write_text(TASKS_FILE, encoding="utf-8")
    return path


def write_model(folder: Path, work: Work, *, seed: int) -> Path:
    """A model with random weights, a tokenizer of one token per character, and a chat template."""
    logging.disable_progress_bar()
    tokenizer = build_tokenizer()
    pad, end = tokenizer.token_to_id(CONTROL[0]), tokenizer.token_to_id(CONTROL[2])
    head = 32 if work.hidden < 128 else 64
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=work.hidden,
        intermediate_size=3 * work.hidden,
        num_hidden_layers=work.layers,
        num_attention_heads=work.hidden // head,
        num_key_value_heads=max(1, work.hidden // head // 2),
        head_dim=head,
        tie_word_embeddings=True,
        max_position_embeddings=CONTEXT_TOKENS,
        pad_token_id=pad,
        bos_token_id=None,
        eos_token_id=end,
    )
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": CONTROL[2], "pad_token": CONTROL[0], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def build_tokenizer() -> Tokenizer:
    """Byte-level, of the alphabet's characters alone."""
    symbols = [_byte_symbol(character) for character in ALPHABET]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(  # pyright: ignore[reportAttributeAccessIssue]
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    return tokenizer


def _byte_symbol(character: str) -> str:
    """How byte-level vocabularies write a byte: printable ones as they are, others shifted by 256."""
    return character if character.isprintable() and character != " " else chr(256 + ord(character))


def critical_path_s(sleep_s: Sequence[Sequence[float]]) -> float:
    """How long a group takes at least: its tools of one member are called one after another."""
    return max(sum(member) for member in sleep_s)
