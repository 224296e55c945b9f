"""AdamW with explicit learning rates, global-norm clipping and float32 master weights.

Low-precision parameters (bfloat16) are trained through float32 masters: their gradients are added up in
float32 as each backward finishes, AdamW moves the masters, and the parameters are the masters rounded.
Without that, updates below a parameter's rounding step (1/256 of its size) would be lost.  Float32 and
float64 parameters are their own masters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from wingbeat.core.config.trainer import TrainerConfig
from wingbeat.core.errors import SetupError, WingbeatError
from wingbeat.trainer.sharding import ALONE, Sharding

MASTER, MOMENTS, COUNT = "master", ("exp_avg", "exp_avg_sq"), "step"
"""What there is of a parameter NAME in :meth:`PolicyOptimizer.state_tensors`: KIND.NAME."""
LOW_PRECISION = (torch.bfloat16, torch.float16)
"""Dtypes that are trained through float32 masters."""
_FUSED_DEVICES = ("cpu", "cuda", "xpu", "mps")
"""Those for which torch has AdamW in one kernel."""


class NonFiniteGradient(WingbeatError):
    """A gradient's norm is NaN or infinite; nothing has moved."""


def lr_at(step: int, *, config: TrainerConfig, total_steps: int) -> float:
    """The learning rate of a step, counted from 1.

    Linear warm-up reaches the peak at ``warmup_steps``; then "constant" stays, while "linear" and
    "cosine" (Loshchilov and Hutter 2017, arXiv 1608.03983, eq. 5) reach ``min_lr_ratio`` of the peak at
    ``total_steps`` and stay there.
    """
    if step < 1:
        raise ValueError(f"expected a step >= 1, got {step}")
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    span = max(1, total_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    remaining = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.learning_rate * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * remaining)


class PolicyOptimizer:
    """Owns masters, moments and gradients of the trainable parameters of one policy.

    Weight decay applies to parameters of two or more dimensions (matrices, embeddings, adapters), not to
    norms and biases.

    With ``sharding`` it owns one process's part of each: parts are plain tensors that share their memory with the
    sharded parameters, and a part may be empty.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], *, config: TrainerConfig, sharding: Sharding = ALONE
    ) -> None:
        if not parameters:
            raise SetupError("there is nothing to train: expected at least one parameter that requires a gradient")
        self._parameters = dict(parameters)
        self._sharding = sharding
        self._max_grad_norm = config.max_grad_norm
        locals_ = {name: sharding.local(parameter) for name, parameter in self._parameters.items()}
        self._parts = {name for name, local in locals_.items() if local is not self._parameters[name]}
        self._masters = {
            name: local if name in self._parts else self._make_master(self._parameters[name])
            for name, local in locals_.items()
        }
        held = [master for master in self._masters.values() if master.numel()]
        self._adamw = torch.optim.AdamW(
            [
                {"params": [m for m in held if m.ndim >= 2], "weight_decay": config.weight_decay},
                {"params": [m for m in held if m.ndim < 2], "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            # One pass over each tensor, without temporaries of the model's size: 3 times faster on a CPU core.
            fused=all(master.device.type in _FUSED_DEVICES for master in held),
        )

    def zero_grad(self) -> None:
        """Set all gradients to zero.

        Zero rather than absent: AdamW skips a parameter without gradient, so a batch in which some
        parameter needed no backward would otherwise move differently.
        """
        for parameter, master in zip(self._parameters.values(), self._masters.values(), strict=True):
            if parameter is not master:
                parameter.grad = None
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            else:
                master.grad.zero_()

    def step(self, lr: float) -> float:
        """Clip the gathered gradients, take one AdamW step, and return the global norm before clipping.

        Raises NonFiniteGradient, before anything has moved, where the norm is NaN or infinite.
        """
        self._take_gradients()
        masters = list(self._masters.values())
        own = torch.nn.utils.get_total_norm([master.grad for master in masters if master.grad is not None])
        norm = self._sharding.global_norm(own)
        value = float(norm)
        if not math.isfinite(value):
            raise NonFiniteGradient(
                f"expected a finite gradient norm, got {value}; this update was not applied (earlier ones of "
                "its batch were). The policy has diverged: lower learning_rate, and resume from a checkpoint"
            )
        torch.nn.utils.clip_grads_with_norm_(masters, self._max_grad_norm, norm)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self._round_to_parameters()
        return value

    def _take_gradients(self) -> None:
        """Of the parts, from where the processes' sum was left; whole weights go, since they are about to change."""
        self._sharding.release()
        for name in sorted(self._parts):
            gradient = self._sharding.local_gradient(self._parameters[name])
            if gradient is not None:
                self._masters[name].grad = gradient

    def gradients(self) -> dict[str, Tensor]:
        """The gradients gathered since :meth:`zero_grad`, by parameter name."""
        return {name: master.grad for name, master in self._masters.items() if master.grad is not None}

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything that a later step depends on: masters, moments, update counts."""
        tensors = {f"{MASTER}.{name}": master.detach() for name, master in self._masters.items()}
        for name, master in self._masters.items():
            state = self._adamw.state.get(master, {})
            tensors |= {f"{key}.{name}": state[key] for key in (*MOMENTS, COUNT) if key in state}
        return tensors

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`state_tensors` gave; all is checked before anything changes.

        Raises SetupError where names, shapes or dtypes are those of another model.
        """
        self.check_state(tensors)
        self._adamw.state.clear()
        for name, master in self._masters.items():
            with torch.no_grad():
                master.copy_(tensors[f"{MASTER}.{name}"])
            if f"{COUNT}.{name}" in tensors and master.numel():
                state = {key: tensors[f"{key}.{name}"].to(master.device, copy=True) for key in MOMENTS}
                # AdamW counts its updates where it runs: in its kernel, or on the CPU.
                where = master.device if self._adamw.defaults["fused"] else "cpu"
                self._adamw.state[master] = {COUNT: tensors[f"{COUNT}.{name}"].to(where, copy=True), **state}
        self._round_to_parameters()

    def check_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises SetupError where :meth:`load_state_tensors` would, and changes nothing."""
        wanted = {f"{MASTER}.{name}": master for name, master in self._masters.items()}
        stepped = any(name.startswith(f"{COUNT}.") for name in tensors)
        names = set(wanted)
        if stepped:
            names |= {f"{key}.{name}" for name in self._masters for key in (*MOMENTS, COUNT)}
        if names != tensors.keys():
            different = sorted(names ^ tensors.keys())
            raise SetupError(
                f"the checkpoint is not of this policy: {len(different)} tensor names differ, first {different[0]!r}; "
                "use the model and LoRA settings it was made with, or another run directory"
            )
        for name, master in wanted.items():
            got = tensors[name]
            if got.shape != master.shape or got.dtype != master.dtype:
                raise SetupError(
                    f"the checkpoint is not of this policy: {name!r} should be {master.dtype} {tuple(master.shape)}, "
                    f"got {got.dtype} {tuple(got.shape)}; use the model and dtype it was made with"
                )

    def _make_master(self, parameter: nn.Parameter) -> Tensor:
        if parameter.dtype not in LOW_PRECISION:
            return parameter
        master = parameter.detach().to(torch.float32, copy=True).requires_grad_()

        def gather(finished: Tensor) -> None:
            if finished.grad is not None and master.grad is not None:
                master.grad.add_(finished.grad)
                finished.grad = None

        parameter.register_post_accumulate_grad_hook(gather)
        return master

    @torch.no_grad()
    def _round_to_parameters(self) -> None:
        for name, parameter in self._parameters.items():
            if name not in self._parts and parameter is not self._masters[name]:
                parameter.copy_(self._masters[name])
