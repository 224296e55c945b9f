"""A policy and its optimiser in one process on one device.

One :meth:`PolicyTrainer.train_step` turns a batch into the next policy version:

    episodes ─▶ advantages (per episode) ─▶ token weights (global denominators) ─▶ rows
    for each update:  rows, trees ─▶ logprobs ─▶ loss ─▶ backward;  clip, AdamW

The step is a pure function of weights, optimiser state and batch: whatever is random in it is seeded by
``batch.seed``, so replaying logged batches from a checkpoint gives the same weights, bit for bit in
float32 on one device, and no random state needs to be saved.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model, get_peft_model_state_dict
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from wingbeat.core.config.schema import LoraConfig, PolicyConfig
from wingbeat.core.errors import ConflictError, RequestError, SetupError
from wingbeat.core.ports import Clock
from wingbeat.core.samples import TrainingBatch
from wingbeat.trainer.advantages import compute_advantages, shuffled_advantages
from wingbeat.trainer.batching import Credit
from wingbeat.trainer.export import export_model
from wingbeat.trainer.logprobs import LogprobModel
from wingbeat.trainer.losses import LossConfig, Totals, token_weight
from wingbeat.trainer.models import load_model
from wingbeat.trainer.optimizer import PolicyOptimizer, lr_at
from wingbeat.trainer.report import batch_metrics
from wingbeat.trainer.rows import Row, build_rows, split_by_group
from wingbeat.trainer.update import GradientPass, PassResult, Update


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step reports."""

    metrics: dict[str, float]
    advantages: dict[str, float]
    """The advantage that was trained, per "episode_id:attempt:agent"."""


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What one optimiser update did."""

    done: PassResult
    grad_norm: float


class PolicyTrainer:
    """Trains all weights, or LoRA adapters where ``config.lora`` is set, of the model in folder ``source``.

    ``dtype`` is that of weights and activations; logprobs, gradients and optimiser state are at least
    float32 (see :mod:`wingbeat.trainer.optimizer`).  Dropout is always off: trained and sampled logprobs
    must be of the same distribution.  The caller sets the number of torch threads.
    """

    def __init__(
        self,
        source: Path,
        *,
        config: PolicyConfig,
        total_steps: int,
        seed: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        self._source = source
        self._config = config.trainer
        self._lora = config.lora
        self._total_steps = total_steps
        self._device = torch.device(device)
        self._loss_config = LossConfig.resolve(config.trainer, context_tokens=config.context_tokens)
        self._step = 0
        base: Any = load_model(source, dtype=dtype, device=self._device).model
        base.eval()
        base.requires_grad_(self._lora is None)
        self._model: Any = base if self._lora is None else _add_adapters(base, lora=self._lora, seed=seed)
        if config.trainer.gradient_checkpointing:
            _checkpoint_gradients(base)
        self._logprobs = LogprobModel(base, chunk_tokens=config.trainer.logprob_chunk_tokens)
        self._pass = GradientPass(
            self._logprobs, config=config.trainer, loss_config=self._loss_config, device=self._device
        )
        self._optimizer = PolicyOptimizer(
            {name: parameter for name, parameter in self._model.named_parameters() if parameter.requires_grad},
            config=config.trainer,
        )

    @property
    def step(self) -> int:
        """Steps taken, which is the policy version of the current weights."""
        return self._step

    @property
    def lora(self) -> LoraConfig | None:
        """The adapters' settings; None trains all weights."""
        return self._lora

    @property
    def model(self) -> Any:
        """The live module, adapters included, in evaluation mode; read it between steps, never change it."""
        return self._model

    @property
    def kind(self) -> Literal["full", "adapter"]:
        """What :meth:`published_tensors` gives, as a manifest calls it."""
        return "full" if self._lora is None else "adapter"

    def train_step(self, batch: TrainingBatch, *, clock: Clock = time.perf_counter) -> StepResult:
        """Move the policy from version ``batch.step - 1`` to ``batch.step``.

        Episodes with advantage zero are not forwarded: their gradient is zero, and they count in every
        denominator all the same.  ``entropy``, ``mismatch_kl``, ``clip_ratio/*`` and ``ratio/max`` are over
        tokens with an advantage (over all trained tokens, without gradient, in an update that has none).
        ``loss`` and ``grad_norm`` are means over the updates.  ``perf/row_tokens`` counts the tokens of the samples
        that were trained, ``perf/forward_tokens`` those that were forwarded for them, ``tree/sharing`` is the
        quotient, and ``perf/tokens_per_s`` is of the former.

        Raises ConflictError where the batch is not the next step, RequestError where it holds no episode
        or one of another kind, and WingbeatError where the policy has diverged.
        """
        started = clock()
        self._check(batch)
        rows = build_rows(batch.episodes, vocabulary=self._logprobs.vocabulary)
        advantages = self._advantages(batch)
        lr = lr_at(batch.step, config=self._config, total_steps=self._total_steps)
        with self._seeded(batch.seed):
            results = [self._update(update, lr=lr) for update in self._updates(batch, rows=rows, advantages=advantages)]
        self._step = batch.step
        elapsed = clock() - started
        done = sum((result.done for result in results), PassResult())
        metrics = batch_metrics(batch, rows=rows) | done.stats.metrics()
        metrics |= {
            "loss": done.loss / len(results),
            "grad_norm": sum(result.grad_norm for result in results) / len(results),
            "lr": lr,
            "time/train_s": elapsed,
            "perf/tokens_per_s": done.row_tokens / elapsed if elapsed > 0 else 0.0,
            "perf/row_tokens": float(done.row_tokens),
            "perf/forward_tokens": float(done.forward_tokens),
            "tree/sharing": done.row_tokens / done.forward_tokens if done.forward_tokens else 1.0,
            "tree/supported": float(self._pass.supports_trees),
        }
        keys = [f"{episode.episode_id}:{episode.attempt}:{episode.agent}" for episode in batch.episodes]
        return StepResult(metrics=metrics, advantages=dict(zip(keys, advantages, strict=True)))

    def published_tensors(self) -> dict[str, Tensor]:
        """What receivers need of this version; live tensors, so write them before the next step.

        Full: every parameter once, under its first name (a tied head is published as the embedding; fixed
        buffers come with the base model).  LoRA: the adapter as PEFT names it.
        """
        if self._lora is None:
            return {name: parameter.detach() for name, parameter in self._model.named_parameters()}
        adapter: dict[str, Tensor] = get_peft_model_state_dict(self._model, save_embedding_layers=False)
        return {name: tensor.detach() for name, tensor in adapter.items()}

    def export(self, path: Path, *, merged: bool = False) -> None:
        """Write the current weights as a Hugging Face folder, or as a PEFT adapter folder for LoRA.

        ``merged`` writes LoRA as a full model.  Raises SetupError where ``path`` is something else already,
        or ``merged`` has nothing to merge.
        """
        if merged and self._lora is None:
            raise SetupError("cannot export merged: all weights are trained, there is no adapter; leave merged out")
        export_model(self._model, source=self._source, path=path, merged=merged)

    def state_tensors(self) -> dict[str, Tensor]:
        """All tensors that later steps depend on, for an exact-resume checkpoint."""
        return self._optimizer.state_tensors()

    def load_state(self, tensors: Mapping[str, Tensor], *, step: int) -> None:
        """Go to a checkpoint's state.  Raises SetupError, changing nothing, if it is of another policy."""
        self._optimizer.load_state_tensors(tensors)
        self._step = step

    def _check(self, batch: TrainingBatch) -> None:
        if batch.step != self._step + 1:
            raise ConflictError(
                f"batch {batch.batch_id!r} is for step {batch.step}, but the trainer of {batch.policy!r} "
                f"stands at step {self._step}; send step {self._step + 1}, or restore the checkpoint of step "
                f"{batch.step - 1}"
            )
        if not batch.episodes:
            raise RequestError(f"batch {batch.batch_id!r} has no episodes; a step needs at least one")
        for episode in batch.episodes:
            if episode.policy != batch.policy:
                raise RequestError(
                    f"batch {batch.batch_id!r}: expected episodes of policy {batch.policy!r}, "
                    f"episode {episode.episode_id!r} is of {episode.policy!r}"
                )

    def _advantages(self, batch: TrainingBatch) -> list[float]:
        config = self._config
        advantages = compute_advantages(batch.episodes, algorithm=config.algorithm, eps=config.advantage_eps)
        if config.control == "shuffled_advantages":
            return shuffled_advantages(advantages, seed=batch.seed)
        return advantages

    def _updates(self, batch: TrainingBatch, *, rows: Sequence[Row], advantages: list[float]) -> list[Update]:
        """Split the batch; each update has its own denominators, known before its first forward."""
        parts = split_by_group(batch.episodes, parts=self._config.updates_per_batch, seed=batch.seed)
        tokens = [0] * len(batch.episodes)
        for row in rows:
            tokens[row.episode] += row.num_trained
        updates: list[Update] = []
        for part in parts:
            totals = Totals(num_episodes=len(part), num_tokens=sum(tokens[index] for index in part))
            weights = [0.0] * len(batch.episodes)
            for index in part:
                if tokens[index]:
                    weights[index] = token_weight(self._loss_config, episode_tokens=tokens[index], totals=totals)
            updates.append(
                Update(
                    rows=[row for row in rows if row.num_trained and weights[row.episode]],
                    credit=Credit(advantages=advantages, weights=weights),
                    on_policy_version=None if updates else batch.step - 1,
                )
            )
        return updates

    def _update(self, update: Update, *, lr: float) -> UpdateResult:
        """Gather the gradient over forwards and take one optimiser step."""
        self._optimizer.zero_grad()
        done = self._pass.run(update)
        return UpdateResult(done, grad_norm=self._optimizer.step(lr))

    @contextmanager
    def _seeded(self, seed: int) -> Iterator[None]:
        """Run with torch's generators seeded, and leave the caller's as they were."""
        accelerated = self._device.type != "cpu"
        devices = [self._device.index or 0] if accelerated else []
        with torch.random.fork_rng(devices, device_type=self._device.type if accelerated else "cuda"):
            torch.manual_seed(seed)
            yield


def _add_adapters(base: Any, *, lora: LoraConfig, seed: int) -> Any:
    """Wrap ``base`` with freshly initialised adapters: random A from ``seed``, zero B."""
    settings = PeftLoraConfig(
        r=lora.rank,
        # PEFT divides by the rank; integers and floats are both accepted.
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=lora.targets,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        try:
            return get_peft_model(base, settings).eval()
        except ValueError as error:
            raise SetupError(
                f"lora.targets {lora.targets!r} do not fit {type(base).__name__}: {error}; name its linear modules"
            ) from error


def _checkpoint_gradients(base: Any) -> None:
    """Recompute each layer in the backward pass.

    Transformers checkpoints only layers in training mode, so that mode is set on the layers themselves and
    on none of their sub-modules: dropout stays off.
    """
    base.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    layers = [module for module in base.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise SetupError(
            f"gradient_checkpointing: {type(base).__name__} has no layers that support it; switch it off in the config"
        )
    for layer in layers:
        layer.training = True
