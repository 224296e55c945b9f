"""The head of a language model on chosen tokens: logprob and entropy in one pass, logits for a few of them at a time.

What autograd would keep of a head is its logits, several times over: tokens x vocabulary, the largest tensors of
training.  Here forward and backward both go through the tokens in chunks and reuse two buffers; the backward computes
the logits again, from hidden states and one log-sum-exp per token.  With ``x`` a token's scaled logits, ``p`` their
softmax, ``H`` its entropy, and ``g``, ``e`` the gradients that reach its logprob and entropy::

    dL/dx_v = g (1[v = target] - p_v) - e p_v (x_v - lse + H)

Where the head's weights are frozen (LoRA), ``d logprob / d hidden`` needs nothing that is not there in the forward, so
it is kept, [N, H], and the backward multiplies by ``g``.

Log-sum-exps, softmax and entropy are at least float32, whatever the weights are; products with the weights are of
their dtype.

Letters: ``N`` targets, ``C`` of them in a chunk, ``H`` hidden size, ``V`` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """What a model does to its head's output; a factor and then a soft cap, as its config says."""

    factor: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: Any) -> LogitTransform:
        """Read from a Hugging Face config: ``logit_scale`` (Cohere), ``logits_scaling`` (Granite, a
        divisor) and ``final_logit_softcapping`` (Gemma)."""
        text = config.get_text_config()
        factor = float(getattr(text, "logit_scale", None) or 1.0) / float(getattr(text, "logits_scaling", None) or 1.0)
        softcap = getattr(text, "final_logit_softcapping", None)
        return cls(factor=factor, softcap=None if softcap is None else float(softcap))

    def __call__(self, logits: Tensor) -> Tensor:
        if self.factor != 1.0:
            logits = logits * self.factor
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def apply_(self, logits: Tensor, *, wants_slope: bool) -> Tensor | None:
        """In place; gives the derivative by the head's output where that is no constant and is wanted."""
        if self.softcap is None:
            if self.factor != 1.0:
                logits.mul_(self.factor)
            return None
        bent = logits.mul_(self.factor / self.softcap).tanh_()
        slope = None
        if wants_slope:
            slope = bent.square().neg_().add_(1.0).mul_(self.factor)
        bent.mul_(self.softcap)
        return slope


@dataclass(frozen=True, slots=True)
class HeadTask:
    """What to score, all [N], and how."""

    targets_N: Tensor
    temperatures_N: Tensor
    allowed: Callable[[slice], Tensor | None]
    """[C, V] which tokens could have been drawn, of some of the targets; None: any."""
    transform: LogitTransform
    chunk_tokens: int
    entropy_gradient: bool

    def chunks(self) -> Iterator[slice]:
        for start in range(0, len(self.targets_N), self.chunk_tokens):
            yield slice(start, min(start + self.chunk_tokens, len(self.targets_N)))


def is_plain(head: nn.Module) -> bool:
    """Whether the head is nothing but a matrix product, with its weights whole and at hand."""
    if type(head) is not nn.Linear or type(head.weight) not in (nn.Parameter, Tensor):
        return False
    hooks = (head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks)  # pyright: ignore[reportPrivateUsage]
    return not any(hooks) and "forward" not in vars(head)


def score_with_head(hidden_NH: Tensor, head: nn.Linear, task: HeadTask) -> tuple[Tensor, Tensor]:
    """Logprob and entropy [N] of the targets, at least float32; the entropy has a gradient where the task says so."""
    return _HeadScores.apply(hidden_NH, head.weight, head.bias, task)  # type: ignore[return-value]


class _Buffers:
    """Logits of one chunk, and space for as much again."""

    def __init__(self, weight_VH: Tensor, task: HeadTask) -> None:
        dtype = torch.promote_types(weight_VH.dtype, torch.float32)
        shape = (min(task.chunk_tokens, len(task.targets_N)), weight_VH.shape[0])
        self._logits = weight_VH.new_empty(shape, dtype=dtype)
        self._low = self._logits if dtype == weight_VH.dtype else weight_VH.new_empty(shape)
        self._spare: Tensor | None = None

    def scaled(
        self, inputs: tuple[Tensor, Tensor, Tensor | None], task: HeadTask, chunk: slice, *, wants_slope: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The chunk's scaled logits [C, V], -inf where not allowed; the transform's slope; what is allowed."""
        hidden_NH, weight_VH, bias_V = inputs
        count = chunk.stop - chunk.start
        low = torch.mm(hidden_NH[chunk], weight_VH.t(), out=self._low[:count])
        if bias_V is not None:
            low.add_(bias_V)
        logits = self._logits[:count]
        if low.dtype != logits.dtype:
            logits.copy_(low)
        slope = task.transform.apply_(logits, wants_slope=wants_slope)
        logits.div_(task.temperatures_N[chunk].to(logits.dtype)[:, None])
        allowed = task.allowed(chunk)
        if allowed is not None:
            logits.masked_fill_(~allowed, -math.inf)
        return logits, slope, allowed

    def spare(self, like: Tensor) -> Tensor:
        """[C, V] beside the logits."""
        if self._spare is None:
            self._spare = torch.empty_like(self._logits)
        return self._spare[: len(like)]

    def lowered(self, grad: Tensor) -> Tensor:
        """In the dtype of the weights."""
        return grad if self._low is self._logits else self._low[: len(grad)].copy_(grad)


class _HeadScores(torch.autograd.Function):
    """See the module."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, task: HeadTask
    ) -> tuple[Tensor, Tensor]:
        buffers, inputs = _Buffers(weight_VH, task), (hidden_NH, weight_VH, bias_V)
        dtype = torch.promote_types(weight_VH.dtype, torch.float32)
        logprobs_N, entropy_N, lse_N = hidden_NH.new_empty((3, len(task.targets_N)), dtype=dtype).unbind()
        needs = ctx.needs_input_grad
        keeps_slope_of_hidden = needs[0] and not (needs[1] or needs[2] or task.entropy_gradient)
        kept_NH = torch.empty_like(hidden_NH) if keeps_slope_of_hidden else None
        for chunk in task.chunks():
            logits, slope, allowed = buffers.scaled(inputs, task, chunk, wants_slope=keeps_slope_of_hidden)
            highest = logits.amax(-1)
            logits.sub_(highest[:, None])
            logprobs_N[chunk] = logits.gather(1, task.targets_N[chunk, None])[:, 0]
            weights = torch.exp(logits, out=buffers.spare(logits))
            total = weights.sum(-1)
            normaliser = total.log()
            logprobs_N[chunk] -= normaliser
            lse_N[chunk] = highest + normaliser
            if allowed is not None:
                logits.masked_fill_(~allowed, 0.0)  # their weight is 0, and 0 * -inf is none
            entropy_N[chunk] = normaliser - torch.bmm(weights[:, None], logits[:, :, None])[:, 0, 0] / total
            if kept_NH is not None:
                grad = weights.div_(total[:, None])
                _finish(grad, torch.ones_like(total), task, chunk, slope=slope)
                torch.mm(buffers.lowered(grad), weight_VH, out=kept_NH[chunk])
        ctx.task, ctx.keeps = task, kept_NH is not None
        if kept_NH is not None:
            ctx.save_for_backward(kept_NH)
        elif any(needs):
            ctx.save_for_backward(hidden_NH, weight_VH, bias_V, lse_N, entropy_N)
        if not task.entropy_gradient:
            ctx.mark_non_differentiable(entropy_N)
        ctx.set_materialize_grads(True)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor, entropy_grad_N: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.keeps:
            (kept_NH,) = ctx.saved_tensors
            return (kept_NH * grad_N[:, None]).to(kept_NH.dtype), None, None, None
        hidden_NH, weight_VH, bias_V, lse_N, entropy_N = ctx.saved_tensors
        task: HeadTask = ctx.task
        needs_hidden, needs_weight, needs_bias, _ = ctx.needs_input_grad
        buffers, inputs = _Buffers(weight_VH, task), (hidden_NH, weight_VH, bias_V)
        grad_hidden = torch.zeros_like(hidden_NH) if needs_hidden else None
        # Added up over chunks in float32: in bfloat16 the error would grow with their number.
        wide = lse_N.dtype
        grad_weight = torch.zeros_like(weight_VH, dtype=wide) if needs_weight else None
        grad_bias = torch.zeros_like(bias_V, dtype=wide) if needs_bias else None
        for chunk in task.chunks():
            logits, slope, allowed = buffers.scaled(inputs, task, chunk, wants_slope=True)
            logits.sub_(lse_N[chunk, None])
            grad = logits
            if task.entropy_gradient:
                grad = torch.exp(logits, out=buffers.spare(logits))
                if allowed is not None:
                    logits.masked_fill_(~allowed, 0.0)
                # -p (g + e (x - lse + H)): what _finish makes of p times this.
                logits.add_(entropy_N[chunk, None]).mul_(entropy_grad_N[chunk, None]).add_(grad_N[chunk, None])
                grad.mul_(logits)
                _finish(grad, grad_N[chunk], task, chunk, slope=slope, is_weighted=True)
            else:
                _finish(grad.exp_(), grad_N[chunk], task, chunk, slope=slope)
            low = buffers.lowered(grad)
            if grad_hidden is not None:
                torch.mm(low, weight_VH, out=grad_hidden[chunk])
            if grad_weight is not None:
                _add_product(grad_weight, low.t(), hidden_NH[chunk])
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        lowered = (None if total is None else total.to(weight_VH.dtype) for total in (grad_weight, grad_bias))
        return grad_hidden, *lowered, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _finish(
    probabilities_CV: Tensor,
    grad_C: Tensor,
    task: HeadTask,
    chunk: slice,
    *,
    slope: Tensor | None,
    is_weighted: bool = False,
) -> None:
    """In place, from softmax (``is_weighted``: times what reaches it) to the gradient of the head's output."""
    scale_C = 1.0 / task.temperatures_N[chunk].to(grad_C.dtype)
    factor = task.transform.factor if slope is None else 1.0
    weight_C = -factor * scale_C if is_weighted else -factor * scale_C * grad_C
    probabilities_CV.mul_(weight_C[:, None])
    probabilities_CV.scatter_add_(1, task.targets_N[chunk, None], (factor * scale_C * grad_C)[:, None])
    if slope is not None:
        probabilities_CV.mul_(slope)
