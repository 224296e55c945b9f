"""Several policies, and pinned versions of them, on one embedded engine: adapters over one base model.

Each :class:`SharedHost` is a model host to the worker.  The engine takes a step for all of them at once.  The first of
them stands for all: it has work while any has, and its step brings the tokens of all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

from wingbeat.core.errors import ConfigError, ModelSourceError
from wingbeat.core.ports import EngineStats, GenerateRequest, TokenEvent
from wingbeat.core.weight_protocol import Manifest
from wingbeat.core.worker_protocol import PolicySpec
from wingbeat.engines.embedded import AdapterWeights, EmbeddedEngine
from wingbeat.weights.receive import Received


class SharedEngine:
    """The engine of some policies; ``on_empty`` is called when the last of their hosts was closed."""

    def __init__(self, engine: EmbeddedEngine, *, on_empty: Callable[[], object]) -> None:
        self.engine = engine
        self._on_empty = on_empty
        self._hosts: list[SharedHost] = []
        self._host_of: dict[str, SharedHost] = {}
        """By request that has not ended."""
        self._ids = itertools.count()

    def host(self, spec: PolicySpec) -> SharedHost:
        """Another model on this engine.  Raises ConfigError where its contexts are longer than the engine's."""
        if spec.context_tokens > self.engine.context_tokens:
            raise ConfigError(
                f"policies.{spec.name}.context_tokens must be at most {self.engine.context_tokens}, which its model and"
                f" engine.kv_tokens allow, got {spec.context_tokens}",
                param="context_tokens",
            )
        host = SharedHost(self, f"{spec.name}#{next(self._ids)}")
        self._hosts.append(host)
        return host

    def is_first(self, host: SharedHost) -> bool:
        """Whether this host stands for all.  May be asked on any thread."""
        return self._hosts[:1] == [host]

    def submit(self, host: SharedHost, request: GenerateRequest) -> None:
        """Queue a request that runs with the host's adapter."""
        self.engine.submit(replace(request, adapter=host.adapter))
        self._host_of[request.request_id] = host
        host.requests.add(request.request_id)

    def step(self) -> list[TokenEvent]:
        """One step for all hosts: their tokens, each with the version of its own policy."""
        return [self._labelled(event) for event in self.engine.step()]

    def close(self, host: SharedHost) -> None:
        """Forget a host, its requests and its adapter."""
        for request_id in tuple(host.requests):
            self._host_of.pop(request_id)
            self.engine.abort(request_id)
        self.engine.drop_adapter(host.adapter)
        self._hosts.remove(host)
        if not self._hosts:
            self._on_empty()

    def _labelled(self, event: TokenEvent) -> TokenEvent:
        host = self._host_of.get(event.request_id)
        if host is None:  # of a host that was closed
            return event
        host.sampled_tokens += len(event.token_ids)
        if event.finish_reason is not None:
            del self._host_of[event.request_id]
            host.requests.discard(event.request_id)
        return replace(event, policy_version=host.policy_version, lineage=host.lineage)


class SharedHost:
    """One policy at one version, as its worker sees it (``workers.hosting.ModelHost``)."""

    def __init__(self, shared: SharedEngine, adapter: str) -> None:
        self._shared = shared
        self.adapter = adapter
        """Its adapter's name in the engine."""
        self.policy_version = 0
        self.lineage = 0
        self.sampled_tokens = 0
        self.requests: set[str] = set()

    def submit(self, request: GenerateRequest) -> None:
        self._shared.submit(self, request)

    def abort(self, request_id: str) -> None:
        self._shared.engine.abort(request_id)

    def has_work(self) -> bool:
        return self._shared.is_first(self) and self._shared.engine.has_work()

    def step(self) -> list[TokenEvent]:
        return self._shared.step()

    def stats(self) -> EngineStats:
        """Its own requests and sampled tokens; prompts are counted together, by the host that stands for all."""
        engine = self._shared.engine
        whole, counts = engine.stats(), self._shared.is_first(self)
        running = sum(request_id in self.requests for request_id in engine.running())
        return replace(
            whole,
            running=running,
            waiting=max(0, len(self.requests) - running),
            sampled_tokens=self.sampled_tokens,
            prefilled_tokens=whole.prefilled_tokens if counts else 0,
            reused_tokens=whole.reused_tokens if counts else 0,
            policy_version=self.policy_version,
        )

    def serve(self, manifest: Manifest, weights: Received | None) -> None:
        adapter = None
        if weights is not None:
            if manifest.adapter is None:
                raise ModelSourceError(
                    f"policy {manifest.policy!r} shares its base model with others (lora.group), and can only serve"
                    " adapters, got a full set of weights; leave lora.group out of it"
                )
            adapter = AdapterWeights(weights.tensors, manifest.adapter)
        self._shared.engine.put_adapter(self.adapter, adapter)
        self.policy_version, self.lineage = manifest.version, manifest.lineage

    def close(self) -> None:
        self._shared.close(self)
