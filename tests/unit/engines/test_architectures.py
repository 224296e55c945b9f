"""Every architecture that the refusals name as tested, against transformers' own forward pass."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from wingbeat.core.errors import ModelSourceError
from wingbeat.engines.embedded import EmbeddedEngine, EngineOptions, parallel
from wingbeat.engines.embedded.parallel import UNPLANNED
from wingbeat.engines.embedded.probe import TESTED

VOCABULARY = 96
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}  # fmt: skip
"""All names that the families have for these sizes; each takes those that it knows."""
WINDOWED = {"MistralForCausalLM", "MixtralForCausalLM", "Gemma3ForCausalLM", "Cohere2ForCausalLM"}


def build(name: str, **more: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    shape = SHAPE | ({"sliding_window": 16} if name in WINDOWED else {}) | more
    model = model_class(_config_class(name)(**shape))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.15)
    return model.eval()


def _config_class(name: str) -> Any:
    return transformers.Gemma3TextConfig if name == "Gemma3ForCausalLM" else getattr(transformers, name).config_class


@pytest.mark.slow
@pytest.mark.parametrize("name", TESTED)
def test_its_logprobs_are_those_of_a_plain_forward_pass(harness: Any, name: str) -> None:
    model = build(name)
    prompt = harness.prompt(30, seed=1)
    expected = harness.reference  # of the untouched model: the engine switches the attention of the one it gets
    own = build(name)
    engine = EmbeddedEngine(own, config=EngineOptions(max_running=2, kv_tokens=256, prefill_tokens=20), device="cpu")
    engine.submit(harness.request("r", prompt, 8))
    reply = harness.drain(engine)["r"]
    harness.assert_close(reply.logprobs, expected(model, prompt, reply.token_ids))


class Threads:
    """torch.distributed between threads in the place of processes."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=30)
        self._slots: list[Tensor] = [torch.empty(0)] * size
        self._local = threading.local()

    def run(self, work: Callable[[int], Tensor]) -> list[Tensor]:
        """What each thread makes of its rank."""

        def begin(rank: int) -> Tensor:
            self._local.rank = rank
            return work(rank)

        size = len(self._slots)
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(begin, range(size)))

    def all_reduce(self, own: Tensor) -> None:
        own.copy_(torch.stack(self._all(own)).sum(0))

    def all_gather(self, found: list[Tensor], own: Tensor) -> None:
        for into, tensor in zip(found, self._all(own), strict=True):
            into.copy_(tensor)

    def gather(self, own: Tensor, found: list[Tensor] | None = None, *, dst: int) -> None:
        assert (self._local.rank == dst) == (found is not None)
        tensors = self._all(own)
        for into, tensor in zip(found or (), tensors, strict=found is not None):
            into.copy_(tensor)

    def _all(self, own: Tensor) -> list[Tensor]:
        self._slots[self._local.rank] = own.clone()
        self._barrier.wait()
        found = list(self._slots)
        self._barrier.wait()
        return found


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TESTED if name not in UNPLANNED])
def test_split_over_two_it_computes_the_same(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    threads = Threads(2)
    monkeypatch.setattr(parallel, "dist", threads)
    whole, parts = build(name), [build(name), build(name)]
    ids = torch.arange(1, 31).unsqueeze(0)

    @torch.no_grad()
    def forward(rank: int) -> Tensor:
        shards = parallel.shard_model(parts[rank], rank=rank, size=2)
        assert shards.parts, "something is split"
        return cast(Any, parts[rank])(input_ids=ids).logits

    with torch.no_grad():
        expected = cast(Any, whole)(input_ids=ids).logits
    torch.testing.assert_close(threads.run(forward)[0], expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "more", "why"),
    [
        ("Gemma2ForCausalLM", {}, "softcap"),
        ("GptOssForCausalLM", {}, "s_aux"),
        ("StableLmForCausalLM", {}, "cannot be driven"),
        ("PhimoeForCausalLM", {"sliding_window": 16}, "masks a sliding window of 16 tokens"),
    ],
)
def test_others_are_refused_by_name_with_the_list(name: str, more: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelSourceError, match=why) as refusal:
        EmbeddedEngine(build(name, **more), config=EngineOptions(kv_tokens=256), device="cpu")
    message = str(refusal.value)
    assert name in message and "Qwen3ForCausalLM" in message and "use vllm" in message
