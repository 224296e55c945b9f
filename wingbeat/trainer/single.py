"""A policy and its optimiser in one process on one device.

One :meth:`PolicyTrainer.train_step` turns a batch into the next policy version:

    episodes ─▶ rows ─▶ scores and values, where needed (no gradient) ─▶ advantages (per trained token)
             ─▶ token weights (global denominators) ─▶ updates
    for each update:  rows, trees ─▶ logprobs ─▶ loss ─▶ backward;  clip, AdamW

The step is a pure function of weights, optimiser state and batch: whatever is random in it is seeded by
``batch.seed``, so replaying logged batches from a checkpoint gives the same weights, bit for bit in
float32 on one device, and no random state needs to be saved.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from peft import get_peft_model_state_dict
from torch import Tensor

from wingbeat.core.config import LoraConfig, PolicyConfig
from wingbeat.core.errors import ConflictError, RequestError, SetupError
from wingbeat.core.ports import Clock
from wingbeat.core.samples import TrainingBatch
from wingbeat.trainer.assignment import Evidence, assign_credit
from wingbeat.trainer.critic import CRITIC, Critic
from wingbeat.trainer.export import export_model
from wingbeat.trainer.logprobs import LogprobModel
from wingbeat.trainer.loss_config import LossConfig
from wingbeat.trainer.memory import ForwardBudget
from wingbeat.trainer.optimizer import PolicyOptimizer, lr_at
from wingbeat.trainer.report import advantage_metrics, batch_metrics
from wingbeat.trainer.rows import build_rows
from wingbeat.trainer.scoring import PolicyUnderTraining, Scoring
from wingbeat.trainer.sharding import ALONE, Sharding
from wingbeat.trainer.shared_base import SharedBases
from wingbeat.trainer.skips import SkipRule
from wingbeat.trainer.trainable import load_trainable
from wingbeat.trainer.update import GradientPass, PassResult
from wingbeat.trainer.updates import Update, plan_updates

PROGRESS = "run.progress"
"""In a checkpoint, what later steps depend on besides weights and moments (:meth:`PolicyTrainer.progress`)."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step reports."""

    metrics: dict[str, float]
    advantages: dict[str, float]
    """What was trained, per "episode_id:attempt:agent": the advantage, or its mean over the trained tokens."""


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What one optimiser update did."""

    done: PassResult
    grad_norm: float | None
    """None where it was not finite, and the update was skipped."""


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
        bases: SharedBases | None = None,
        sharding: Sharding = ALONE,
    ) -> None:
        """``bases`` holds the frozen models of the policies that this process trains; ``sharding`` is what it shares
        with other processes that train the same policy."""
        self._source = source
        self._policy_config = config
        self._config = config.trainer
        self._sharding = sharding
        self._lora = config.lora
        self._total_steps = total_steps
        self._device = torch.device(device)
        self._loss_config = LossConfig.resolve(config.trainer, context_tokens=config.context_tokens)
        self._step = 0
        loaded = load_trainable(source, config=config, seed=seed, device=self._device, dtype=dtype, bases=bases)
        self._model: Any = loaded.model
        self._logprobs = LogprobModel(
            loaded.base,
            chunk_tokens=config.trainer.logprob_chunk_tokens,
            entropy_gradient=self._loss_config.entropy_coef > 0,
        )
        self._budget = ForwardBudget(config.trainer.micro_batch_tokens)
        self._pass = GradientPass(
            self._logprobs,
            config=config.trainer,
            loss_config=self._loss_config,
            device=self._device,
            budget=self._budget,
            sharding=sharding,
        )
        self._skips = SkipRule(config.trainer.max_skipped_steps)
        policy = PolicyUnderTraining(
            self._model, self._pass.forwards, source, self._logprobs.vocabulary, self._device, dtype, bases
        )
        self._scoring = Scoring(policy, config=config, loss_config=self._loss_config)
        # Every probe of the model is done by now, and nobody has taken hold of its parameters yet.
        sharding.attach(loaded.base, logprobs=self._logprobs)
        self._optimizer = PolicyOptimizer(
            {name: parameter for name, parameter in self._model.named_parameters() if parameter.requires_grad},
            config=config.trainer,
            sharding=sharding,
        )
        self._critic: Critic | None = None
        if config.trainer.algorithm == "ppo":
            self._critic = Critic(
                source,
                config=config,
                seed=seed,
                device=self._device,
                dtype=dtype,
                budget=self._budget,
                bases=bases,
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

        Samples that nothing trains (:meth:`GradientPass.run`) are not forwarded, and count in every
        denominator all the same.  ``entropy``, ``mismatch_kl``, ``kl``, ``clip_ratio/*`` and ``ratio/max`` are over the
        tokens of the others (over all trained tokens, without gradient, in an update that has none).
        ``loss`` and ``grad_norm`` are means over the updates.  ``perf/row_tokens`` counts the tokens of the samples
        that were trained, ``perf/forward_tokens`` those that were forwarded for them, ``tree/sharing`` is the
        quotient, ``perf/fill`` the share of the forwarded ones that is no padding, and ``perf/tokens_per_s`` is of the
        first.

        An update whose gradient is not finite is skipped: neither weights nor moments move, and the version grows all
        the same.  Such a step leaves out metrics that are not finite.  What does not fit into memory is tried again
        in smaller forwards (:mod:`wingbeat.trainer.memory`).

        Raises ConflictError where the batch is not the next step, RequestError where it holds no episode
        or one of another kind, NonFiniteGradient after too many skipped steps in a row, and SetupError where a single
        sample does not fit into memory.
        """
        started = clock()
        self._check(batch)
        rows = build_rows(batch.episodes, vocabulary=self._logprobs.vocabulary)
        lr = lr_at(batch.step, config=self._config, total_steps=self._total_steps)
        with self._seeded(batch.seed):
            scores = self._scoring.score(rows)
            evidence = Evidence(
                penalties_N=self._scoring.penalties(scores),
                values_N=self._critic.values(rows) if self._critic else (),
            )
            assigned = assign_credit(batch.episodes, rows, config=self._config, evidence=evidence, seed=batch.seed)
            frozen = self._critic is not None and batch.step <= self._critic.warmup_steps
            updates = plan_updates(
                batch,
                rows=rows,
                advantages_N=assigned.advantages_N,
                scores=scores,
                config=self._loss_config,
                parts=self._config.updates_per_batch,
            )
            results = [self._update(update, lr=lr, frozen=frozen) for update in updates]
            fitted: dict[str, float] = {}
            if self._critic is not None:
                fitted = self._critic.fit(rows, assigned, values_N=evidence.values_N, skips=self._skips)
        self._skips.end_step()
        self._step = batch.step
        elapsed = clock() - started
        done = sum((result.done for result in results), PassResult())
        metrics = batch_metrics(batch, rows=rows) | advantage_metrics(assigned.advantages_N) | done.stats.metrics()
        metrics |= fitted | _pace(done, elapsed_s=elapsed)
        norms = [result.grad_norm for result in results if result.grad_norm is not None]
        metrics |= {"grad_norm": sum(norms) / len(norms)} if norms else {}
        metrics |= self._budget.metrics() | {
            "loss": done.loss / len(results),
            "lr": 0.0 if frozen else lr,
            "tree/supported": float(self._pass.supports_trees),
            "skipped_steps": float(self._skips.in_a_row),
        }
        if self._skips.in_a_row:
            metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        keys = [f"{episode.episode_id}:{episode.attempt}:{episode.agent}" for episode in batch.episodes]
        return StepResult(metrics=metrics, advantages=dict(zip(keys, assigned.episodes, strict=True)))

    def published_tensors(self) -> dict[str, Tensor]:
        """What receivers need of this version; live tensors, so write them before the next step.

        Full: every parameter once, under its first name (a tied head is published as the embedding; fixed
        buffers come with the base model).  LoRA: the adapter as PEFT names it.
        """
        if self._lora is None:
            return {name: parameter.detach() for name, parameter in self._model.named_parameters()}
        adapter: dict[str, Tensor] = get_peft_model_state_dict(self._model, save_embedding_layers=False)
        return {name: tensor.detach() for name, tensor in adapter.items()}

    @property
    def published_bytes(self) -> int:
        """The size of :meth:`published_tensors`, without gathering them."""
        return sum(tensor.nbytes for tensor in self.published_tensors().values())

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
        critic = self._critic.state_tensors() if self._critic else {}
        return self._optimizer.state_tensors() | critic | {PROGRESS: self.progress()}

    def progress(self) -> Tensor:
        """[3] the tokens of a forward as configured and as they are now, and how many steps in a row were skipped."""
        return torch.tensor([*self._budget.state, self._skips.in_a_row], dtype=torch.float32)

    def restore_progress(self, progress: Tensor | None) -> None:
        """Go on from there; None: of a checkpoint that has none."""
        configured, tokens, skipped = (1, 1, 0) if progress is None else map(int, progress.tolist())
        self._budget.restore(configured, tokens)
        self._skips.restore(skipped)

    def load_state(self, tensors: Mapping[str, Tensor], *, step: int) -> None:
        """Go to a checkpoint's state.  Raises SetupError, changing nothing, if it is of another policy."""
        own = {name: tensor for name, tensor in tensors.items() if not name.startswith((CRITIC, PROGRESS))}
        if (self._critic is not None) != any(name.startswith(CRITIC) for name in tensors):
            raise SetupError(
                f"the checkpoint is not of this policy: algorithm {self._config.algorithm!r} has "
                f"{'a' if self._critic else 'no'} critic, the checkpoint {'none' if self._critic else 'one'}; "
                "use the algorithm it was made with, or another run directory"
            )
        self._optimizer.check_state(own)
        if self._critic is not None:
            self._critic.load_state(tensors)
        self._optimizer.load_state_tensors(own)
        self.restore_progress(tensors.get(PROGRESS))
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

    def _update(self, update: Update, *, lr: float, frozen: bool) -> UpdateResult:
        """Gather the gradient over forwards and take one optimiser step, unless the policy is ``frozen``."""
        self._optimizer.zero_grad()
        done = self._budget.until_it_fits(
            lambda: self._pass.run(update, measure=frozen), clean=self._optimizer.zero_grad
        )
        norm = 0.0 if frozen else self._skips.unless_not_finite(lambda: self._optimizer.step(lr))
        return UpdateResult(done, norm)

    @contextmanager
    def _seeded(self, seed: int) -> Iterator[None]:
        """Run with torch's generators seeded, and leave the caller's as they were."""
        accelerated = self._device.type != "cpu"
        devices = [self._device.index or 0] if accelerated else []
        with torch.random.fork_rng(devices, device_type=self._device.type if accelerated else "cuda"):
            torch.manual_seed(seed)
            yield


def _pace(done: PassResult, *, elapsed_s: float) -> dict[str, float]:
    return {
        "time/train_s": elapsed_s,
        "perf/tokens_per_s": done.row_tokens / elapsed_s if elapsed_s > 0 else 0.0,
        "perf/row_tokens": float(done.row_tokens),
        "perf/forward_tokens": float(done.forward_tokens),
        "perf/fill": done.forward_tokens / done.padded_tokens if done.padded_tokens else 1.0,
        "tree/sharing": done.row_tokens / done.forward_tokens if done.forward_tokens else 1.0,
    }
