"""Which slices of a model each process of a tensor parallel engine holds; no processes are started."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

from wingbeat.core.errors import ModelSourceError
from wingbeat.engines.embedded import parallel
from wingbeat.engines.embedded.parallel import Shards, shard_model
from wingbeat.engines.embedded.parallel_commands import Command, Peers, Pipe
from wingbeat.engines.embedded.parallel_runner import Follower, LeadRunner


def _shards(model: Any, size: int) -> list[Shards]:
    return [shard_model(copy.deepcopy(model), rank=rank, size=size) for rank in range(size)]


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-tied", "llama", "gemma3"])
def test_the_slices_of_all_processes_make_up_the_model(harness: Any, kind: str) -> None:
    model = harness.make_model(kind)
    full = model.state_dict()
    shards = _shards(model, 2)
    cut = set(shards[0].parts)
    assert {name for name in cut if "layers.0." in name} == {
        f"model.layers.0.{part}.weight"
        for part in (
            *(f"self_attn.{name}_proj" for name in "qkvo"),
            *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
        )
    }
    assert ("lm_head.weight" in cut) == (kind in ("qwen3", "llama")), "tied heads are needed whole for the embeddings"
    for name, tensor in full.items():
        own = [s.local(name, tensor) for s in shards]
        if name in cut:
            assert torch.equal(torch.cat(own, shards[0].parts[name].dim), tensor)
            assert own[0].shape == own[1].shape
        else:
            assert all(torch.equal(piece, tensor) for piece in own)


def test_a_cut_model_holds_its_slices_alone(harness: Any) -> None:
    model = harness.make_model("llama")
    full, size = copy.deepcopy(model.state_dict()), 2
    shards = shard_model(model, rank=1, size=size)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, shards.local(name, full[name]))
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, "nothing keeps the full tensor alive"


def test_more_processes_than_kv_heads_hold_the_same_heads(harness: Any) -> None:
    shards = _shards(harness.make_model("qwen3"), 4)  # 4 query heads of size 8, 2 key/value heads
    ranges = [s.parts["model.layers.1.self_attn.k_proj.weight"].ranges for s in shards]
    assert ranges == [((0, 8),), ((0, 8),), ((8, 16),), ((8, 16),)]
    assert [s.parts["model.layers.1.self_attn.q_proj.weight"].ranges for s in shards] == [
        ((start, start + 8),) for start in (0, 8, 16, 24)
    ]
    assert [s.kv_part for s in shards] == [0, 0, 1, 1]
    assert all(s.kv_holders() == [0, 2] for s in shards)


def test_a_lora_pair_is_cut_so_that_its_product_is_the_slice_of_the_product(harness: Any) -> None:
    shards = _shards(harness.make_model("qwen3"), 2)
    for module, shape in (("model.layers.0.self_attn.q_proj", (32, 32)), ("model.layers.0.mlp.down_proj", (32, 48))):
        a, b = torch.randn(3, shape[1]), torch.randn(shape[0], 3)
        for own in shards:
            own_a, own_b = own.local_adapter(module, a, b)
            torch.testing.assert_close(own_b @ own_a, own.local(f"{module}.weight", b @ a))


def test_tensors_that_are_longer_or_shorter_than_the_models_are_refused(harness: Any) -> None:
    shards = shard_model(harness.make_model("qwen3"), rank=0, size=2)
    for length in (harness.vocabulary - 1, harness.vocabulary + 1):
        with pytest.raises(ModelSourceError, match=rf"lm_head.weight: expected {harness.vocabulary} along"):
            shards.local("lm_head.weight", torch.zeros(length, 32))
    with pytest.raises(ModelSourceError, match="q_proj: expected 32 along"):
        shards.local_adapter("model.layers.0.self_attn.q_proj", torch.zeros(2, 32), torch.zeros(33, 2))


@pytest.mark.parametrize(("size", "words"), [(3, "does not divide the heads"), (8, "4 query heads and 2 key/value")])
def test_heads_that_do_not_divide_are_refused_by_name(harness: Any, size: int, words: str) -> None:
    with pytest.raises(ModelSourceError, match=words) as refusal:
        shard_model(harness.make_model("qwen3"), rank=0, size=size)
    assert f"engine.tensor_parallel = {size}" in str(refusal.value) and "Qwen3ForCausalLM" in str(refusal.value)


def test_a_model_without_a_plan_is_refused_with_what_was_tested() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=16, n_positions=8))
    with pytest.raises(ModelSourceError, match=r"GPT2LMHeadModel declares no tensor parallel plan.*LlamaForCausalLM"):
        shard_model(model, rank=0, size=2)


def test_experts_are_cut_along_their_neurons() -> None:
    shape = MixtralConfig(
        vocab_size=16, hidden_size=8, intermediate_size=6, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=3,
    )  # fmt: skip
    parts = [s.parts for s in _shards(MixtralForCausalLM(shape), 2)]
    up, down = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"
    assert [p[up].ranges for p in parts] == [((0, 3), (6, 9)), ((3, 6), (9, 12))], "gates and ups go together"
    assert [p[down].ranges for p in parts] == [((0, 3),), ((3, 6),)]


class Mirror(Peers):
    """The other ranks' view of the commands: a follower in this process that carries each out at once."""

    def __init__(self, model: Any) -> None:
        super().__init__([])
        whole = Shards(0, 1, 1)
        pipe: Any = type("Quiet", (), {"send": lambda self, frames: None})()
        self.follower = Follower(
            cast(Pipe, pipe), rank=0, size=1, device=torch.device("cpu"), load_model=lambda *_: model
        )
        self.follower._load(0, "", "float32")  # pyright: ignore[reportPrivateUsage]
        self.lead = LeadRunner(
            copy.deepcopy(model), shards=whole, capacity_tokens=256, device=torch.device("cpu"), peers=self, number=0
        )

    def tell(self, command: Command, *, later: bool = False) -> None:
        self.follower._do(command)  # pyright: ignore[reportPrivateUsage]

    @property
    def stores(self) -> list[Any]:
        runner = self.follower._hosted[0].runner  # pyright: ignore[reportPrivateUsage]
        assert runner is not None
        return [self.lead.store, runner.store]


@torch.inference_mode()
def test_whatever_happens_to_kv_on_rank_0_happens_on_all_ranks(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that held NaN is cleared everywhere, or a later request of another rank's heads would meet it."""
    alone = SimpleNamespace(all_reduce=lambda own: own, gather=lambda own, found, dst: found[0].copy_(own))
    monkeypatch.setattr(parallel, "dist", alone)
    mirror = Mirror(harness.make_model("qwen3"))
    lead, stores = mirror.lead, mirror.stores

    def agree() -> bool:
        return all(
            torch.allclose(torch.cat(ours), torch.cat(theirs), equal_nan=True)
            for ours, theirs in zip(stores[0].ranges(0), stores[1].ranges(0), strict=True)
        )

    lead.ensure(64)
    assert stores[1].keys[0].shape[1] == stores[0].keys[0].shape[1] >= 64
    for store in stores:
        store.keys[0][:, :32] = 1.0
        store.values[1][:, 8:16] = torch.nan
    lead.copy(0, 32, tokens=8)
    assert stores[1].keys[0][:, 32:40].eq(1.0).all() and agree()
    lead.clear(8, tokens=8)
    assert not stores[1].values[1].isnan().any() and not stores[1].keys[0][:, 8:16].any() and agree()
    lead.clear_all()
    assert not stores[1].keys[0].any() and agree()
    lead.close()
    assert not mirror.follower._hosted  # pyright: ignore[reportPrivateUsage]
