"""vLLM as a worker of the engine benchmark; runs in vLLM's own environment, which need not have Wingbeat or its needs.

vLLM's engine runs in this process, stepped like ours: no HTTP, no other process, the fastest way to drive it.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.engine_work import serve_jobs
from bench.workloads import Episode

CONTEXT_TOKENS = 4096
KV_BYTES = 512 * 2**20
BLOCK_TOKENS = 32
"""The smallest that vLLM likes on a CPU: it shares prefixes by whole blocks."""


def main() -> None:
    """Entry point of the process."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM writes to standard output
    serve_jobs(build(Path(sys.argv[1])), out=channel)


def build(model: Path) -> Callable[[list[Episode], int], None]:
    """Serve episodes: the next turn of one is submitted when the last one ends."""
    from vllm import EngineArgs, LLMEngine, SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

    engine: Any = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(model),
            dtype="float32",
            max_model_len=CONTEXT_TOKENS,
            max_num_seqs=64,
            kv_cache_memory_bytes=KV_BYTES,
            block_size=BLOCK_TOKENS,
            enforce_eager=True,
            skip_tokenizer_init=True,
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
        )
    )
    serial = 0

    def serve(episodes: list[Episode], concurrency: int) -> None:
        nonlocal serial
        waiting = deque(episodes)
        live: dict[str, Episode] = {}

        def submit(episode: Episode) -> None:
            nonlocal serial
            serial += 1
            live[str(serial)] = episode
            sampling = SamplingParams(
                max_tokens=episode.due,
                logprobs=0,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(str(serial), {"prompt_token_ids": list(episode.tokens)}, sampling)

        while waiting and len(live) < concurrency:
            submit(waiting.popleft())
        while live:
            for output in engine.step():
                if not output.finished:
                    continue
                episode = live.pop(output.request_id)
                sampled = list(output.outputs[0].token_ids)
                if len(sampled) != episode.due:
                    raise RuntimeError(f"expected {episode.due} tokens, got {len(sampled)}")
                if episode.advance(sampled):
                    submit(episode)
                elif waiting:
                    submit(waiting.popleft())

    return serve


if __name__ == "__main__":
    main()
