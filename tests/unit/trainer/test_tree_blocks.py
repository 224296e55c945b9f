"""A tree's attention cut into blocks: every visible pair once, and kernels that agree with dense attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from wingbeat.trainer import tree_flex
from wingbeat.trainer.rows import Row
from wingbeat.trainer.tree_attention import choose_blocks
from wingbeat.trainer.tree_blocks import Block, segment_blocks, visible, whole_block
from wingbeat.trainer.tree_flex import BLOCK, FlexAttention, block_visibility
from wingbeat.trainer.tree_kernels import CpuKernel, Kernel, PlainKernel, TreeAttention
from wingbeat.trainer.tree_plan import TreePlan

MakeRows = Callable[[np.random.Generator], list[Row]]
MakeRow = Callable[..., Row]


def _long_plan(make_row: MakeRow, *, seed: int = 0) -> TreePlan:
    """Segments longer than a tile, and leaves that end at many depths."""
    rng = np.random.default_rng(seed)
    prompt, left = rng.integers(0, 48, 150), rng.integers(0, 48, 60)
    paths = [prompt, *(np.concatenate([prompt, left, rng.integers(0, 48, size)]) for size in (3, 140, 20))]
    paths += [np.concatenate([prompt[:140], rng.integers(0, 48, size)]) for size in (20, 70)]
    return TreePlan.of([make_row(rng, path, start=1) for path in paths])


def _seen(plan: TreePlan, window: int | None) -> np.ndarray:
    """Pair by pair, from the definition."""
    whole = slice(0, plan.num_tokens)
    places = np.arange(plan.num_tokens)
    seen = (places[None, :] <= places[:, None]) & (places[:, None] < plan.tout_T[None, :])
    if window is not None:
        seen &= plan.positions_T[:, None] - plan.positions_T[None, :] < window
    assert np.array_equal(seen, visible(plan, whole, whole, window=window))
    return seen


def _assert_covered(plan: TreePlan, blocks: list[Block], window: int | None) -> None:
    count = np.zeros((plan.num_tokens, plan.num_tokens), np.int64)
    met = np.zeros(plan.num_tokens, np.bool_)
    for block in blocks:
        shape = (block.q_stop - block.q_start, block.k_stop - block.k_start)
        if block.kind == "masked":
            part = visible(plan, block.queries, block.keys, window=window)
        else:
            part = np.tril(np.ones(shape, np.bool_)) if block.kind == "causal" else np.ones(shape, np.bool_)
        assert part.any(1).all(), "a query without keys has no softmax"
        count[block.queries, block.keys] += part
        assert block.first == (not met[block.queries].any())
        met[block.queries] = True
    assert np.array_equal(count, _seen(plan, window))


@settings(deadline=None, derandomize=True, max_examples=40)
@given(seed=st.integers(0, 10**6), window=st.sampled_from([None, 1, 2, 5, 9, 100]))
def test_blocks_hold_each_visible_pair_once(seed: int, window: int | None, make_rows: MakeRows) -> None:
    plan = TreePlan.of(make_rows(np.random.default_rng(seed)))
    _assert_covered(plan, segment_blocks(plan, window=window), window)
    _assert_covered(plan, whole_block(plan) if plan.num_tokens else [], window)


@pytest.mark.parametrize("window", [None, 1, 30, 128, 200, 330])
def test_long_segments_are_cut_so_that_a_window_saves_work(window: int | None, make_row: MakeRow) -> None:
    plan = _long_plan(make_row)
    blocks = segment_blocks(plan, window=window)
    _assert_covered(plan, blocks, window)
    if window == 30:
        assert sum(block.area for block in blocks) < 0.65 * sum(b.area for b in segment_blocks(plan, window=None))


def test_full_attention_wastes_nothing_but_half_squares(make_row: MakeRow) -> None:
    plan = _long_plan(make_row)
    blocks = segment_blocks(plan, window=None)
    assert len(blocks) == plan.num_segments
    assert sum(block.area for block in blocks) <= _seen(plan, None).sum()


def test_auto_takes_one_mask_only_for_crowds_of_short_segments(make_row: MakeRow) -> None:
    rng = np.random.default_rng(0)
    crowd = TreePlan.of([make_row(rng, np.concatenate([[1], rng.integers(0, 48, 3)]), start=1) for _ in range(60)])
    assert [block.kind for block in choose_blocks(crowd, window=None, backend="auto", width=64)] == ["masked"]
    assert len(choose_blocks(crowd, window=None, backend="nodes", width=64)) == crowd.num_segments
    plan = _long_plan(make_row)
    assert choose_blocks(plan, window=None, backend="auto", width=256) == segment_blocks(plan, window=None)


def test_the_smaller_the_model_the_more_one_call_may_compute(make_row: MakeRow) -> None:
    """Eight groups of eight short replies: 480 tokens in 72 segments or so."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 48, 4) for _ in range(8)]
    rows = [make_row(rng, np.concatenate([prompts[i % 8], rng.integers(0, 48, 8)]), start=4) for i in range(64)]
    plan = TreePlan.of(rows)
    assert choose_blocks(plan, window=None, backend="auto", width=64) == whole_block(plan)
    assert choose_blocks(plan, window=None, backend="auto", width=1024) == segment_blocks(plan, window=None)


def _inputs(plan: TreePlan, *, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Four query heads on two key heads, as views a model would pass, and sinks."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(4, 8), (2, 8), (2, 8)]
    tensors = [torch.randn(1, plan.num_tokens, *size, generator=generator, dtype=dtype) for size in sizes]
    sinks = torch.randn(4, generator=generator, dtype=dtype)
    return [tensor.transpose(1, 2).requires_grad_() for tensor in tensors] + [sinks.requires_grad_()]


def _dense(
    plan: TreePlan, inputs: list[Tensor], *, window: int | None, softcap: float | None, with_sinks: bool
) -> Tensor:
    query, key, value, sinks = inputs
    scores = query @ key.repeat_interleave(2, 1).mT * 0.3
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~torch.from_numpy(_seen(plan, window)), -math.inf)
    if with_sinks:
        column = sinks[None, :, None, None].expand(1, 4, plan.num_tokens, 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return weights @ value.repeat_interleave(2, 1)


def _by_blocks(
    plan: TreePlan, inputs: list[Tensor], blocks: list[Block], *, kernel: Kernel, window: int | None, with_sinks: bool
) -> Tensor:
    query, key, value, sinks = inputs
    masks = [
        kernel.mask(torch.from_numpy(visible(plan, b.queries, b.keys, window=window)), dtype=query.dtype)
        if b.kind == "masked"
        else None
        for b in blocks
    ]
    output: Any = TreeAttention.apply(query, key, value, sinks if with_sinks else None, kernel, blocks, masks)
    return output


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize(
    "kernel",
    [CpuKernel(0.3), pytest.param(PlainKernel(0.3), marks=pytest.mark.slow), PlainKernel(0.3, softcap=1.2)],
)
@pytest.mark.parametrize("whole", [True, False])
def test_kernels_agree_with_dense_attention(
    whole: bool, kernel: CpuKernel | PlainKernel, window: int | None, with_sinks: bool, make_row: MakeRow
) -> None:
    plan = _long_plan(make_row)
    blocks = whole_block(plan) if whole else segment_blocks(plan, window=window)
    inputs = _inputs(plan)
    softcap = kernel.softcap if isinstance(kernel, PlainKernel) else None
    wanted = _dense(plan, inputs, window=window, softcap=softcap, with_sinks=with_sinks)
    got = _by_blocks(plan, inputs, blocks, kernel=kernel, window=window, with_sinks=with_sinks)
    torch.testing.assert_close(got, wanted, atol=1e-12, rtol=1e-12)
    gradient = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    used = inputs if with_sinks else inputs[:3]
    pairs = zip(torch.autograd.grad(got, used, gradient), torch.autograd.grad(wanted, used, gradient), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, atol=1e-11, rtol=1e-11)


def test_values_may_have_another_head_size(make_row: MakeRow) -> None:
    plan = _long_plan(make_row)
    query, key, value, sinks = _inputs(plan)
    inputs = [query, key, value.detach()[..., :5].requires_grad_(), sinks]
    blocks = segment_blocks(plan, window=None)
    got = _by_blocks(plan, inputs, blocks, kernel=PlainKernel(0.3), window=None, with_sinks=False)
    wanted = _dense(plan, inputs, window=None, softcap=None, with_sinks=False)
    torch.testing.assert_close(got, wanted, atol=1e-12, rtol=1e-12)


# --- FlexAttention ------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 30, 200])
@pytest.mark.parametrize("seed", [0, 1])
def test_flex_blocks_miss_nothing_and_trust_nothing_partial(seed: int, window: int | None, make_row: MakeRow) -> None:
    plan = _long_plan(make_row, seed=seed)
    some_QK, all_QK = block_visibility(plan, window=window)
    seen = _seen(plan, window)
    for q in range(some_QK.shape[0]):
        for k in range(some_QK.shape[1]):
            tile = seen[q * BLOCK : (q + 1) * BLOCK, k * BLOCK : (k + 1) * BLOCK]
            assert some_QK[q, k] or not tile.any()
            assert not all_QK[q, k] or (tile.all() and tile.shape == (BLOCK, BLOCK))
    assert all_QK.any() or window is not None
    assert not some_QK.all()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
@pytest.mark.parametrize(
    ("window", "softcap", "with_sinks"), [pytest.param(None, None, False, marks=pytest.mark.slow), (30, 1.2, True)]
)
def test_flex_attention_sees_what_dense_attention_sees(
    window: int | None, softcap: float | None, with_sinks: bool, make_row: MakeRow
) -> None:
    """Forward and uncompiled, which is what it can do on any machine."""
    plan = _long_plan(make_row)
    inputs = [tensor.detach() for tensor in _inputs(plan, dtype=torch.float32)]
    flex = FlexAttention(plan, device=torch.device("cpu"), compiled=False)
    extra = {"sliding_window": window, "softcap": softcap, "s_aux": inputs[3] if with_sinks else None}
    got = flex(*inputs[:3], layer=0, scaling=0.3, extra=extra).transpose(1, 2)
    wanted = _dense(plan, inputs, window=window, softcap=softcap, with_sinks=with_sinks)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.slow
def test_trees_of_all_sizes_share_a_few_kernels(monkeypatch: pytest.MonkeyPatch, make_row: MakeRow) -> None:
    """What would be compiled is counted, and not compiled."""
    kernels: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        kernels.append(graph)
        return graph

    compiled = torch.compile(flex_attention, dynamic=True, backend=backend)
    monkeypatch.setattr(tree_flex, "_compiled", lambda: compiled)
    rng = np.random.default_rng(0)
    for size in (7, 129, 300):
        prompt = rng.integers(0, 48, 5)
        tokens = [np.concatenate([prompt, rng.integers(0, 48, size)]) for _ in range(2)]
        plan = TreePlan.of([make_row(rng, row, start=1) for row in tokens])
        query, key, value = (torch.randn(1, heads, plan.num_tokens, 16) for heads in (4, 2, 2))
        for window in (None, 16):
            flex = FlexAttention(plan, device=torch.device("cpu"))
            flex(query, key, value, layer=0, scaling=0.3, extra={"sliding_window": window})
    assert len(kernels) <= 4
