"""An engine without a model: it speaks the worker protocol and answers what a script says.

It dials out to control like every engine, acknowledges any weights, and serves any policy.  For trainable
policies it can stand in for the trainer, too, so that a whole server runs without torch.  The same script also
answers on an endpoint of its own, ``POST /v1/chat/completions``, for measuring what the way through control adds.

    with ScriptedEngine(url, key, ["<tool_call>...</tool_call>", "The answer is 3"]) as engine: ...
    python -m bench.scripted_engine --server URL --key KEY --script FILE [--trainer POLICY] [--direct]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import logging
import os
import signal
import sys
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import aiohttp
import uvloop

from bench.direct_endpoint import DirectEndpoint
from bench.scripted_tokens import Place, Vocabulary, make_chunk
from bench.scripts import AnyScript, Reply, ScriptedCall, as_script, load_script
from wingbeat.core.lifeline import end_with_supervisor
from wingbeat.core.samples import TrainingBatch
from wingbeat.core.types import FinishReason
from wingbeat.core.weight_protocol import Manifest, PinVersion, Published, UpdateWeights, WeightsServed
from wingbeat.core.worker_protocol import (
    PROTOCOL_VERSION,
    Abort,
    BeginLineage,
    ControlMessage,
    Export,
    Failed,
    Generate,
    Heartbeat,
    PolicySpec,
    Refused,
    Register,
    Role,
    SaveCheckpoint,
    Shutdown,
    StepDone,
    TokenChunk,
    Tokens,
    TrainerReady,
    TrainStep,
    Welcome,
    WorkerMessage,
    decode_from_control,
    encode_frame,
)
from wingbeat.workers.link import MAX_FRAME_BYTES

logger = logging.getLogger(__name__)

RECONNECT_S = 0.05
REMEMBERED_REQUESTS = 10_000


def served(manifest: Manifest, *, pinned: bool = False) -> WeightsServed:
    """What an engine says once it serves these weights."""
    return WeightsServed(manifest.policy, manifest.version, manifest.checksum, pinned, manifest.lineage)


@dataclass(slots=True)
class Link:
    """One connection to control, in one role."""

    register: Register
    specs: dict[str, PolicySpec] = field(default_factory=dict)
    served: dict[str, Place] = field(default_factory=dict)
    """What is live, per policy."""
    outbox: list[WorkerMessage] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    flights: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """Calls that are answered over time."""

    def send(self, message: WorkerMessage) -> None:
        """What gathers until the next flush leaves as one frame."""
        self.outbox.append(message)
        self.wake.set()

    async def flush(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.wake.clear()
        if self.outbox:
            batch, self.outbox = self.outbox, []
            await socket.send_bytes(encode_frame(batch))


class ScriptedEngine:
    """Runs on a thread with an event loop of its own, or as a process (``main``)."""

    def __init__(
        self,
        url: str,
        key: str,
        script: AnyScript,
        *,
        worker_id: str = "scripted-0",
        trainer_of: Sequence[str] = (),
        direct: bool = False,
        bounded: bool = False,
        keep_calls: int = 10_000,
    ) -> None:
        """``trainer_of``: policies whose trainer this stands in for (a step is taken at once and changes nothing).

        ``bounded``: control gives it ``engine.max_running`` generations at once and queues the others, as it does
        with engines that compute.
        """
        self.script = as_script(script)
        """May be replaced at any time."""
        self.calls: list[ScriptedCall] = []
        """The first ``keep_calls`` calls, oldest first."""
        self.direct_url = ""
        """The base URL of the endpoint that goes past control, if there is one."""
        self.step_metrics: Callable[[TrainingBatch], dict[str, float]] = lambda batch: {}
        """What the trainer that this stands in for reports of a step."""
        self.publish_fault: Callable[[TrainingBatch], Failed | None] = lambda batch: None
        """What it says in place of having published a step's weights."""
        self._url = url.rstrip("/") + "/worker/v1"
        self._key = key
        self._worker_id = worker_id
        self._trainer_of = tuple(trainer_of)
        self._bounded = bounded
        self._direct = DirectEndpoint(self._answer_direct) if direct else None
        self._keep_calls = keep_calls
        self._vocabularies: dict[str, Vocabulary] = {}
        self._turns: defaultdict[str, int] = defaultdict(int)
        self._replies: OrderedDict[str, Reply] = OrderedDict()
        """By request id: a request that control sends again is the same turn."""
        self._steps: dict[str, int] = {}
        self._lineages: dict[str, tuple[int, int]] = {}
        """Per policy that it trains: the lineage of its weights, and the one on which that is based."""
        self._last_done: dict[str, tuple[StepDone, Published]] = {}
        """Said again after a reconnection, as a trainer says it: control may not have lived to hear it."""
        self._released: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None
        self.on_up: Callable[[], None] = lambda: None
        """Called once it dials, and answers directly."""
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self.run()), name="scripted-engine", daemon=True)

    # --- life ---------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._up.wait(10):
            raise RuntimeError("the scripted engine did not start within 10 s")
        return self

    def __exit__(self, *_: object) -> None:
        if self._loop is not None and self._main is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join(10)

    def release(self) -> None:
        """Let every reply that is held go on (replies to later calls are held again)."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._release)

    def _release(self) -> None:
        assert self._released is not None
        self._released.set()
        self._released = asyncio.Event()

    async def run(self) -> None:
        """Serve until cancelled; reconnects whenever control goes away."""
        self._loop, self._main = asyncio.get_running_loop(), asyncio.current_task()
        self._released = asyncio.Event()
        links = [self._dial("engine", self._worker_id, ())]
        links += [self._dial("trainer", f"{self._worker_id}-trainer-{name}", (name,)) for name in self._trainer_of]
        async with contextlib.AsyncExitStack() as stack:
            if self._direct is not None:
                self.direct_url = await stack.enter_async_context(self._direct)
            self._up.set()
            self.on_up()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*links)

    async def _dial(self, role: Role, worker_id: str, policies: tuple[str, ...]) -> None:
        bounded = self._bounded and role == "engine"
        register = Register(
            PROTOCOL_VERSION, role, worker_id, "scripted", os.getpid(), policies, parallelism=1, bounded=bounded
        )
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {self._key}"}) as session:
            while True:
                link = Link(register)
                try:
                    async with session.ws_connect(self._url, max_msg_size=MAX_FRAME_BYTES, compress=0) as socket:
                        await self._converse(socket, link)
                except aiohttp.WSServerHandshakeError as error:
                    if error.status in (401, 403):
                        raise RuntimeError(f"control at {self._url} refused the worker key") from error
                except (aiohttp.ClientError, OSError) as error:
                    logger.debug("control is away: %s", error)
                finally:
                    for task in link.flights.values():
                        task.cancel()
                await asyncio.sleep(RECONNECT_S)

    async def _converse(self, socket: aiohttp.ClientWebSocketResponse, link: Link) -> None:
        await socket.send_bytes(encode_frame([link.register]))
        sender: asyncio.Task[None] | None = None
        try:
            async for frame in socket:
                if frame.type is not aiohttp.WSMsgType.BINARY:
                    return
                for message in decode_from_control(frame.data):
                    if isinstance(message, Welcome):
                        sender = asyncio.create_task(self._send_loop(socket, link, message.heartbeat_s))
                    self._handle(link, message)
                await link.flush(socket)
        finally:
            if sender is not None:
                sender.cancel()
                await asyncio.gather(sender, return_exceptions=True)

    async def _send_loop(self, socket: aiohttp.ClientWebSocketResponse, link: Link, heartbeat_s: float) -> None:
        beat = asyncio.get_running_loop().time() + heartbeat_s
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(beat):
                    await link.wake.wait()
            if asyncio.get_running_loop().time() >= beat:
                link.send(Heartbeat())
                beat += heartbeat_s
            await link.flush(socket)

    # --- messages -----------------------------------------------------------------------------

    def _handle(self, link: Link, message: ControlMessage) -> None:
        match message:
            case Welcome(policies=specs):
                self._welcomed(link, specs)
            case Refused(reason=reason):
                logger.error("control refused %s: %s", link.register.worker_id, reason)
            case UpdateWeights(manifest=manifest):
                link.served[manifest.policy] = Place(manifest.lineage, manifest.version)
                link.send(served(manifest))
            case PinVersion(manifest=manifest):
                link.send(served(manifest, pinned=True))
            case Generate():
                self._generate(link, message)
            case Abort(request_id=request_id):
                self._abort(link, request_id)
            case TrainStep(batch=batch):
                self._steps[batch.policy] = batch.step
                self._lineages[batch.policy] = (batch.lineage, batch.lineage)
                manifest = self._manifest(link.specs[batch.policy])
                metrics = self.step_metrics(batch)
                done = StepDone(batch.policy, batch.batch_id, batch.step, metrics, {}, 0.0, 0.0)
                self._last_done[batch.policy] = (done, Published(batch.policy, batch.step, manifest))
                link.send(done)
                link.send(self.publish_fault(batch) or self._last_done[batch.policy][1])
            case BeginLineage(policy=policy, lineage=lineage):
                self._lineages[policy] = (lineage, self._lineages.get(policy, (0, 0))[0])
                self._last_done.pop(policy, None)
                link.send(self._ready(link.specs[policy]))
            case SaveCheckpoint(policy=policy) | Export(policy=policy):
                command = "save_checkpoint" if isinstance(message, SaveCheckpoint) else "export"
                link.send(Failed(policy, command, "a scripted trainer has no weights"))
            case Shutdown():
                logger.info("control ends: %s", message.reason)
            case _:
                pass  # nothing is kept that an unpinned or released version could free

    def _welcomed(self, link: Link, specs: Sequence[PolicySpec]) -> None:
        for spec in specs:
            link.specs[spec.name] = spec
            if link.register.role == "engine" and spec.name not in self._vocabularies:
                self._vocabularies[spec.name] = Vocabulary(spec)
            if link.register.role == "trainer":
                link.send(self._ready(spec))
                for said in self._last_done.get(spec.name, ()):
                    link.send(said)

    def _ready(self, spec: PolicySpec) -> TrainerReady:
        base_lineage = self._lineages.get(spec.name, (0, 0))[1]
        return TrainerReady(spec.name, self._steps.get(spec.name, 0), self._manifest(spec), base_lineage)

    def _manifest(self, spec: PolicySpec) -> Manifest:
        """The folder's own weights, whatever the step."""
        step, lineage = self._steps.get(spec.name, 0), self._lineages.get(spec.name, (0, 0))[0]
        return Manifest(spec.name, step, "full", "", "", f"scripted-{step}", 0, (), spec.model, lineage)

    def _generate(self, link: Link, message: Generate) -> None:
        vocabulary = self._vocabularies[message.policy]
        reply = self._reply(message, vocabulary)
        place = link.served.get(message.policy, Place()) if message.version is None else Place(version=message.version)
        if reply.finish is FinishReason.ERROR:
            link.send(Tokens((TokenChunk(message.request_id, (), (), place.version, FinishReason.ERROR, reply.text),)))
            return
        ids = vocabulary.sample(reply.text, reply.finish is FinishReason.STOP)[message.resumed_tokens :]
        finish = reply.finish
        if len(ids) > message.max_tokens:
            ids, finish = ids[: message.max_tokens], FinishReason.LENGTH
        if not message.stream and not reply.delay_s and reply.hold_after is None:
            link.send(Tokens((make_chunk(message, ids, place, finish),)))
            return
        task = asyncio.create_task(self._speak(link, message, reply, ids, place, finish))
        link.flights[message.request_id] = task
        task.add_done_callback(lambda _: link.flights.pop(message.request_id, None))

    def _reply(self, message: Generate, vocabulary: Vocabulary) -> Reply:
        known = self._replies.get(message.request_id)
        if known is not None:
            return known
        call = ScriptedCall(
            policy=message.policy,
            cache_key=message.cache_key,
            turn=self._turns[message.cache_key],
            num_prompt_tokens=len(message.prompt_ids) // 4,
            max_tokens=message.max_tokens,
            stream=message.stream,
            decode=functools.partial(vocabulary.decode, message.prompt_ids),
        )
        self._turns[message.cache_key] += 1
        if len(self.calls) < self._keep_calls:
            self.calls.append(call)
        chosen = self.script(call)
        reply = self._replies[message.request_id] = Reply(chosen) if isinstance(chosen, str) else chosen
        if len(self._replies) > REMEMBERED_REQUESTS:
            self._replies.popitem(last=False)
        return reply

    async def _speak(
        self,
        link: Link,
        message: Generate,
        reply: Reply,
        ids: tuple[int, ...],
        place: Place,
        finish: FinishReason,
    ) -> None:
        """Token by token if the call is streamed, else all at once; in the reply's own time."""
        assert self._released is not None
        released = self._released
        size = 1 if message.stream else max(1, len(ids))
        for start in range(0, max(1, len(ids)), size):
            if reply.hold_after is not None and start + size > reply.hold_after:
                await released.wait()
            await asyncio.sleep(reply.delay_s)
            is_last = start + size >= len(ids)
            link.send(
                Tokens((make_chunk(message, ids[start : start + size], place, finish if is_last else None),)),
            )

    def _abort(self, link: Link, request_id: str) -> None:
        task = link.flights.pop(request_id, None)
        if task is not None:
            task.cancel()
            link.send(Tokens((TokenChunk(request_id, (), (), 0, FinishReason.ABORT),)))

    def _answer_direct(self, body: dict[str, Any]) -> str:
        """The same script for a call that goes past control; a conversation's turn is read off its messages."""
        messages = body["messages"]
        call = ScriptedCall(
            policy=body["model"],
            cache_key="direct",
            turn=sum(message["role"] == "assistant" for message in messages),
            num_prompt_tokens=0,
            max_tokens=body.get("max_tokens") or 0,
            stream=bool(body.get("stream")),
            decode=lambda: "\n".join(str(message.get("content")) for message in messages),
        )
        chosen = self.script(call)
        return chosen if isinstance(chosen, str) else chosen.text


def _announce(engine: ScriptedEngine) -> None:
    """One line for whoever started this process."""
    sys.stdout.write(json.dumps({"direct_url": engine.direct_url}) + "\n")
    sys.stdout.flush()


async def _serve(engine: ScriptedEngine) -> None:
    """As a process: until SIGTERM or SIGINT."""
    running = asyncio.create_task(engine.run())
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, running.cancel)
    await running


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.scripted_engine", description=__doc__)
    parser.add_argument("--server", required=True, help="control's address, http://host:port")
    parser.add_argument("--key", default=os.environ.get("WINGBEAT_WORKER_KEY", ""), help="the worker key")
    parser.add_argument("--script", type=Path, required=True, help="a JSON file, see bench/scripts.py")
    parser.add_argument("--trainer", action="append", default=[], help="also stand in for this policy's trainer")
    parser.add_argument("--direct", action="store_true", help="also answer on an endpoint past control")
    given = parser.parse_args()
    end_with_supervisor(grace_s=0)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s scripted %(levelname)s %(message)s")
    script = load_script(given.script)
    engine = ScriptedEngine(
        given.server, given.key, script, trainer_of=given.trainer, direct=given.direct, keep_calls=0
    )
    engine.on_up = functools.partial(_announce, engine)
    uvloop.run(_serve(engine))


if __name__ == "__main__":
    main()
