"""Real faults between a real engine and a real trainer, and the alarm that each sets off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from wingbeat.core.config import HealthConfig, PolicyConfig, TrainerConfig
from wingbeat.core.ports import GenerateRequest, TokenEvent
from wingbeat.core.samples import EpisodeSamples, TrainingBatch, TrainingSample
from wingbeat.core.types import SamplingParams
from wingbeat.dataflow.health import Alarm, HealthMonitor
from wingbeat.engines.embedded import EmbeddedEngine, EngineOptions
from wingbeat.environments.calculator.tokenizer import write_tokenizer
from wingbeat.trainer.models import load_model
from wingbeat.trainer.single import PolicyTrainer

VOCABULARY = 384
PROMPT_TOKENS = 6
STEPS = 4


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and nothing else."""

    engine_dtype: torch.dtype = torch.float32
    temperature_told: float | None = None
    """What the samples claim; None: the truth."""
    updates_engine: bool = True
    """Else it goes on with its first weights under each new version's name."""
    change: Callable[[TrainingSample], TrainingSample] = lambda sample: sample


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.15,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    write_tokenizer(path)
    return path


def alarms_of(folder: Path, fault: Fault, *, top_p: float = 1.0) -> dict[str, Alarm]:
    """Train a few steps with the fault; every alarm that began."""
    trainer = PolicyTrainer(
        folder,
        config=PolicyConfig(model="x", context_tokens=64, trainer=TrainerConfig(learning_rate=5e-3)),
        total_steps=STEPS,
        seed=0,
        device="cpu",
        dtype=torch.float32,
    )
    model = load_model(folder, dtype=fault.engine_dtype, device=torch.device("cpu")).model
    engine = EmbeddedEngine(model, config=EngineOptions(kv_tokens=4096), device="cpu", seed=1)
    monitor = HealthMonitor(HealthConfig(), dtype="float32", max_staleness=0)
    began: dict[str, Alarm] = {}
    for step in range(1, STEPS + 1):
        batch = _batch(engine, step=step, fault=fault, top_p=top_p)
        report = monitor.observe(trainer.train_step(batch).metrics)
        began |= {alarm.name: alarm for alarm in report.began}
        weights = trainer.published_tensors() if fault.updates_engine else {}
        engine.update_weights(
            {name: tensor.to(fault.engine_dtype) for name, tensor in weights.items()},
            policy_version=step,
            partial=not fault.updates_engine,
        )
    return began


def _batch(engine: EmbeddedEngine, *, step: int, fault: Fault, top_p: float) -> TrainingBatch:
    """Two groups of four episodes, as the engine samples them at temperature 0.7."""
    prompts = torch.randint(0, VOCABULARY, (8, PROMPT_TOKENS), generator=torch.Generator().manual_seed(step)).tolist()
    for index, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=24, temperature=0.7, top_p=top_p)
        engine.submit(GenerateRequest(str(index), prompt, params))
    events: list[list[TokenEvent]] = [[] for _ in prompts]
    while engine.has_work():
        for event in engine.step():
            events[int(event.request_id)].append(event)
    told = 0.7 if fault.temperature_told is None else fault.temperature_told
    episodes = tuple(
        EpisodeSamples(
            episode_id=f"e{index}",
            attempt=1,
            group_id=f"g{index // 4}",
            policy="p",
            agent="",
            reward=float(index % 2),
            samples=(fault.change(_sample(prompts[index], found, temperature=told)),),
        )
        for index, found in enumerate(events)
    )
    return TrainingBatch(batch_id=f"b{step}", policy="p", step=step, episodes=episodes, seed=step)


def _sample(prompt: list[int], events: list[TokenEvent], *, temperature: float) -> TrainingSample:
    tokens = [token for event in events for token in event.token_ids]
    blobs = [blob for event in events for blob in (event.supports or (b"",) * len(event.token_ids))]
    table = tuple(dict.fromkeys(blob for blob in blobs if blob))
    before = np.full(len(prompt), -1, np.int32)
    return TrainingSample.build(
        "s",
        token_ids=np.asarray([*prompt, *tokens], np.int32),
        sampled=np.asarray([0] * len(prompt) + [1] * len(tokens), np.uint8),
        sampling_logprobs=np.asarray([0.0] * len(prompt) + [p for e in events for p in e.logprobs], np.float32),
        versions=np.concatenate([before, [e.policy_version for e in events for _ in e.token_ids]]).astype(np.int32),
        temperature=temperature,
        support_table=table,
        support_index=np.concatenate([before, [table.index(b) if b else -1 for b in blobs]]).astype(np.int32),
    )


def test_a_healthy_run_sets_off_no_alarm(folder: Path) -> None:
    assert alarms_of(folder, Fault()) == {}
    assert alarms_of(folder, Fault(), top_p=0.6) == {}


def test_a_sampler_in_bfloat16_under_a_trainer_in_float32(folder: Path) -> None:
    assert alarms_of(folder, Fault(engine_dtype=torch.bfloat16)).keys() == {"mismatch"}


def test_a_wrong_temperature(folder: Path) -> None:
    assert "mismatch" in alarms_of(folder, Fault(temperature_told=1.0))


def test_stale_weights_under_a_new_version_s_name(folder: Path) -> None:
    alarm = alarms_of(folder, Fault(updates_engine=False))["mismatch"]
    assert alarm.value > alarm.limit == 1e-5
    assert "served_checksum" in alarm.text


def test_a_dropped_support_of_top_p(folder: Path) -> None:
    def drop(sample: TrainingSample) -> TrainingSample:
        return msgspec.structs.replace(sample, support_table=(), support_index=b"")

    assert "mismatch" in alarms_of(folder, Fault(change=drop), top_p=0.6)


def test_tokens_without_a_usable_logprob(folder: Path) -> None:
    def forget(sample: TrainingSample) -> TrainingSample:
        logprobs = sample.sampling_logprobs_T.copy()
        logprobs[-8:] = np.nan
        return msgspec.structs.replace(sample, sampling_logprobs=logprobs.tobytes())

    alarm = alarms_of(folder, Fault(change=forget))["tokens"]
    assert alarm.value == pytest.approx(8 / 24)
