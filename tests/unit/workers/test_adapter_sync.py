"""What an engine serves after an adapter was sent to it."""

from __future__ import annotations

import queue
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from wingbeat.core.config import EngineConfig, LoraConfig, PolicyConfig
from wingbeat.core.weight_protocol import AdapterInfo, UpdateWeights, WeightsServed
from wingbeat.core.worker_protocol import PolicySpec, Shutdown, Welcome, WorkerMessage
from wingbeat.environments.calculator.tokenizer import write_tokenizer
from wingbeat.trainer.single import PolicyTrainer
from wingbeat.weights.checksum import tensors_checksum
from wingbeat.weights.publish import WeightPublisher
from wingbeat.workers.engine import EngineWorker
from wingbeat.workers.link import Connected, Inbound


def test_after_a_lora_sync_the_samplers_adapter_checksum_is_the_trainers_verl_7495(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_tokenizer(folder)
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=384, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(shape).save_pretrained(folder)
    config = PolicyConfig(model=str(folder), context_tokens=64, lora=LoraConfig(rank=2, alpha=4.0))
    spec = PolicySpec("solver", str(folder), 64, config.model_dump(mode="json"))
    trainer = PolicyTrainer(folder, config=config, total_steps=1, seed=1, device="cpu", dtype=torch.float32)
    with WeightPublisher(tmp_path / "weights", host_id="here", policy="solver") as publisher:
        manifests = []
        for version in (0, 1):
            adapter = trainer.published_tensors()
            for tensor in adapter.values():
                tensor.data.add_(version)
            manifests.append(
                publisher.publish(
                    adapter, version=version, kind="adapter", base_model=spec.model, adapter=AdapterInfo(2, 4.0)
                )
            )
        sent: list[WorkerMessage] = []
        settings = EngineConfig(max_running=2, kv_tokens=128, prefill_tokens=16).model_dump(mode="json")
        script: list[list[Inbound]] = [
            [Connected(Welcome("engine-0", 1.0, (spec,), "run", seed=1, engine=settings))],
            *([UpdateWeights(manifest)] for manifest in manifests),
        ]
        turns = iter(script)
        own: queue.SimpleQueue[Inbound] = queue.SimpleQueue()
        worker = EngineWorker("here", lambda *messages: sent.extend(messages), own.put)
        worker.run(lambda *, block: [own.get(timeout=20)] if worker.receiving.is_busy else next(turns, [Shutdown()]))
    served = [message.checksum for message in sent if isinstance(message, WeightsServed)]
    assert served == [manifest.checksum for manifest in manifests] and len(set(served)) == 2
    assert served[-1] == tensors_checksum(trainer.published_tensors()), "of the very tensors that the trainer holds"
