"""The head's own forward and backward, against autograd over whole logits."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from wingbeat.trainer.head import HeadTask, LogitTransform, is_plain, score_with_head

N, H, V = 11, 6, 23


def _task(*, transform: LogitTransform, allowed_NV: Tensor | None, entropy_gradient: bool, chunk: int) -> HeadTask:
    generator = torch.Generator().manual_seed(1)
    return HeadTask(
        targets_N=torch.arange(N) % V,
        temperatures_N=0.5 + torch.rand(N, generator=generator),
        allowed=lambda piece: None if allowed_NV is None else allowed_NV[piece],
        transform=transform,
        chunk_tokens=chunk,
        entropy_gradient=entropy_gradient,
    )


def _naive(hidden_NH: Tensor, head: nn.Linear, task: HeadTask, allowed_NV: Tensor | None) -> tuple[Tensor, Tensor]:
    logits_NV = task.transform(head(hidden_NH)) / task.temperatures_N[:, None].to(hidden_NH.dtype)
    allowed_NV = torch.ones_like(logits_NV, dtype=torch.bool) if allowed_NV is None else allowed_NV
    logprobs_NV = torch.where(allowed_NV, logits_NV, -math.inf).log_softmax(-1)
    terms_NV = logprobs_NV.exp() * torch.where(allowed_NV, logprobs_NV, 0.0)
    return logprobs_NV.gather(1, task.targets_N[:, None])[:, 0], -terms_NV.sum(-1)


@pytest.mark.parametrize("chunk", [4, 100])
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("supports", [False, True])
@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(0.3), LogitTransform(0.7, softcap=2.0)])
def test_gradients_are_those_of_whole_logits(
    transform: LogitTransform, supports: bool, frozen: bool, entropy_gradient: bool, chunk: int
) -> None:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        head = nn.Linear(H, V, bias=True, dtype=torch.float64).requires_grad_(not frozen)
        hidden_NH = torch.randn(N, H, dtype=torch.float64).requires_grad_()
        weights = torch.randn(2, N, dtype=torch.float64)
        allowed_NV = torch.rand(N, V) < 0.4 if supports else None
    if allowed_NV is not None:
        allowed_NV[torch.arange(N), torch.arange(N) % V] = True
    task = _task(transform=transform, allowed_NV=allowed_NV, entropy_gradient=entropy_gradient, chunk=chunk)
    leaves = [hidden_NH] if frozen else [hidden_NH, head.weight, head.bias]
    got, wanted = score_with_head(hidden_NH, head, task), _naive(hidden_NH, head, task, allowed_NV)
    assert got[1].requires_grad == entropy_gradient
    for left, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(left, right, atol=1e-12, rtol=1e-12)
    grads = [
        torch.autograd.grad((weights[0] * logprobs).sum() + entropy_gradient * (weights[1] * entropy).sum(), leaves)
        for logprobs, entropy in (got, wanted)
    ]
    for left, right in zip(*grads, strict=True):
        torch.testing.assert_close(left, right, atol=1e-12, rtol=1e-10)


def test_bfloat16_weights_are_scored_in_float32() -> None:
    """No worse than autograd over float32 logits of the same bfloat16 product."""
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(H, V, bias=False).bfloat16()
    hidden_NH = torch.randn(N, H, generator=generator).bfloat16().requires_grad_()
    task = _task(transform=LogitTransform(), allowed_NV=None, entropy_gradient=False, chunk=4)
    got, entropy_N = score_with_head(hidden_NH, head, task)
    assert got.dtype == entropy_N.dtype == torch.float32
    logits_NV = head(hidden_NH).float() / task.temperatures_N[:, None]
    wanted = logits_NV.log_softmax(-1).gather(1, task.targets_N[:, None])[:, 0]
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-6)
    for left, right in zip(
        torch.autograd.grad(got.sum(), [hidden_NH, head.weight]),
        torch.autograd.grad(wanted.sum(), [hidden_NH, head.weight]),
        strict=True,
    ):
        assert left.dtype == torch.bfloat16
        torch.testing.assert_close(left, right, atol=0.03, rtol=0.02)


def test_bfloat16_gradients_are_as_good_in_many_chunks() -> None:
    """Chunks are added up in float32: in bfloat16 the error of 64 chunks is four times that of one."""
    generator = torch.Generator().manual_seed(0)
    count = 2048
    weight_VH = torch.randn(V, H, generator=generator).bfloat16()
    bias_V = torch.randn(V, generator=generator).bfloat16()
    hidden_NH = torch.randn(count, H, generator=generator).bfloat16()
    weights_N = torch.rand(count, generator=generator)

    def gradients(dtype: torch.dtype, chunk: int) -> list[Tensor]:
        head = nn.Linear(H, V, dtype=dtype)
        with torch.no_grad():
            head.weight.copy_(weight_VH)
            head.bias.copy_(bias_V)
        task = HeadTask(
            targets_N=torch.arange(count) % 3,
            temperatures_N=torch.ones(count),
            allowed=lambda _piece: None,
            transform=LogitTransform(),
            chunk_tokens=chunk,
            entropy_gradient=False,
        )
        loss = (score_with_head(hidden_NH.to(dtype), head, task)[0] * weights_N).sum()
        return list(torch.autograd.grad(loss, [head.weight, head.bias]))

    wanted = gradients(torch.float32, count)

    def pairs(chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(gradients(torch.bfloat16, chunk), wanted, strict=True)

    errors = {
        chunk: [float((got - want).norm() / want.norm()) for got, want in pairs(chunk)]
        for chunk in (count, count // 64)
    }
    assert all(few <= 2 * one for one, few in zip(errors[count], errors[count // 64], strict=True)), errors


def test_a_gradient_of_a_gradient_is_refused() -> None:
    head = nn.Linear(H, V).requires_grad_(False)
    hidden_NH = torch.randn(N, H, generator=torch.Generator().manual_seed(0)).requires_grad_()
    task = _task(transform=LogitTransform(), allowed_NV=None, entropy_gradient=False, chunk=4)
    loss = score_with_head(hidden_NH, head, task)[0].square().sum()
    (grad,) = torch.autograd.grad(loss, [hidden_NH], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_heads_that_are_more_than_a_product_are_left_to_autograd() -> None:
    head = nn.Linear(H, V)
    assert is_plain(head)
    assert not is_plain(nn.Sequential(head))
    for add in (head.register_forward_hook, head.register_forward_pre_hook, head.register_full_backward_pre_hook):
        handle = add(lambda *_: None)
        assert not is_plain(head)
        handle.remove()
    head.forward = lambda input: input
    assert not is_plain(head)
