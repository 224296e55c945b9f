"""Which models can be driven over a tree, and that the others are found out and keep their rows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    DogeConfig,
    DogeForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from wingbeat.core.config.trainer import TrainerConfig
from wingbeat.core.errors import SetupError
from wingbeat.trainer import tree_flex, tree_scorer
from wingbeat.trainer.logprobs import LogprobModel
from wingbeat.trainer.loss_config import LossConfig
from wingbeat.trainer.rows import Row
from wingbeat.trainer.tree_plan import TreePlan
from wingbeat.trainer.tree_scorer import TreeScorer
from wingbeat.trainer.update import GradientPass

CPU = torch.device("cpu")
MakeRows = Callable[[np.random.Generator], list[Row]]


def _trees(model: Any, **settings: Any) -> TreeScorer:
    return TreeScorer(LogprobModel(model, chunk_tokens=8), **({"backend": "auto", "device": CPU} | settings))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma2", "softcap", "gemma3", "cohere", "granite"])
def test_models_with_known_attention_are_driven(kind: str, dtype: torch.dtype, build_model: Callable[..., Any]) -> None:
    assert _trees(build_model(kind).to(dtype)).unsupported is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_and_sinks_are_driven(dtype: torch.dtype, build_model: Callable[..., Any]) -> None:
    assert _trees(build_model("gptoss").to(dtype)).unsupported is None


def test_a_state_space_model_is_not() -> None:
    config = MambaConfig(vocab_size=48, hidden_size=16, state_size=4, num_hidden_layers=2, pad_token_id=0)
    assert _trees(MambaForCausalLM(config).eval()).unsupported is not None


def test_linear_attention_is_not() -> None:
    config = Qwen3_5TextConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        pad_token_id=0,
    )
    assert "linear_attention" in str(_trees(Qwen3_5ForCausalLM(config).eval()).unsupported)


def test_a_layer_that_looks_at_its_neighbour_is_not(build_model: Callable[..., Any]) -> None:
    """A convolution over the packed order: nothing but the comparison with rows can find it."""
    model = build_model("qwen3")
    layer = model.model.layers[0].mlp
    layer.forward = lambda x, original=layer.forward: original(
        x + x.roll(1, 1) * (torch.arange(x.shape[1]) > 0)[:, None]
    )
    assert "differ" in str(_trees(model).unsupported)


def test_a_window_that_never_reaches_the_attention_is_not(build_model: Callable[..., Any]) -> None:
    """It would be a mask of the model's own, which small trees do not show."""
    model = build_model("llama")
    model.config.sliding_window = 4096
    assert "windows" in str(_trees(model).unsupported)


def test_an_unknown_attention_keyword_is_not(build_model: Callable[..., Any]) -> None:
    model = build_model("qwen3")
    decoder = model.model
    decoder.forward = lambda original=decoder.forward, **keywords: original(**keywords, position_bias=torch.ones(1))
    assert "position_bias" in str(_trees(model).unsupported)


def test_attention_with_a_bias_of_its_own_is_not() -> None:
    """Doge's is learnt and zero at first, so that no comparison with rows would show that it is lost."""
    config = DogeConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=0,
    )
    assert "bias of its own" in str(_trees(DogeForCausalLM(config).eval()).unsupported)


def test_a_decoder_without_keywords_is_not(build_model: Callable[..., Any]) -> None:
    model = build_model("qwen3")
    decoder = model.model

    def forward(
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        inputs_embeds: Any = None,
        use_cache: Any = None,
    ) -> Any:
        return type(decoder).forward(decoder, input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache)

    decoder.forward = forward
    assert "attention interface" in str(_trees(model).unsupported)


def test_the_models_own_attention_comes_back(build_model: Callable[..., Any], make_rows: MakeRows) -> None:
    model = build_model("gemma3")
    ids = torch.arange(20)[None]
    before = model(input_ids=ids).logits
    trees = _trees(model)
    with trees.scored(TreePlan.of(make_rows(np.random.default_rng(0)))):
        assert model.config._attn_implementation == "wingbeat_tree"
    with pytest.raises(KeyError), trees.scored(TreePlan.of(make_rows(np.random.default_rng(0)))):
        raise KeyError
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(input_ids=ids).logits, before)


def test_flex_needs_cuda(build_model: Callable[..., Any]) -> None:
    with pytest.raises(SetupError, match="needs a CUDA device, got cpu"):
        _trees(build_model("qwen3"), backend="flex")


def test_without_a_compiler_trees_attend_by_products_and_say_so(
    build_model: Callable[..., Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_nothing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Failed to find C compiler\nplease specify one")

    monkeypatch.setattr(tree_flex, "_compiled", lambda: compile_nothing)
    monkeypatch.setattr(tree_scorer, "_resolved", lambda *_, **__: "flex")
    with caplog.at_level(logging.WARNING, logger="wingbeat"):
        made = _trees(build_model("qwen3"), backend="auto")
    assert (made.backend, made.unsupported) == ("auto", None)
    assert "cannot be compiled here (RuntimeError: Failed to find C compiler)" in caplog.records[0].getMessage()
    with pytest.raises(SetupError, match=r"prefix_tree_backend = 'flex': .*Failed to find C compiler.*use 'auto'"):
        _trees(build_model("qwen3"), backend="flex")


def test_every_kind_of_layer_is_compiled_before_training(
    build_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads or a window of later layers may be too much for the device, where those of the first one are not."""
    tried: list[Any] = []

    def compile_first(query: Any, key: Any, value: Any, *, block_mask: Any, **_: Any) -> Any:
        tried.append(block_mask)
        if block_mask is not tried[0]:
            raise RuntimeError("out of resource: shared memory")
        return query + 0.0 * (key.sum() + value.sum())

    monkeypatch.setattr(tree_flex, "_compiled", lambda: compile_first)
    monkeypatch.setattr(tree_scorer, "_resolved", lambda *_, **__: "flex")
    made = _trees(build_model("gemma3"), backend="auto")
    assert len(tried) == 3 and (made.backend, made.unsupported) == ("auto", None)


def _gradient_pass(model: Any, config: TrainerConfig) -> GradientPass:
    return GradientPass(
        LogprobModel(model, chunk_tokens=8),
        config=config,
        loss_config=LossConfig.resolve(config, context_tokens=32),
        device=CPU,
    )


def test_a_model_that_keeps_its_rows_is_logged_once(
    build_model: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = build_model("llama")
    model.config.sliding_window = 4096
    with caplog.at_level(logging.WARNING, logger="wingbeat"):
        made = _gradient_pass(model, TrainerConfig())
    assert not made.supports_trees
    (record,) = caplog.records
    assert "LlamaForCausalLM cannot share forwards over a prefix tree: its sliding windows" in record.getMessage()


def test_trees_that_were_demanded_and_cannot_be_had_are_refused(build_model: Callable[..., Any]) -> None:
    model = build_model("llama")
    model.config.sliding_window = 4096
    with pytest.raises(SetupError, match=r"prefix_tree = 'on', but LlamaForCausalLM .* set it to 'auto' or 'off'"):
        _gradient_pass(model, TrainerConfig(prefix_tree="on"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention has a backward pass on CUDA only")
@pytest.mark.parametrize("kind", ["qwen3", "gemma3", "softcap", "gptoss"])
def test_flex_gives_the_gradient_of_the_mask(kind: str, build_model: Callable[..., Any], make_rows: MakeRows) -> None:
    device = torch.device("cuda")
    model = build_model(kind).to(device)
    plan = TreePlan.of(make_rows(np.random.default_rng(0)))
    found: list[torch.Tensor] = []
    for backend in ("flex", "mask"):
        model.zero_grad()
        with _trees(model, backend=backend, device=device).scored(plan) as (logprobs_N, _):
            logprobs_N.sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert (found[0] - found[1]).norm() / found[1].norm() <= 1e-3
