"""What the trainer benchmarks share: a small model, trainers of it, and how a step and a gradient are taken.

A step is timed by the process's CPU time, which a busy machine disturbs less than wall time; systems take turns
and the least of all repeats counts.  Gradients are read from the optimiser's first moments after a first step.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from bench.machine import describe_machine
from bench.recorded import VOCABULARY, write_tokenizer
from wingbeat.core.config import PolicyConfig, TrainerConfig
from wingbeat.core.samples import TrainingBatch
from wingbeat.trainer.single import PolicyTrainer

CONTEXT_TOKENS = 8192
Settings = Mapping[str, Any]
"""Of the trainer's configuration."""
ROWS: Settings = {"prefix_tree": "off", "sequence_packing": "off", "micro_batch_tokens": 4096}
"""Rows of nearly one length at once, with little padding: within 3% of packed rows on what is measured here."""
TREE: Settings = {"prefix_tree": "on"}


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A Qwen 3 with random weights and tied embeddings."""

    hidden: int = 256
    layers: int = 4

    def describe(self) -> str:
        return f"a Qwen3 of {self.layers} layers, hidden size {self.hidden}, vocabulary {VOCABULARY}"


SMALL = ModelSize(hidden=64, layers=2)
"""For float64 and for smoke runs."""


@contextmanager
def model_folder(size: ModelSize) -> Iterator[Path]:
    """A folder with the model, its tokenizer and its chat template."""
    logging.disable_progress_bar()
    head = 32 if size.hidden < 128 else 64
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // head,
        num_key_value_heads=max(1, size.hidden // head // 2),
        head_dim=head,
        tie_word_embeddings=True,
        max_position_embeddings=CONTEXT_TOKENS,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    with tempfile.TemporaryDirectory() as name, torch.random.fork_rng([]):
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(name)
        write_tokenizer(Path(name))
        yield Path(name)


class Trained:
    """A trainer that is given one batch again and again; its weights hardly move."""

    def __init__(
        self, folder: Path, *, batch: TrainingBatch, settings: Settings, dtype: torch.dtype = torch.float32
    ) -> None:
        trainer = TrainerConfig(**{"learning_rate": 1e-9, "max_grad_norm": 1e9, **settings})
        config = PolicyConfig(model=str(folder), context_tokens=CONTEXT_TOKENS, trainer=trainer)
        self._trainer = PolicyTrainer(folder, config=config, total_steps=1000, seed=0, device="cpu", dtype=dtype)
        self._batch = batch
        if dtype == torch.float64:
            _normalise_in_float64(self._trainer.model)
        self.forward_tokens = 0
        """Of one step, without padding."""

    def step_s(self) -> float:
        """CPU seconds of one optimiser step."""
        batch = msgspec.structs.replace(self._batch, step=self._trainer.step + 1)
        started = time.process_time()
        result = self._trainer.train_step(batch)
        elapsed = time.process_time() - started
        self.forward_tokens = round(result.metrics["perf/forward_tokens"])
        return elapsed

    def gradient(self) -> dict[str, Tensor]:
        """Of the step taken last, up to a factor; only the first step's is of one step alone."""
        moments = self._trainer.state_tensors().items()
        return {name: tensor.clone() for name, tensor in moments if name.startswith("exp_avg.")}


def least_times(systems: Mapping[str, Callable[[], float]], *, repeats: int) -> dict[str, float]:
    """The least of ``repeats`` measurements of each system, which take turns."""
    found: dict[str, float] = {}
    for repeat in range(repeats):
        for name, measure in systems.items():
            taken = measure()
            sys.stderr.write(f"{name}, {repeat + 1} of {repeats}: {taken:.2f} s\n")
            found[name] = min(taken, found.get(name, taken))
    return found


def relative_error(wanted: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> float:
    """The L2 norm of the difference over that of ``wanted``, all tensors together."""
    if wanted.keys() != got.keys():
        raise ValueError(
            f"expected gradients of the same tensors, got {sorted(wanted.keys() ^ got.keys())} in one only"
        )
    difference = sum(float((wanted[name].double() - got[name].double()).square().sum()) for name in wanted)
    return (difference / sum(float(tensor.double().square().sum()) for tensor in wanted.values())) ** 0.5


def worst_error(wanted: Mapping[str, Tensor], others: Sequence[Mapping[str, Tensor]]) -> float:
    return max(relative_error(wanted, other) for other in others)


def machine() -> dict[str, Any]:
    return {**describe_machine(), "torch": torch.__version__}


def _normalise_in_float64(model: Any) -> None:
    """transformers normalises in float32 in any model, and that noise would hide errors."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_normalised, module)


def _normalised(module: Any, hidden: Tensor) -> Tensor:
    return module.weight * hidden * (hidden.square().mean(-1, keepdim=True) + module.variance_epsilon).rsqrt()
