"""What an engine worker hosts: models that sample, whatever engine runs them.

:class:`~wingbeat.workers.engine.EngineWorker` drives all of them alike, one ``step`` after the other, and swaps their
weights between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from wingbeat.core.config import EngineConfig
from wingbeat.core.ports import EngineStats, GenerateRequest, TokenEvent
from wingbeat.core.weight_protocol import Manifest
from wingbeat.core.worker_protocol import PolicySpec
from wingbeat.engines.embedded import AdapterMerger, EmbeddedEngine, EngineOptions, GrammarCompiler
from wingbeat.trainer.models import load_model
from wingbeat.weights.receive import Received
from wingbeat.workers.main import resolve_device
from wingbeat.workers.shared_engine import SharedEngine


class ModelHost(Protocol):
    """One model in memory, at one version; driven by one thread."""

    @property
    def policy_version(self) -> int: ...
    @property
    def lineage(self) -> int:
        """Of :attr:`policy_version`."""
        ...

    def submit(self, request: GenerateRequest) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def has_work(self) -> bool: ...
    def step(self) -> list[TokenEvent]:
        """What came since the last call; short, as other models and messages wait meanwhile.

        Hosts that share an engine take one step together: that of one of them brings what came for all.
        """
        ...

    def stats(self) -> EngineStats: ...
    def serve(self, manifest: Manifest, weights: Received | None) -> None:
        """Serve these weights from the next step on; None: those of the model folder itself.

        Raises WingbeatError, OSError, RuntimeError or ValueError where that cannot be, and then serves what it served.
        """
        ...

    def close(self) -> None:
        """Free what it holds; nothing is called afterwards."""
        ...


class Backend(Protocol):
    """Makes model hosts."""

    def load(self, spec: PolicySpec, *, pinned: bool = False) -> ModelHost:
        """The policy's base model.  May take its time.  ``pinned``: beside the live one, for an evaluation."""
        ...

    def close(self) -> None:
        """Free what all of them share."""
        ...


def engine_options(config: EngineConfig, *, context_tokens: int | None) -> EngineOptions:
    """What the configuration says of one embedded engine."""
    return EngineOptions(
        max_running=config.max_running,
        kv_tokens=config.kv_tokens,
        prefill_tokens=config.prefill_tokens,
        kv_on_update=config.kv_on_update,
        context_tokens=context_tokens,
    )


class EmbeddedHost:
    """A model on the embedded engine, in one process or in several."""

    def __init__(
        self,
        engine: EmbeddedEngine,
        tensors: Callable[[Manifest, Received], Mapping[str, Tensor]],
        *,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """``tensors``: what the engine takes of received weights; ``close`` frees what does not go with this object."""
        self._engine = engine
        self._tensors = tensors
        self.close = close
        self.submit = engine.submit
        self.abort = engine.abort
        self.has_work = engine.has_work
        self.step = engine.step
        self.stats = engine.stats
        self.kv_bytes = engine.kv_bytes
        self.export_kv = engine.export_kv
        self.import_kv = engine.import_kv

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    @property
    def lineage(self) -> int:
        return self._engine.lineage

    def serve(self, manifest: Manifest, weights: Received | None) -> None:
        if weights is not None:
            self._engine.update_weights(
                self._tensors(manifest, weights),
                policy_version=manifest.version,
                partial=manifest.adapter is not None,
                lineage=manifest.lineage,
            )


class WholeWeights:
    """Received weights as a model that is whole in this process takes them; adapters are merged onto its base."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._merger: AdapterMerger | None = None

    def tensors(self, manifest: Manifest, weights: Received) -> Mapping[str, Tensor]:
        if manifest.adapter is None:
            return weights.tensors
        if self._merger is None:
            self._merger = AdapterMerger(self._model, adapter=manifest.adapter)
        return self._merger.merge(weights.tensors)


class EmbeddedBackend:
    """Models on the embedded engine, in this process."""

    def __init__(self, config: EngineConfig, *, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._grammars = cache(GrammarCompiler)
        """By model folder: a live policy and its pinned versions have one tokenizer."""
        self._shared: dict[str, SharedEngine] = {}
        """By group of policies (``lora.group``)."""

    def load(self, spec: PolicySpec, *, pinned: bool = False) -> ModelHost:
        lora = spec.config.get("lora")
        group = lora and lora.get("group")
        if not group:
            engine, model = self._engine(spec, context_tokens=spec.context_tokens)
            return EmbeddedHost(engine, WholeWeights(model).tensors)
        shared = self._shared.get(group)
        if shared is None:
            # None of its policies says how long the contexts of the others are.
            engine, _ = self._engine(spec, context_tokens=None)
            shared = self._shared[group] = SharedEngine(engine, on_empty=lambda: self._shared.pop(group))
        return shared.host(spec)

    def _engine(self, spec: PolicySpec, *, context_tokens: int | None) -> tuple[EmbeddedEngine, PreTrainedModel]:
        device = resolve_device(self._config.device)
        dtype = getattr(torch, spec.config["dtype"])
        loaded = load_model(spec.model, dtype=dtype, device=device)
        options = engine_options(self._config, context_tokens=context_tokens)
        engine = EmbeddedEngine(
            loaded.model, config=options, grammars=self._grammars(loaded.folder), device=device, seed=self._seed
        )
        return engine, loaded.model

    def close(self) -> None:
        """Nothing is shared but grammars."""
