"""What these tests share: model hosts on a real vLLM server, and what torch says of what they sampled."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from wingbeat.core.config import EngineConfig, PolicyConfig
from wingbeat.core.ports import GenerateRequest, TokenEvent
from wingbeat.core.support import decode_support
from wingbeat.core.types import FinishReason, SamplingParams
from wingbeat.core.weight_protocol import AdapterInfo, Manifest
from wingbeat.core.worker_protocol import PolicySpec, Welcome, WorkerMessage
from wingbeat.weights.publish import WeightPublisher
from wingbeat.weights.receive import receive
from wingbeat.workers.hosting import ModelHost
from wingbeat.workers.receiving import Prepares
from wingbeat.workers.vllm_backend import VllmBackend

HOST = "this-host"
PATIENCE_S = 200.0
CONTEXT = 1024


@dataclass(slots=True)
class Reply:
    """What came for one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    supports: list[bytes] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str = ""

    def add(self, event: TokenEvent) -> None:
        self.tokens += event.token_ids
        self.logprobs += event.logprobs
        self.versions += [event.policy_version] * len(event.token_ids)
        self.supports += event.supports or (b"",) * len(event.token_ids)
        self.finish, self.error = event.finish_reason or self.finish, event.error or self.error


class Rig:
    """A backend, as an engine worker makes it, and the policies ``names`` on the model ``model``."""

    def __init__(
        self,
        models: Path,
        *,
        python: str,
        folder: Path,
        model: str,
        names: Sequence[str] = ("solver",),
        lora: Mapping[str, Any] | None = None,
        policy: Mapping[str, Any] | None = None,
        vllm: Mapping[str, Any] | None = None,
        **engine: Any,
    ) -> None:
        """``policy`` and ``vllm`` are further keys of those tables; an empty ``python`` is left out."""
        self.source = models / model
        own = {"python": python} if python else {}
        settings = {"backend": "vllm", "vllm": {**own, **(vllm or {})}, "kv_tokens": 32768, "threads": 1, **engine}
        config = EngineConfig.model_validate(settings)
        given = {"model": str(self.source), "context_tokens": CONTEXT, "lora": lora, **(policy or {})}
        found = PolicyConfig.model_validate(given)
        data, context = found.model_dump(mode="json"), found.context_tokens
        self.specs = tuple(PolicySpec(n, str(self.source), context, data) for n in names)
        self.sent: list[WorkerMessage] = []
        (folder / "logs").mkdir()
        welcome = Welcome("engine-0", 1.0, self.specs, str(folder), seed=0, engine=config.model_dump(mode="json"))
        self.backend = VllmBackend(config, welcome=welcome, send=self.sent.append)
        self.publishers = {
            name: WeightPublisher(folder / f"weights-{name}", host_id=HOST, policy=name) for name in names
        }

    def load(self, name: str = "solver", *, pinned: bool = False) -> ModelHost:
        (spec,) = [spec for spec in self.specs if spec.name == name]
        return self.backend.load(spec, pinned=pinned)

    def reference(self) -> Any:
        """The model in torch, to be given the same weights."""
        return AutoModelForCausalLM.from_pretrained(self.source).eval()

    def publish(
        self, tensors: Mapping[str, Tensor], *, version: int, policy: str = "solver", adapter: AdapterInfo | None = None
    ) -> Manifest:
        kind = "full" if adapter is None else "adapter"
        return self.publishers[policy].publish(
            tensors, version=version, kind=kind, base_model=str(self.source), adapter=adapter
        )

    def serve(self, host: ModelHost, manifest: Manifest, *, meanwhile: Callable[[], None] = lambda: None) -> None:
        """As an engine worker does it."""
        received = receive(manifest, host_id=HOST)
        while isinstance(host, Prepares) and not host.prepare(manifest, received):
            meanwhile()
        host.serve(manifest, received)

    def close(self) -> None:
        self.backend.close()
        for publisher in self.publishers.values():
            publisher.close()


class Replies:
    """Requests on one host, and what came of them."""

    def __init__(self, host: ModelHost) -> None:
        self.host = host
        self.prompts: dict[str, list[int]] = {}
        self.replies: dict[str, Reply] = defaultdict(Reply)

    def submit(self, name: str, prompt: Sequence[int], *, max_tokens: int = 8, **sampling: Any) -> None:
        self.prompts[name] = list(prompt)
        self.host.submit(GenerateRequest(name, prompt, SamplingParams(max_tokens=max_tokens, **sampling)))

    def step(self) -> None:
        for event in self.host.step():
            self.replies[event.request_id].add(event)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, dict(self.replies)
            self.step()

    def finish(self) -> dict[str, Reply]:
        """Run to the end of all."""
        self.until(lambda: not self.host.has_work())
        assert set(self.replies) == set(self.prompts)
        return dict(self.replies)


def perturb(model: Any, *, seed: int, scale: float = 0.05) -> dict[str, Tensor]:
    """Change all weights; what a trainer would publish (tied tensors once)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@torch.no_grad()
def logits_of(model: Any, prompt: Sequence[int], reply: Reply) -> Tensor:
    """[tokens, vocabulary] before each sampled token, by a plain forward."""
    return model(torch.tensor([[*prompt, *reply.tokens]])).logits[0, len(prompt) - 1 : -1]


def gap(logits: Tensor, reply: Reply, *, temperature: float = 1.0, begin: int = 0, end: int | None = None) -> float:
    """The largest difference between the reply's logprobs and those of the logits, over the tokens' supports."""
    scores = logits / temperature
    for row, blob in enumerate(reply.supports):
        scores[row, ~torch.from_numpy(decode_support(blob, vocabulary=scores.shape[1]))] = -torch.inf
    expected = scores.log_softmax(-1).gather(1, torch.tensor(reply.tokens).unsqueeze(1)).squeeze(1)
    return (expected - torch.tensor(reply.logprobs))[begin:end].abs().max().item()
