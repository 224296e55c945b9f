"""LoRA policies of one group as adapters on one real vLLM server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from rig import Replies, Rig, gap, logits_of
from torch import Tensor

from wingbeat.core.weight_protocol import AdapterInfo
from wingbeat.engines.embedded import AdapterMerger

CLOSE = 1e-4
TOKENS = 900
ATTEMPTS = 5
"""On a busy machine vLLM's own server may lag, so that all tokens are sampled before the first of them is seen."""
RANKS = {"solver": 8, "critic": 4}


def adapter(rig: Rig, *, rank: int, seed: int) -> tuple[dict[str, Tensor], AdapterInfo]:
    """Random matrices for every linear layer, as PEFT names them."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, module in rig.reference().named_modules():
        if isinstance(module, torch.nn.Linear) and "lm_head" not in name:
            for half, shape in (("A", (rank, module.in_features)), ("B", (module.out_features, rank))):
                tensor = torch.randn(shape, generator=generator) * 0.1
                tensors[f"base_model.model.{name}.lora_{half}.weight"] = tensor
    return tensors, AdapterInfo(rank=rank, alpha=16.0)


def merged(rig: Rig, tensors: dict[str, Tensor], info: AdapterInfo) -> Any:
    model = rig.reference()
    model.load_state_dict(AdapterMerger(model, adapter=info).merge(tensors), strict=False)
    return model


def test_adapters_of_two_policies_are_loaded_replaced_and_pinned_on_one_server(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(model="tied", names=("solver", "critic"), lora={"rank": 8, "alpha": 16.0, "group": "both"})
    hosts = {name: rig.load(name) for name in RANKS}
    models = {}
    for name, host in hosts.items():
        tensors, info = adapter(rig, rank=RANKS[name], seed=RANKS[name])
        rig.serve(host, rig.publish(tensors, version=1, policy=name, adapter=info))
        models[name] = merged(rig, tensors, info)
    for name, host in hosts.items():
        asked = Replies(host)
        asked.submit(f"{name}-a", list(range(1, 150)))
        (reply,) = asked.finish().values()
        assert gap(logits_of(models[name], list(range(1, 150)), reply), reply) < CLOSE, name

    older, newer, version = models["solver"], models["solver"], 1
    for attempt in range(ATTEMPTS):
        version += 1
        tensors, info = adapter(rig, rank=8, seed=77 + attempt)
        older, newer = newer, merged(rig, tensors, info)
        manifest = rig.publish(tensors, version=version, policy="solver", adapter=info)
        asked = Replies(hosts["solver"])
        asked.submit("solver-b", [5, 6, 7], max_tokens=TOKENS)
        asked.until(lambda asked=asked: len(asked.replies["solver-b"].tokens) >= 20)
        rig.serve(hosts["solver"], manifest)
        reply = asked.finish()["solver-b"]
        assert (len(reply.tokens), reply.error) == (TOKENS, "")
        if version in reply.versions:
            break
    cut = reply.versions.index(version)
    assert reply.versions == [version - 1] * cut + [version] * (TOKENS - cut)
    assert gap(logits_of(older, [5, 6, 7], reply), reply, end=cut) < CLOSE
    assert gap(logits_of(newer, [5, 6, 7], reply), reply, begin=cut) < CLOSE

    pinned = rig.load("solver", pinned=True)
    tensors, info = adapter(rig, rank=8, seed=8)  # version 1 again
    rig.serve(pinned, rig.publish(tensors, version=1, policy="solver", adapter=info))
    for host, model, served in ((pinned, models["solver"], 1), (hosts["solver"], newer, version)):
        asked = Replies(host)
        asked.submit(f"c{served}", list(range(1, 150)))
        (reply,) = asked.finish().values()
        assert set(reply.versions) == {served}
        assert gap(logits_of(model, list(range(1, 150)), reply), reply) < CLOSE
    pinned.close()
    assert hosts["critic"].policy_version == 1
