"""Chunked log-probabilities against the naive ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from wingbeat.core.errors import SetupError
from wingbeat.trainer.logprobs import LogprobModel, Targets

LENGTHS = [9, 6, 4]
KINDS = ["qwen3", "llama", "gemma2", "cohere", "granite"]


def _inputs(seed: int = 1) -> dict[str, Tensor]:
    """Three right-padded rows in which every token but the first of a row is a target."""
    generator = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(48, (len(LENGTHS), max(LENGTHS)), generator=generator)
    mask_BT = torch.tensor([[1] * n + [0] * (max(LENGTHS) - n) for n in LENGTHS])
    rows_N = torch.tensor([row for row, n in enumerate(LENGTHS) for _ in range(n - 1)])
    sources_N = torch.tensor([t for n in LENGTHS for t in range(n - 1)])
    return {
        "input_ids_BT": ids_BT * mask_BT,
        "attention_mask_BT": mask_BT,
        "rows_N": rows_N,
        "sources_N": sources_N,
        "targets_N": ids_BT[rows_N, sources_N + 1],
        "temperatures_N": 0.5 + torch.rand(len(rows_N), generator=generator),
    }


def _naive(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    logits_BTV = model(input_ids=inputs["input_ids_BT"], attention_mask=inputs["attention_mask_BT"]).logits.float()
    logits_NV = logits_BTV[inputs["rows_N"], inputs["sources_N"]] / inputs["temperatures_N"][:, None]
    logprobs_NV = logits_NV.log_softmax(-1)
    entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    return logprobs_NV.gather(1, inputs["targets_N"][:, None])[:, 0], entropy_N


def _chunked(model: Any, inputs: dict[str, Tensor], chunk_tokens: int) -> tuple[Tensor, Tensor]:
    return _scored(LogprobModel(model, chunk_tokens=chunk_tokens), inputs)


def _scored(scorer: LogprobModel, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    places = {name: inputs[name] for name in ("attention_mask_BT", "rows_N", "sources_N")}
    return scorer(inputs["input_ids_BT"], **places, targets=_targets(inputs))


def _targets(inputs: dict[str, Tensor], supports: list[bytes] | None = None) -> Targets:
    """Each target with the support of its place, b"" for the whole vocabulary."""
    table = [blob for blob in supports or [] if blob]
    places = [-1 if not blob else table.index(blob) for blob in supports or [b""] * len(inputs["targets_N"])]
    return Targets(inputs["targets_N"], inputs["temperatures_N"], np.asarray(places, np.int64), tuple(table))


@pytest.mark.parametrize("kind", KINDS)
def test_chunked_equals_naive(kind: str, build_model: Callable[..., Any]) -> None:
    """Value, entropy and gradient, also with soft-capped (Gemma) and scaled (Cohere, Granite) logits."""
    model, inputs = build_model(kind), _inputs()
    wanted, wanted_entropy = _naive(model, inputs)
    weights_N = torch.linspace(-1, 1, len(wanted))
    (weights_N * wanted).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    got, entropy = _chunked(model, inputs, 4)
    assert not entropy.requires_grad
    (weights_N * got).sum().backward()
    torch.testing.assert_close(got, wanted, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(entropy, wanted_entropy, atol=2e-6, rtol=1e-6)
    assert gradients
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=3e-6, rtol=1e-4, msg=name)


def test_heads_of_another_size_speak_of_the_same_tokens(build_model: Callable[..., Any]) -> None:
    """A wider head's further logits take no probability; a narrower one gives what it lacks none."""
    model, inputs = build_model("llama"), _inputs()
    inputs["targets_N"] %= 40
    logits_BTV = model(input_ids=inputs["input_ids_BT"], attention_mask=inputs["attention_mask_BT"]).logits
    logits_NV = logits_BTV[inputs["rows_N"], inputs["sources_N"]] / inputs["temperatures_N"][:, None]
    wanted = logits_NV[:, :40].log_softmax(-1).gather(1, inputs["targets_N"][:, None])[:, 0]
    narrow, _ = _scored(LogprobModel(model, chunk_tokens=4, vocabulary=40), inputs)
    torch.testing.assert_close(narrow, wanted, atol=2e-6, rtol=1e-6)
    same, _ = _scored(LogprobModel(model, chunk_tokens=4), inputs)
    inputs["targets_N"][0] = 50
    wide, _ = _scored(LogprobModel(model, chunk_tokens=4, vocabulary=60), inputs)
    assert wide[0] == -torch.inf
    torch.testing.assert_close(wide[1:], same[1:], atol=2e-6, rtol=1e-6)


class CountingHead(nn.Module):
    """Records how many positions are turned into logits per call."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head
        self.calls: list[int] = []

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls.append(hidden.shape[:-1].numel())
        return self.head(hidden)


def test_logits_never_exist_for_more_than_a_chunk(build_model: Callable[..., Any]) -> None:
    model, inputs = build_model("llama"), _inputs()
    scorer = LogprobModel(model, chunk_tokens=3)
    model.lm_head = CountingHead(model.lm_head)
    logprobs, _ = _scored(scorer, inputs)
    forward = list(model.lm_head.calls)
    logprobs.sum().backward()
    assert forward == [3, 3, 3, 3, 3, 1]
    assert sorted(model.lm_head.calls[len(forward) :]) == sorted(forward), "the backward pass recomputes each chunk"


@pytest.mark.parametrize("chunk_tokens", [1, 2, 7, 16, 1000])
def test_chunk_size_changes_nothing(chunk_tokens: int, build_model: Callable[..., Any]) -> None:
    model, inputs = build_model("qwen3"), _inputs()
    wanted, _ = _chunked(model, inputs, 16)
    got, _ = _chunked(model, inputs, chunk_tokens)
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=0)


def test_padding_is_ignored_whether_or_not_the_model_needs_a_mask(build_model: Callable[..., Any]) -> None:
    """A model that looks ahead gets the mask; a causal one gives the same without it."""
    model, inputs = build_model("qwen3"), _inputs()
    masks = _record_masks(model.model)
    _chunked(model, inputs, 4)
    assert masks[-1] is None
    leaking = build_model("qwen3")
    masks = _record_masks(leaking.model, leak=True)
    _chunked(leaking, inputs, 4)
    assert masks[-1] is inputs["attention_mask_BT"]


def _record_masks(decoder: Any, *, leak: bool = False) -> list[Tensor | None]:
    """Note the masks a decoder is given; with ``leak`` let it see all positions that are not masked."""
    masks: list[Tensor | None] = []

    def forward(original: Any = decoder.forward, **kwargs: Any) -> Any:
        mask = kwargs["attention_mask"]
        masks.append(mask)
        output = original(**kwargs)
        if leak:
            kept = torch.ones_like(kwargs["input_ids"]) if mask is None else mask
            output.last_hidden_state = output.last_hidden_state + (kwargs["input_ids"] * kept).sum()
        return output

    decoder.forward = forward
    return masks


def test_low_precision_weights_give_float32_logprobs(build_model: Callable[..., Any]) -> None:
    got, entropy = _chunked(build_model("qwen3").bfloat16(), _inputs(), 4)
    assert got.dtype == entropy.dtype == torch.float32


def test_no_targets(build_model: Callable[..., Any]) -> None:
    inputs = _inputs()
    for name in ("rows_N", "sources_N", "targets_N", "temperatures_N"):
        inputs[name] = inputs[name][:0]
    got, entropy = _chunked(build_model("qwen3"), inputs, 4)
    assert got.shape == entropy.shape == (0,)


def test_a_model_with_an_unknown_logit_transform_is_refused(build_model: Callable[..., Any]) -> None:
    model = build_model("gemma2")
    model.config.final_logit_softcapping = None
    LogprobModel(model, chunk_tokens=8)
    model.forward = lambda original=model.forward, **kwargs: _doubled(original(**kwargs))
    with pytest.raises(SetupError, match="Gemma2ForCausalLM cannot be trained"):
        LogprobModel(model, chunk_tokens=8)


def _doubled(output: Any) -> Any:
    output.logits = output.logits * 2
    return output


def test_a_bare_decoder_is_refused(build_model: Callable[..., Any]) -> None:
    with pytest.raises(SetupError, match=r"a decoder and output embeddings; use another model: .*llama"):
        LogprobModel(build_model("qwen3").model, chunk_tokens=8)


@pytest.mark.parametrize(("noise", "agrees"), [(0.02, True), (0.3, False), (math.nan, False)])
def test_bfloat16_hidden_states_agree_by_their_norm(
    noise: float, agrees: bool, build_model: Callable[..., Any]
) -> None:
    """Rounding in many layers makes some number of many stray far; a wrong mask moves whole tokens."""
    scorer = LogprobModel(build_model("qwen3").to(torch.bfloat16), chunk_tokens=8)
    generator = torch.Generator().manual_seed(0)
    wanted_TH, noise_TH = (torch.randn(12, 4096, generator=generator) for _ in range(2))
    got_TH = wanted_TH.clone()
    got_TH[3] += noise * noise_TH[3]
    assert scorer.agree(got_TH, wanted_TH) == agrees
    if agrees:
        assert (got_TH - wanted_TH).abs().max() > 0.05


def test_no_micro_batch_waits_for_cudnn_to_plan_its_attention(build_model: Callable[..., Any]) -> None:
    """Torch prefers it on Hopper, and it plans anew for every shape, in a second or so."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    LogprobModel(build_model("qwen3"), chunk_tokens=8)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
