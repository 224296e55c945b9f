"""The program that runs a verifiers environment in an interpreter of its own; needs that library and nothing of ours.

    PYTHON verifiers_host.py        one JSON object a line: requests on standard input, replies on standard output

::

    {"environment": ID, "arguments": {...}, "folder": PATH or null}       first; reply {"train": [row], "eval": [row]}
    {"id": N, "row": {...}, "base_url": URL, "api_key": KEY, "model": NAME, "sampling": {...}}
                                           replies {"id": N, "reward": R, "metrics": {...}} or {"id": N, "error": TEXT}

Ends when standard input does.  What the environment prints goes to standard error.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from typing import Any

LIBRARY = "verifiers"
"""Not one of Wingbeat's dependencies: this file runs where it is installed."""
MODEL_CALL_RETRIES = 14


def take_output() -> Any:
    """Standard output for replies alone: from here on, file 1 is standard error."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def load(request: dict[str, Any]) -> Any:
    """The environment, by the library's own loader."""
    if request.get("folder"):
        sys.path.insert(0, request["folder"])
    library = importlib.import_module(LIBRARY)
    if not hasattr(library, "load_environment"):
        version = getattr(library, "__version__", "?")
        raise RuntimeError(f"verifiers {version} has no load_environment; install verifiers 0.2.1")
    return library.load_environment(request["environment"], **request["arguments"])


def rows(environment: Any) -> dict[str, list[dict[str, Any]]]:
    """The rows of both datasets, as JSON data; no eval rows where the environment has no dataset for them."""

    def read(dataset: Any) -> list[dict[str, Any]]:
        return [] if dataset is None else [json.loads(json.dumps(row, default=str)) for row in dataset]

    return {"train": read(environment.build_dataset()), "eval": read(environment.build_eval_dataset())}


async def roll_out(environment: Any, request: dict[str, Any]) -> dict[str, Any]:
    """One rollout with the environment's own loop and rubric."""
    openai = importlib.import_module("openai")
    clients = importlib.import_module(f"{LIBRARY}.clients")
    calls = openai.AsyncOpenAI(base_url=request["base_url"], api_key=request["api_key"], max_retries=MODEL_CALL_RETRIES)
    async with calls:
        output = await environment.run_rollout(
            request["row"], clients.OpenAIChatCompletionsClient(calls), request["model"], request["sampling"]
        )
    fault = output.get("error")
    if fault is not None:
        return {"error": json.dumps(fault, default=str)[:2000]}
    return {"reward": float(output["reward"]), "metrics": output.get("metrics") or {}}


async def serve(environment: Any, replies: Any) -> None:
    """Run what is asked for, all at once, until standard input ends."""
    running: set[asyncio.Task[dict[str, Any]]] = set()

    def tell(task: asyncio.Task[dict[str, Any]]) -> None:
        running.discard(task)
        if task.cancelled():
            return
        error = task.exception()  # whatever the environment raised is told, and is no reward
        reply = task.result() if error is None else {"error": f"{type(error).__name__}: {error}"[:2000]}
        replies.write(json.dumps({"id": int(task.get_name()), **reply}) + "\n")
        replies.flush()

    while line := await asyncio.to_thread(sys.stdin.readline):
        request = json.loads(line)
        task = asyncio.create_task(roll_out(environment, request), name=str(request["id"]))
        running.add(task)
        task.add_done_callback(tell)
    for task in tuple(running):
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def main() -> None:
    """The program."""
    replies = take_output()
    environment = load(json.loads(sys.stdin.readline()))
    replies.write(json.dumps(rows(environment)) + "\n")
    replies.flush()
    asyncio.run(serve(environment, replies))


if __name__ == "__main__":
    main()
