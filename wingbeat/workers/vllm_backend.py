"""Models on vLLM servers, as an engine worker hosts them.

Each fully trained or frozen policy has a server of its own; LoRA policies are adapters on a server of their base
model, which those of one ``lora.group`` share.  A version that an evaluation pins is another adapter, or another model:
on the embedded engine in this process, or on another server (``engine.vllm.pinned``).
"""

from __future__ import annotations

import itertools
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from wingbeat.core.config import EngineConfig
from wingbeat.core.errors import ModelSourceError, SetupError
from wingbeat.core.ports import EngineStats, GenerateRequest, TokenEvent
from wingbeat.core.weight_protocol import AdapterInfo, Manifest, WeightsServed
from wingbeat.core.worker_protocol import Failed, PolicySpec, Welcome, WorkerMessage
from wingbeat.engines.embedded.grammar import GrammarCompiler
from wingbeat.engines.vllm.engine import EngineSettings, VllmEngine
from wingbeat.engines.vllm.files import KeptFile, check_fits, model_shapes, write_adapter
from wingbeat.engines.vllm.flags import BASE, ServerSpec
from wingbeat.engines.vllm.running import check_running
from wingbeat.engines.vllm.served import Weights
from wingbeat.engines.vllm.server import OwnServer, RunningServer, Server
from wingbeat.trainer.models import resolve_model
from wingbeat.weights.receive import Received
from wingbeat.workers.hosting import EmbeddedBackend, ModelHost

logger = logging.getLogger(__name__)

STEP_WAIT_S = 0.002
"""A step waits so long for tokens: other models and messages wait meanwhile."""
Accept = Callable[[str, Mapping[str, Any]], None]
ASK_S = (0.005, 0.2)
"""Between questions whether the server has read new weights: at first, and at most."""


class Shared:
    """A server's engine, and those who use it."""

    def __init__(self, engine: VllmEngine, folder: Path, config: Any) -> None:
        self.engine = engine
        self.folder = folder
        self.config = config
        self.hosts: list[VllmHost] = []


class VllmHost:
    """A model, or an adapter, on a vLLM server.  One thread drives all hosts."""

    def __init__(
        self, shared: Shared, spec: PolicySpec, name: str, *, scratch: Path, is_live: bool, on_close: Callable[[], None]
    ) -> None:
        """``name`` is :data:`BASE`, or the adapter's own; ``scratch`` takes what vLLM reads adapters from."""
        self.is_live = is_live
        self._shared = shared
        self._engine = shared.engine
        self._spec = spec
        self._name = name
        self._scratch = scratch
        self._on_close = on_close
        self._model = self._engine.model(name)
        self._file: KeptFile | None = None
        self._shapes: dict[str, tuple[int, ...]] | None = None
        self._laid: tuple[KeptFile, list[str], AdapterInfo] | None = None
        """Of what the adapter's folder was made."""
        self._asked: tuple[Path | None, float, float] = (None, 0.0, 0.0)
        """What is being prepared, when to ask next (monotonic) and how long after that."""
        self.served: Manifest | None = None
        shared.hosts.append(self)

    @property
    def policy(self) -> str:
        return self._spec.name

    @property
    def policy_version(self) -> int:
        return self._model.version

    @property
    def lineage(self) -> int:
        return self._model.lineage

    def submit(self, request: GenerateRequest) -> None:
        self._engine.submit(request, model=self._name)

    def abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    def has_work(self) -> bool:
        return self._engine.has_work(self._name)

    def step(self) -> list[TokenEvent]:
        """Raises UnavailableError where the server is lost and does not come back: the worker should end, too."""
        return self._engine.step(self._name, wait_s=STEP_WAIT_S)

    def stats(self) -> EngineStats:
        return self._engine.stats(self._name)

    def prepare(self, manifest: Manifest, received: Received | None) -> bool:
        """Whether the server has read the weights; requests go on meanwhile.  Raises what ``serve`` raises."""
        if received is None:
            return True
        if manifest.adapter is not None:  # small; but it must not wait for a server that starts again
            return not self._engine.is_recovering
        path, at, pause = self._asked
        now = time.monotonic()
        if path != received.path:
            self._check(received)
            at, pause = now, ASK_S[0]
        elif now < at:
            if not self.has_work():
                time.sleep(min(at - now, ASK_S[0]))
            return False
        if self._engine.prepare(received.path):
            self._asked = (None, 0.0, 0.0)
            return True
        self._asked = (received.path, time.monotonic() + pause, min(2 * pause, ASK_S[1]))
        return False

    def serve(self, manifest: Manifest, weights: Received | None) -> None:
        """Raises ModelSourceError where they do not fit, UnavailableError where the server cannot load them."""
        if weights is None:
            self._engine.label_as(self._name, version=manifest.version, lineage=manifest.lineage)
        else:
            kept = KeptFile(weights.path)
            try:
                if manifest.adapter is None:
                    self._serve_model(manifest, weights, kept)
                else:
                    self._serve_adapter(manifest, weights, kept)
            except BaseException:
                kept.close()
                raise
            self._keep(kept)
        self.served = manifest

    def close(self) -> None:
        if self in self._shared.hosts:
            self._shared.hosts.remove(self)
            if self._name != BASE:
                self._engine.drop_adapter(self._name)
                shutil.rmtree(self._scratch / self._name, ignore_errors=True)
            self._keep(None)
            self._on_close()

    def _serve_model(self, manifest: Manifest, weights: Received, kept: KeptFile) -> None:
        if self._name != BASE:
            raise ModelSourceError(
                f"policy {self.policy!r} was loaded as a LoRA adapter, and version {manifest.version} is a whole model"
            )
        self._check(weights)
        self._engine.swap(Weights(kept, manifest.checksum, manifest.version, manifest.lineage))

    def _serve_adapter(self, manifest: Manifest, weights: Received, kept: KeptFile) -> None:
        assert manifest.adapter is not None, "told by the caller"
        if self._name == BASE:
            raise ModelSourceError(
                f"policy {self.policy!r} was loaded as a whole model, and version {manifest.version} is a LoRA adapter"
            )
        folder = self._scratch / self._name

        def lay(file: KeptFile, tensors: list[str], info: AdapterInfo) -> None:
            base = str(self._shared.folder)
            write_adapter(folder, file, names=tensors, rank=info.rank, alpha=info.alpha, base=base)

        before, self._laid = self._laid, (kept, list(weights.tensors), manifest.adapter)
        try:
            lay(*self._laid)
            version = Weights(kept, manifest.checksum, manifest.version, manifest.lineage, folder=folder)
            self._engine.put_adapter(self._name, version)
        except BaseException:
            self._laid = before
            if before is not None:
                lay(*before)
            raise

    def _check(self, weights: Received) -> None:
        if self._shapes is None:
            self._shapes = model_shapes(self._shared.folder)
        given = {name: tuple(tensor.shape) for name, tensor in weights.tensors.items()}
        check_fits(given, self._shapes, is_tied=bool(getattr(self._shared.config, "tie_word_embeddings", False)))

    def _keep(self, file: KeptFile | None) -> None:
        if self._file is not None:
            self._file.close()
        self._file = file


class VllmBackend:
    """Models on vLLM, a server started or joined as the first host needs it."""

    def __init__(self, config: EngineConfig, *, welcome: Welcome, send: Callable[[WorkerMessage], None]) -> None:
        self._config = config
        self._welcome = welcome
        self._send = send
        self._scratch = Path(tempfile.mkdtemp(prefix="wingbeat-adapters-"))
        self._servers: dict[str, Shared] = {}
        self._embedded = EmbeddedBackend(config, seed=welcome.seed)
        self._grammars = cache(GrammarCompiler)
        self._numbers = itertools.count()

    def load(self, spec: PolicySpec, *, pinned: bool = False) -> ModelHost:
        """Starts a server where none serves the policy's base model yet, which takes from seconds to minutes.

        Raises SetupError with the server's last words where it does not start.
        """
        lora = spec.config.get("lora")
        number = next(self._numbers)
        if lora:
            key = f"group {lora['group']}" if lora.get("group") else f"policy {spec.name}"
            name = f"{spec.name}-{number}"
        elif pinned and self._config.vllm.pinned == "embedded":
            return self._embedded.load(spec, pinned=True)
        else:
            key, name = f"policy {spec.name} {number}", BASE
        shared = self._servers.get(key) or self._start(key, spec)
        return VllmHost(
            shared, spec, name, scratch=self._scratch, is_live=not pinned, on_close=lambda: self._stop_unused(key)
        )

    def close(self) -> None:
        for shared in self._servers.values():
            shared.engine.close()
        self._servers.clear()
        self._embedded.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _start(self, key: str, spec: PolicySpec) -> Shared:
        folder = resolve_model(spec.model)
        config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
        server_spec = self._server_spec(spec, folder)
        server, accept = self._server(key, spec, server_spec)
        settings = EngineSettings(
            context_tokens=server_spec.context_tokens,
            vocabulary=config.vocab_size,
            max_running=server_spec.max_running,
            kv_tokens=server_spec.kv_tokens,
            keep_kv=self._config.kv_on_update == "keep",
            start_timeout_s=self._config.vllm.start_timeout_s,
            stall_s=self._config.vllm.stall_s,
            parallelism=server_spec.tensor_parallel,
        )
        engine = VllmEngine(
            server,
            settings=settings,
            grammars=self._grammars(folder),
            end_token=end_token_of(folder),
            accept=accept,
        )
        try:
            engine.start()
        except BaseException:
            engine.close()
            raise
        shared = self._servers[key] = Shared(engine, folder, config)
        engine.on_change = lambda error: self._report(shared, error)
        return shared

    def _server(self, key: str, spec: PolicySpec, wanted: ServerSpec) -> tuple[Server, Accept]:
        """The one to start, or that which runs; and whether what answers there may be used."""
        url = self._config.vllm.url
        if url is None:
            return OwnServer(wanted, log=self._log(key)), lambda root, about: None
        if self._servers:
            raise SetupError("engine.vllm.url names one server, and another model is served there already")
        needs_base = bool(wanted.adapters) or not spec.config["trainable"]

        def accept(root: str, about: Mapping[str, Any]) -> None:
            check_running(url, root=root, about=about, spec=wanted, needs_base=needs_base)

        return RunningServer(url), accept

    def _server_spec(self, spec: PolicySpec, folder: Path) -> ServerSpec:
        """Of the policy's own server, or of that of its group."""
        lora = spec.config.get("lora")
        sharing = [spec]
        if lora and lora.get("group"):
            others = (other for other in self._welcome.policies if other.config.get("lora"))
            sharing = [other for other in others if other.config["lora"].get("group") == lora["group"]] or sharing
        config = self._config
        return ServerSpec(
            model=folder,
            dtype=spec.config["dtype"],
            context_tokens=max(other.context_tokens for other in sharing),
            max_running=config.max_running,
            kv_tokens=config.kv_tokens,
            prefill_tokens=config.prefill_tokens,
            threads=config.threads or torch.get_num_threads(),
            tensor_parallel=config.tensor_parallel,
            adapters=2 * len(sharing) if lora else 0,  # each policy's live version, and a pinned one
            adapter_rank=max(other.config["lora"]["rank"] for other in sharing) if lora else 0,
            seed=self._welcome.seed,
            python=config.vllm.python or "",
            args=tuple(config.vllm.args),
        )

    def _log(self, key: str) -> Path | None:
        folder = Path(self._welcome.run_dir) / "logs"
        name = f"vllm-{self._welcome.worker_id}-{key.partition(' ')[2].replace(' ', '-')}.log"
        return folder / name if folder.is_dir() else None

    def _stop_unused(self, key: str) -> None:
        shared = self._servers.get(key)
        if shared is not None and not shared.hosts:
            del self._servers[key]
            shared.engine.close()

    def _report(self, shared: Shared, error: str) -> None:
        """Tell control that the server of some policies is lost, or serves again what it served."""
        for host in shared.hosts:
            manifest = host.served
            if error:
                self._send(Failed(policy=host.policy, command="generate", error=f"vLLM is starting again: {error}"))
            elif manifest is not None and host.is_live:
                self._send(WeightsServed(host.policy, manifest.version, manifest.checksum, lineage=manifest.lineage))


def end_token_of(folder: Path) -> Callable[[], int | None]:
    """The end-of-text token of a model's tokenizer, read when it is first asked for."""

    @cache
    def end_token() -> int | None:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return tokenizer.eos_token_id

    return end_token
