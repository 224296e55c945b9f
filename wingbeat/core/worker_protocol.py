"""The worker protocol: what control and its workers say to each other.

Workers dial *out* to control over one WebSocket, ``GET /worker/v1`` with ``Authorization: Bearer
<worker key>``; each binary frame is a msgpack array of the messages below, so that a busy side sends
what has gathered as one frame.  It is the same on loopback as from behind a NAT.  Big tensors never
travel in frames: a :class:`Manifest` names files, which receivers map from shared memory if they are on
the publisher's host, and pull over HTTP from the ``sources`` that they are told if they are not.

    worker                                control
      Register          ───────────────▶
                        ◀───────────────  Welcome | Refused
      Heartbeat         ───────────────▶  (every heartbeat_s)
    engine              ◀───────────────  UpdateWeights, PinVersion, UnpinVersion
      WeightsServed     ───────────────▶  (checksum now served)
                        ◀───────────────  Generate, Abort
      Tokens            ───────────────▶  (coalesced per decode step)
                        ◀───────────────  MoveOut
      MovedOut          ───────────────▶  (its KV; another engine goes on with it)
                        ◀───────────────  Drain
      Leave             ───────────────▶  (it takes no more, ends what it has, then goes)
    trainer
      TrainerReady      ───────────────▶  (step it stands at, manifest it published)
                        ◀───────────────  TrainStep (batch), SaveCheckpoint, Export, BeginLineage
                        ◀───────────────  ReleaseVersion, KeepVersions
      StepDone          ───────────────▶  (metrics)
      Published         ───────────────▶  (the step's manifest, once its files are there)
      CheckpointSaved   ───────────────▶
    both                ◀───────────────  Shutdown
      Failed            ───────────────▶
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from wingbeat.core.samples import TrainingBatch
from wingbeat.core.types import FinishReason
from wingbeat.core.weight_protocol import (
    KeepVersions,
    Manifest,
    PinVersion,
    Published,
    ReleaseVersion,
    UnpinVersion,
    UpdateWeights,
    WeightsServed,
)

PROTOCOL_VERSION = 4

REFUSAL_HEADER = "x-wingbeat-refusal"
"""Of the answer to a connection whose key is refused: why, in words (a WebSocket's client sees no body)."""

Role = Literal["engine", "trainer"]

MAX_KV_PER_FRAME = 64 * 2**20
"""Bytes, unless one message alone has more (``engine.move_kv_bytes``)."""


class PolicySpec(msgspec.Struct, frozen=True):
    """What a worker needs to host a policy: the resolved folder plus its configuration as JSON data."""

    name: str
    model: str
    context_tokens: int
    config: dict[str, Any]
    """``PolicyConfig.model_dump(mode="json")``."""
    source: str = ""
    """The model as the configuration names it: on another host ``model`` may not be there, and a hub name may."""
    fingerprint: str = ""
    """Of ``model`` (:mod:`wingbeat.core.model_files`): by it another host knows whether it has the same."""


# --- worker to control -------------------------------------------------------------------------


class Register(msgspec.Struct, frozen=True, tag="register"):
    protocol: int
    role: Role
    worker_id: str
    host_id: str
    pid: int
    policies: tuple[str, ...] = ()
    """Policies this worker was started for; empty means all (engines)."""
    parallelism: int = 1
    bounded: bool = False
    """An engine that runs ``engine.max_running`` generations together, and would queue the others by itself."""
    software: dict[str, str] = {}
    """Versions of what decides its results: wingbeat, torch, python; the type of its device."""
    relay_url: str = ""
    """Where it serves weights to others; "" where it does not."""


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    busy_s: float = 0.0
    """Seconds of compute since the last heartbeat."""
    stats: dict[str, dict[str, float]] = {}
    """Per policy: engine stats or trainer stats."""


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """The engine takes no more generations; it goes once it has ended those that it has, or its patience is over.

    What it has not ended by then it hands over: it sends the tokens that it sampled so far and disconnects.
    """

    drain_s: float = 0.0
    """Its patience in seconds."""


class TokenChunk(msgspec.Struct, frozen=True, array_like=True):
    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    finish: FinishReason | None = None
    error: str = ""
    supports: tuple[bytes, ...] = ()
    """One :mod:`wingbeat.core.support` blob per token, or () where every token was drawn from the whole vocabulary."""
    lineage: int = 0
    """Of ``version``: what an abandoned version sampled may arrive after the rollback."""


class Tokens(msgspec.Struct, frozen=True, tag="tokens"):
    chunks: tuple[TokenChunk, ...]


class TrainerReady(msgspec.Struct, frozen=True, tag="trainer_ready"):
    """Where the trainer stands: after it connected, and after each ``BeginLineage``."""

    policy: str
    step: int
    manifest: Manifest
    """Names the lineage, too: a trainer takes over that of every batch it trains."""
    base_lineage: int = 0
    """Of a lineage that has taken no step yet: the one whose ``step`` it begins at."""
    damaged: tuple[str, ...] = ()
    """Newer checkpoints that could not be used, each with the reason."""


class StepDone(msgspec.Struct, frozen=True, tag="step_done"):
    """The step counts; its weights are being published meanwhile (:class:`Published` follows)."""

    policy: str
    batch_id: str
    step: int
    metrics: dict[str, float]
    advantages: dict[str, float]
    """Per "episode_id:attempt:agent": the (sequence-level) advantage that was trained."""
    started_s: float
    """Wall clock (time.time) when the step began and ended, to measure overlap with rollouts."""
    ended_s: float


class CheckpointSaved(msgspec.Struct, frozen=True, tag="checkpoint_saved"):
    policy: str
    step: int
    path: str
    lineage: int = 0


class Exported(msgspec.Struct, frozen=True, tag="exported"):
    policy: str
    step: int
    path: str


class MovedOut(msgspec.Struct, frozen=True, tag="moved_out"):
    """A generation left this engine; all its tokens were sent before.  Also the answer where it had ended already."""

    request_id: str
    kv: bytes = b""
    """For ``Generate.kv`` of the engine that goes on; empty: that one computes it from the tokens."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A command failed without killing the worker."""

    policy: str
    command: str
    error: str
    final: bool = False
    """The same will fail again, whenever it is tried."""


WorkerMessage = (
    Register
    | Heartbeat
    | Leave
    | Tokens
    | MovedOut
    | WeightsServed
    | TrainerReady
    | StepDone
    | Published
    | CheckpointSaved
    | Exported
    | Failed
)


# --- control to worker -------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    worker_id: str
    heartbeat_s: float
    policies: tuple[PolicySpec, ...]
    run_dir: str
    seed: int
    engine: dict[str, Any] = {}
    """``EngineConfig.model_dump(mode="json")`` for engines."""
    total_steps: int = 0
    """Steps of the whole run, for learning-rate schedules."""
    host_id: str = ""
    """Of control: a trainer of another host brings it what it publishes."""
    weights: dict[str, Any] = {}
    """``WeightsConfig.model_dump(mode="json")``."""
    relay_key: str = ""
    """With what workers ask one another for weight files; good for nothing else, and as long as this control lives."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    reason: str
    for_now: bool = False
    """It may try again: what is in the way goes away by itself, or does not."""


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    request_id: str
    policy: str
    prompt_ids: bytes
    """int32 little-endian."""
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    cache_key: str = ""
    version: int | None = None
    """A pinned version, or None for the live one."""
    stream: bool = False
    """Send tokens as they come; otherwise one chunk per version span, with the last."""
    grammar: str = ""
    resumed_tokens: int = 0
    """Both as in ``SamplingParams``."""
    kv: bytes = b""
    """What :class:`MovedOut` brought of it; where it is of other weights, the prompt is computed anew."""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_id: str


class MoveOut(msgspec.Struct, frozen=True, tag="move_out"):
    """Hand a generation over: what it sampled is sent, then ``MovedOut``, and it ends here without a finish."""

    request_id: str
    with_kv: bool = True
    """Its KV, too, unless that is more than ``engine.move_kv_bytes`` or of more than one version's weights."""


class TrainStep(msgspec.Struct, frozen=True, tag="train_step"):
    batch: TrainingBatch
    replay: bool = False
    """True when re-doing a logged step after a crash."""
    publish: bool = True
    """False where a later step of the same replay will be served."""
    delta: bool = False
    """Engines of other hosts wait for it: publish what differs from the version before, too."""


class SaveCheckpoint(msgspec.Struct, frozen=True, tag="save_checkpoint"):
    policy: str
    step: int


class BeginLineage(msgspec.Struct, frozen=True, tag="begin_lineage"):
    """Publish what you hold under a new lineage; answered by ``TrainerReady``.

    A trainer whose last step failed goes back to its last checkpoint first: what it holds may be half a step.
    """

    policy: str
    lineage: int


class Export(msgspec.Struct, frozen=True, tag="export"):
    """Write a Hugging Face folder of the current weights to ``path``; for LoRA, the PEFT adapter beside it."""

    policy: str
    path: str


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """An engine should go without losing anything; answered by ``Leave``."""

    drain_s: float
    """Seconds that running generations get."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    reason: str = ""


ControlMessage = (
    Welcome
    | Refused
    | Generate
    | Abort
    | MoveOut
    | UpdateWeights
    | PinVersion
    | UnpinVersion
    | TrainStep
    | SaveCheckpoint
    | BeginLineage
    | Export
    | ReleaseVersion
    | KeepVersions
    | Drain
    | Shutdown
)

_encoder = msgspec.msgpack.Encoder()
_worker_decoder: msgspec.msgpack.Decoder[list[WorkerMessage]] = msgspec.msgpack.Decoder(list[WorkerMessage])
_control_decoder: msgspec.msgpack.Decoder[list[ControlMessage]] = msgspec.msgpack.Decoder(list[ControlMessage])


def encode_frame(messages: Sequence[WorkerMessage] | Sequence[ControlMessage]) -> bytes:
    """One frame that carries all ``messages`` in order."""
    return _encoder.encode(messages)


def encode_frames(messages: Sequence[WorkerMessage] | Sequence[ControlMessage]) -> Iterator[bytes]:
    """As few frames as may carry ``messages`` in order: KV is big, and a receiver takes no frame of a gigabyte."""
    batch: list[Any] = []
    held = 0
    for message in messages:
        size = len(message.kv) if isinstance(message, Generate | MovedOut) else 0
        if size and held and held + size > MAX_KV_PER_FRAME:
            yield _encoder.encode(batch)
            batch, held = [], 0
        batch.append(message)
        held += size
    yield _encoder.encode(batch)


def decode_from_worker(frame: bytes) -> list[WorkerMessage]:
    """Parse a frame at control.  Raises ``msgspec.ValidationError``/``DecodeError`` on anything else."""
    return _worker_decoder.decode(frame)


def decode_from_control(frame: bytes) -> list[ControlMessage]:
    """Parse a frame at a worker.  Raises ``msgspec.ValidationError``/``DecodeError`` on anything else."""
    return _control_decoder.decode(frame)
