"""What is asked of a vLLM server beside requests: to start, to load weights, to say how it is."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from wingbeat.core.errors import SetupError, UnavailableError
from wingbeat.core.types import SamplingParams
from wingbeat.engines.vllm.client import CallFailed, VllmClient
from wingbeat.engines.vllm.flags import BASE
from wingbeat.engines.vllm.server import Server
from wingbeat.engines.vllm.wire import Piece, Submission

logger = logging.getLogger(__name__)

POLL_S = 0.1
PROBE = SamplingParams(max_tokens=2, top_k=1)
"""Where logprobs are of what is drawn from, all but the first of the most probable tokens have none."""
PROBE_PROMPT = (1, 2, 3)
PROBE_LISTED = 8
PROBE_STREAM = -1


class Loadable(Protocol):
    """Weights as :meth:`ServerCommands.restart` loads them."""

    @property
    def path(self) -> Path: ...
    @property
    def checksum(self) -> str: ...


class ServerCommands:
    """Called by the engine's thread, and by that which recovers meanwhile."""

    def __init__(
        self,
        server: Server,
        client: VllmClient,
        start_timeout_s: float,
        *,
        accept: Callable[[str, Mapping[str, Any]], None] = lambda root, about: None,
    ) -> None:
        """``accept``: raises SetupError where a server, by its model and what its workers say, is none to use."""
        self._server = server
        self._client = client
        self._start_timeout_s = start_timeout_s
        self._accept = accept
        self._adapters: dict[str, int] = {}
        """The numbers that the server gave to adapters, by name."""
        self.context_tokens = 0
        """What the server takes, once it was started."""

    def start(self) -> None:
        """Start the server, wait until it answers, and see that it answers as it must.

        Raises SetupError, with the last words of a server that failed.
        """
        self._server.start()
        self._adapters.clear()
        deadline = time.monotonic() + self._start_timeout_s
        while not self.is_healthy(timeout_s=self._start_timeout_s):
            if ended := self._server.ended():
                raise SetupError(f"vLLM did not start: {ended}")
            if time.monotonic() > deadline:
                raise SetupError(
                    f"vLLM did not answer within {self._start_timeout_s:.0f} s (engine.vllm.start_timeout_s)"
                    f" at {self._server.address}"
                )
            time.sleep(POLL_S)
        self._check_workers()
        self._probe()

    def restart(self, weights: Mapping[str, Loadable], label: int) -> None:
        """Start it again and load what was served, by model name.  Raises SetupError or UnavailableError."""
        self.start()
        for name, served in weights.items():
            if name == BASE:
                self.swap(served.path, served.checksum)
            else:
                self.put_adapter(name, served.path)
        self.label(label)

    def is_healthy(self, *, timeout_s: float) -> bool:
        try:
            self._client.call("/health", method="GET", timeout_s=timeout_s)
        except CallFailed:
            return False
        return True

    @contextlib.contextmanager
    def paused(self, *, keep_kv: bool) -> Iterator[None]:
        """No token is sampled meanwhile; running requests stay."""
        self._client.call(f"/pause?mode=keep&clear_cache={'false' if keep_kv else 'true'}")
        try:
            yield
        finally:
            self._client.call("/resume")

    def prepare(self, path: Path) -> bool:
        """Have the workers read a file in the background; whether all have.  Raises UnavailableError."""
        answers = self._ask_workers("wingbeat_prepared", str(path))
        self._raise_error(answers, path)
        return all(answer["ready"] for answer in answers)

    def swap(self, path: Path, checksum: str) -> str:
        """Load a file in place of the model's weights; the checksum of what each worker loaded.

        Raises UnavailableError where the file is bad, and nothing was changed then; CallFailed where something was.
        """
        answers = self._ask_workers("wingbeat_swap", str(path), checksum)
        refused = sum(bool(answer["error"]) for answer in answers)
        if 0 < refused < len(answers):
            raise CallFailed(f"{refused} of {len(answers)} vLLM workers could not load {path}: they differ now")
        self._raise_error(answers, path)
        return str(answers[0]["checksum"])

    def put_adapter(self, name: str, folder: Path) -> None:
        """Serve a LoRA adapter under a name, always of the same folder: vLLM may read it again at any time.

        Raises UnavailableError where it is refused; nothing was changed then.
        """
        number = self._adapters.get(name)
        if number is not None:
            answers = self._ask_workers("wingbeat_replace_adapter", name, str(number), str(folder))
            self._raise_error(answers, folder)
            return
        if name in self._offered():  # to somebody before us, of a server that is not ours
            self._client.call("/v1/unload_lora_adapter", {"lora_name": name})
        before = self._adapter_numbers()
        try:
            self._client.call("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        except CallFailed as error:
            if not error.answer:
                raise
            raise UnavailableError(f"vLLM cannot load the adapter in {folder}: {error.message}") from error
        (self._adapters[name],) = self._adapter_numbers() - before

    def drop_adapter(self, name: str) -> None:
        self._adapters.pop(name, None)
        self._client.call("/v1/unload_lora_adapter", {"lora_name": name})

    def _offered(self) -> dict[str, dict[str, Any]]:
        """What requests may name, with what the server says of it."""
        return {model["id"]: model for model in self._client.call("/v1/models", method="GET")["data"]}

    def _adapter_numbers(self) -> set[int]:
        return set(self._ask_workers("wingbeat_adapters")[0]["numbers"])

    def label(self, label: int) -> None:
        """From now on, sampled tokens are said to be of the weights with this label."""
        self._client.call("/update_weight_version", {"new_version": str(label)})

    def _ask_workers(self, method: str, *args: str) -> list[dict[str, Any]]:
        answer = self._client.call("/collective_rpc", {"method": method, "args": list(args)})
        return answer["results"]

    @staticmethod
    def _raise_error(answers: list[dict[str, Any]], path: Path) -> None:
        errors = [answer["error"] for answer in answers if answer["error"]]
        if errors:
            raise UnavailableError(f"vLLM cannot load {path}: {errors[0]}; it serves what it served")

    def _check_workers(self) -> None:
        try:
            about = self._ask_workers("wingbeat_about")
            offered = self._offered()[BASE]
            self._client.call("/resume")  # whoever used a running server before us may have been killed in a pause
        except (CallFailed, ValueError, KeyError, TypeError) as error:
            raise SetupError(
                f"the server at {self._server.address} was not started for Wingbeat ({error}): start it as"
                " docs/howto/vllm.md says, or leave engine.vllm.url out"
            ) from error
        logger.info("vLLM serves %s: %s", offered["root"], about[0])
        self.context_tokens = int(offered["max_model_len"])
        self._accept(str(offered["root"]), about[0])

    def _probe(self) -> None:
        """One request that shows whether logprobs and versions are told as we need them."""
        self._client.generate(Submission(PROBE_STREAM, BASE, PROBE_PROMPT, PROBE, "probe", PROBE_LISTED))
        pieces: list[Piece] = []
        deadline = time.monotonic() + self._start_timeout_s
        while not (pieces and pieces[-1].ends):
            pieces += [piece for piece in self._client.pieces(wait_s=POLL_S) if piece.stream == PROBE_STREAM]
            if time.monotonic() > deadline:
                raise SetupError(f"vLLM did not serve a first request within {self._start_timeout_s:.0f} s")
        failed = next((piece.error or piece.lost for piece in pieces if piece.error or piece.lost), "")
        if failed:
            time.sleep(POLL_S)  # the words of its death are being written
            raise SetupError(
                f"vLLM cannot serve this model: {self._server.ended() or self._server.last_words() or failed}"
            )
        told = [piece for piece in pieces if piece.token_ids]
        if any(piece.spans is None for piece in told):
            raise SetupError("this vLLM does not tell whose weights sampled a token: start it with Wingbeat's launcher")
        listed = [dict(candidates) for piece in told for candidates in piece.candidates]
        if not listed or any(min(logprobs.values()) > -math.inf for logprobs in listed):
            raise SetupError("this vLLM's logprobs are not of what it draws from: start it with processed_logprobs")
