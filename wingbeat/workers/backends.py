"""Which engine a worker runs its models on, by ``[engine]``."""

from __future__ import annotations

from collections.abc import Callable

from wingbeat.core.config import EngineConfig
from wingbeat.core.worker_protocol import Welcome, WorkerMessage
from wingbeat.workers.hosting import Backend, EmbeddedBackend
from wingbeat.workers.tensor_parallel import ParallelBackend
from wingbeat.workers.vllm_backend import VllmBackend

Send = Callable[[WorkerMessage], None]


def build_backend(welcome: Welcome, *, send: Send) -> Backend:
    """The backend of an engine worker.  ``send`` tells control what it should know beside tokens."""
    config = EngineConfig.model_validate(welcome.engine)
    if config.backend == "vllm":
        return VllmBackend(config, welcome=welcome, send=send)
    if config.tensor_parallel > 1:
        return ParallelBackend(config, seed=welcome.seed)
    return EmbeddedBackend(config, seed=welcome.seed)
