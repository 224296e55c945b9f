"""LoRA adapters, named as PEFT names them, merged and served."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

from wingbeat.core.errors import ModelSourceError
from wingbeat.core.weight_protocol import AdapterInfo
from wingbeat.engines.embedded import AdapterMerger

RANK, ALPHA = 4, 6.0


def _adapted(model: Any, *, seed: int, targets: list[str] | None = None) -> Any:
    torch.manual_seed(seed)
    config = LoraConfig(r=RANK, lora_alpha=int(ALPHA), target_modules=targets or ["q_proj", "down_proj"])
    adapted = get_peft_model(copy.deepcopy(model), config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return adapted.eval()


def test_an_engine_serves_what_peft_computes(harness: Any) -> None:
    model = harness.make_model()
    engine = harness.engine(model)
    merger = AdapterMerger(model, adapter=AdapterInfo(RANK, ALPHA))
    prompt = harness.prompt(25, seed=1)
    for version in (1, 2):
        adapted = _adapted(model, seed=version)
        merged = merger.merge(get_peft_model_state_dict(adapted))
        engine.update_weights(merged, policy_version=version, partial=True)
        engine.submit(harness.request(str(version), prompt, 10))
        reply = harness.drain(engine)[str(version)]
        harness.assert_close(reply.logprobs, harness.reference(adapted, prompt, reply.token_ids))


def test_merging_is_base_plus_scaled_product_in_the_base_dtype() -> None:
    linear = torch.nn.Linear(2, 2, bias=False)
    model = torch.nn.Sequential(linear)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    merger = AdapterMerger(model, adapter=AdapterInfo(rank=1, alpha=2.0))
    tensors = {
        "base_model.model.0.lora_A.weight": torch.tensor([[1.0, 2.0]]),
        "base_model.model.0.lora_B.weight": torch.tensor([[3.0], [4.0]]),
    }
    merged = merger.merge(tensors)
    assert merged["0.weight"].tolist() == [[7.0, 12.0], [8.0, 17.0]]
    with torch.no_grad():
        linear.weight.copy_(merged["0.weight"])
    assert merger.merge(tensors)["0.weight"].tolist() == [[7.0, 12.0], [8.0, 17.0]]
    assert merger.modules == ("0",)


def test_adapters_that_cannot_be_merged_are_refused(harness: Any) -> None:
    model = harness.make_model()
    good = get_peft_model_state_dict(_adapted(model, seed=1))
    merger = AdapterMerger(model, adapter=AdapterInfo(RANK, ALPHA))
    some_a = next(name for name in good if "lora_A" in name)
    with pytest.raises(ModelSourceError, match="pairs"):
        merger.merge({k: v for k, v in good.items() if k != some_a})
    with pytest.raises(ModelSourceError, match="shapes"):
        merger.merge({**good, some_a: good[some_a][:2]})
    with pytest.raises(ModelSourceError, match="lora_magnitude"):
        merger.merge({**good, "base_model.model.x.lora_magnitude_vector.weight": torch.zeros(1)})
    with pytest.raises(ModelSourceError, match=r"only nn\.Linear"):
        merger.merge(
            {
                "base_model.model.model.norm.lora_A.weight": torch.zeros(RANK, 32),
                "base_model.model.model.norm.lora_B.weight": torch.zeros(32, RANK),
            }
        )
    merger.merge(good)
    other = get_peft_model_state_dict(_adapted(model, seed=1, targets=["q_proj"]))
    with pytest.raises(ModelSourceError, match="missing"):
        merger.merge(other)


def test_a_tied_head_is_refused_since_merging_it_would_change_the_embedding(harness: Any) -> None:
    model = harness.make_model("qwen3-tied")
    merger = AdapterMerger(model, adapter=AdapterInfo(RANK, ALPHA))
    with pytest.raises(ModelSourceError, match="tied"):
        merger.merge(
            {
                "base_model.model.lm_head.lora_A.weight": torch.zeros(RANK, 32),
                "base_model.model.lm_head.lora_B.weight": torch.zeros(harness.vocabulary, RANK),
            }
        )


def test_a_partial_update_must_be_asked_for(harness: Any) -> None:
    model = harness.make_model()
    engine = harness.engine(model)
    name = "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(ModelSourceError, match="lack"):
        engine.update_weights({name: model.state_dict()[name]}, policy_version=1)
    engine.update_weights({name: model.state_dict()[name]}, policy_version=1, partial=True)
    assert engine.policy_version == 1
