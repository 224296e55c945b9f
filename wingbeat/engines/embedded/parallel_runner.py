"""An engine's model and KV over several processes: rank 0's :class:`LeadRunner`, and what the others do.

Rank 0 hosts the engine: it alone knows requests, decides steps and samples.  Each forward pass is announced to the
others, which run it on their slices of the weights and their KV heads; sums and logits come together inside of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from wingbeat.core.errors import ModelSourceError, SetupError, UnavailableError, VersionGone, WingbeatError
from wingbeat.core.weight_protocol import AdapterInfo
from wingbeat.engines.embedded.kv import LayerSpec
from wingbeat.engines.embedded.lora import PREFIX, SUFFIX_A, SUFFIX_B, AdapterMerger
from wingbeat.engines.embedded.parallel import Shards, gather_heads, shard_model, spread_heads
from wingbeat.engines.embedded.parallel_commands import (
    Clear,
    ClearAll,
    Close,
    Command,
    Commit,
    Copy,
    Ensure,
    Forward,
    Load,
    Open,
    Peers,
    Pipe,
    Prepare,
    ReadKv,
    Reply,
    WriteKv,
    frame,
)
from wingbeat.engines.embedded.pool import Extent
from wingbeat.engines.embedded.runner import LayerKV, ModelRunner
from wingbeat.engines.embedded.step import Segment
from wingbeat.engines.embedded.weights import check_weights

LoadModel = Callable[[str, str], PreTrainedModel]
"""(folder, dtype name) -> the whole model, on the CPU."""


class ShardRunner(ModelRunner):
    """One rank's part: a runner over its slices.  ``layers`` are the whole model's."""

    def __init__(self, model: PreTrainedModel, *, shards: Shards, capacity_tokens: int, device: torch.device) -> None:
        self.shards = shards
        try:
            super().__init__(model, capacity_tokens=capacity_tokens, device=device)
        except ModelSourceError as error:
            raise ModelSourceError(
                f"split over engine.tensor_parallel = {shards.size} processes by its own plan: {error.message}"
            ) from error
        self.layers: Sequence[LayerSpec] = [replace(s, kv_heads=s.kv_heads * shards.kv_parts) for s in self.layers]
        self._merger: AdapterMerger | None = None

    def own_weights(self, path: Path, adapter: AdapterInfo | None) -> dict[str, Tensor]:
        """This rank's slices of the weights in a safetensors file, checked; an adapter's merged onto the base.

        Raises ModelSourceError where they do not fit, and VersionGone or UnavailableError where the file does not.
        """
        try:
            tensors = self._read_adapter(path) if adapter is not None else self._read_model(path)
        except FileNotFoundError:
            raise VersionGone(f"{path}: no such file, the version was released; load the live version") from None
        except (SafetensorError, OSError) as error:
            raise UnavailableError(f"{path}: not a safetensors file ({error}); publish it again") from error
        if adapter is not None:
            if self._merger is None:
                self._merger = AdapterMerger(self.model, adapter=adapter)
            tensors = self._merger.merge(tensors)
        check_weights(self.model, tensors, partial=adapter is not None)
        return tensors

    def _read_model(self, path: Path) -> dict[str, Tensor]:
        return {name: self.shards.local(name, full) for name, full in _mapped(path).items()}

    def _read_adapter(self, path: Path) -> dict[str, Tensor]:
        found = _mapped(path)
        for name_a in [name for name in found if name.endswith(SUFFIX_A)]:
            module = name_a[len(PREFIX) : -len(SUFFIX_A)]
            name_b = f"{PREFIX}{module}{SUFFIX_B}"
            if name_b in found:
                found[name_a], found[name_b] = self.shards.local_adapter(module, found[name_a], found[name_b])
        return found


def _mapped(path: Path) -> dict[str, Tensor]:
    """The whole tensors of a file where they lie: what is not looked at is not read."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping


class LeadRunner(ShardRunner):
    """Rank 0's runner: what it does, all ranks do."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        shards: Shards,
        capacity_tokens: int,
        device: torch.device,
        peers: Peers,
        number: int,
    ) -> None:
        self._peers = peers
        self._number = number
        with peers.together(Open(number, capacity_tokens)):
            super().__init__(model, shards=shards, capacity_tokens=capacity_tokens, device=device)
        self.parallelism = shards.size
        self.ensure, self.copy, self.clear, self.clear_all = self._ensure, self._copy, self._clear, self._clear_all

    def forward(self, segments: Sequence[Segment], ids: Sequence[int], due: Sequence[int]) -> Tensor:
        table = [(s.extent.start, s.extent.size, s.begin, s.count) for s in segments]
        self._peers.tell(Forward(self._number, _packed(table), _packed(ids), _packed(due)))
        return super().forward(segments, ids, due)

    def prepare_weights(self, path: Path, adapter: AdapterInfo | None) -> dict[str, Tensor]:
        """Have every rank map and check a file of published weights; rank 0's own slices, for ``update_weights``.

        Raises WingbeatError where one of them cannot serve it; nothing has changed then.
        """
        with self._peers.together(Prepare(self._number, str(path), adapter)):
            return self.own_weights(path, adapter)

    def write_weights(self, tensors: Mapping[str, Tensor], *, partial: bool) -> None:
        """``tensors`` are what :meth:`prepare_weights` gave last."""
        super().write_weights(tensors, partial=partial)
        self._peers.tell(Commit(self._number))

    def read_kv(self, start: int, *, tokens: int) -> list[LayerKV]:
        self._peers.tell(ReadKv(self._number, start, tokens))
        found: list[LayerKV] = []
        for keys, values in self.store.ranges(start, tokens=tokens):
            whole = gather_heads(keys, self.shards), gather_heads(values, self.shards)
            found.append((cast(Tensor, whole[0]).cpu(), cast(Tensor, whole[1]).cpu()))
        return found

    def write_kv(self, start: int, kv: Sequence[LayerKV]) -> None:
        tokens = kv[0][0].shape[1]
        self._peers.tell(WriteKv(self._number, start, tokens))
        super().write_kv(start, [(self._spread(k), self._spread(v)) for k, v in kv])

    def close(self) -> None:
        """The other ranks forget the model; one that is gone has."""
        with contextlib.suppress(BrokenPipeError):
            self._peers.tell(Close(self._number))

    def _spread(self, full: Tensor) -> Tensor:
        return spread_heads(full.to(self._device).contiguous(), self.shards)

    def _ensure(self, end: int) -> None:
        self._peers.tell(Ensure(self._number, end), later=True)
        self.store.ensure(end)

    def _copy(self, source: int, target: int, *, tokens: int) -> None:
        self._peers.tell(Copy(self._number, source, target, tokens), later=True)
        self.store.copy(source, target, tokens=tokens)

    def _clear(self, start: int, *, tokens: int) -> None:
        self._peers.tell(Clear(self._number, start, tokens), later=True)
        self.store.clear(start, tokens=tokens)

    def _clear_all(self) -> None:
        self._peers.tell(ClearAll(self._number), later=True)
        self.store.clear_all()


@dataclass(slots=True)
class _Hosted:
    """A model as a follower has it."""

    model: PreTrainedModel
    shards: Shards
    runner: ShardRunner | None = None
    prepared: tuple[dict[str, Tensor], bool] | None = None


class Follower:
    """A rank above 0: does what it is told until rank 0 is gone."""

    def __init__(self, pipe: Pipe, *, rank: int, size: int, device: torch.device, load_model: LoadModel) -> None:
        self._pipe = pipe
        self._rank = rank
        self._size = size
        self._device = device
        self._load_model = load_model
        self._hosted: dict[int, _Hosted] = {}

    def run(self) -> None:
        """Ends when rank 0 closes the pipe."""
        while True:
            try:
                command = self._pipe.command()
            except EOFError:
                return
            self._do(command)

    def _do(self, command: Command) -> None:
        match command:
            case Load(model=number, folder=folder, dtype=dtype):
                self._answer(lambda: self._load(number, folder, dtype))
            case Open(model=number, capacity_tokens=capacity):
                self._answer(lambda: self._open(number, capacity))
            case Prepare(model=number, path=path, adapter=adapter):
                self._answer(lambda: self._prepare(number, Path(path), adapter))
            case Close(model=number):
                self._hosted.pop(number, None)
            case _:
                self._compute(command, self._runner(command.model))

    @torch.inference_mode()
    def _compute(self, command: Command, runner: ShardRunner) -> None:
        match command:
            case Forward(segments=table, ids=ids, due=due):
                rows = _unpacked(table)
                quads = zip(rows[::4], rows[1::4], rows[2::4], rows[3::4], strict=True)
                segments = [Segment(Extent(start, size), begin, count) for start, size, begin, count in quads]
                runner.forward(segments, _unpacked(ids), _unpacked(due))
            case Ensure(end=end):
                runner.ensure(end)
            case Copy(source=source, target=target, tokens=tokens):
                runner.copy(source, target, tokens=tokens)
            case Clear(start=start, tokens=tokens):
                runner.clear(start, tokens=tokens)
            case ClearAll():
                runner.clear_all()
            case ReadKv(start=start, tokens=tokens):
                for pair in runner.store.ranges(start, tokens=tokens):
                    for own in pair:
                        gather_heads(own, runner.shards)
            case WriteKv(start=start, tokens=tokens):
                runner.write_kv(start, self._received(runner, tokens))
            case _:
                hosted = self._hosted[command.model]
                assert isinstance(command, Commit) and hosted.prepared is not None, f"{command} was not prepared"
                tensors, partial = hosted.prepared
                hosted.prepared = None
                runner.write_weights(tensors, partial=partial)

    def _received(self, runner: ShardRunner, tokens: int) -> list[LayerKV]:
        """Rank 0's KV, this rank's heads of it."""

        def pair(spec: LayerSpec) -> LayerKV:
            sizes = (spec.key_size, spec.value_size)
            fresh = [torch.empty(spec.kv_heads, tokens, s, dtype=spec.dtype, device=self._device) for s in sizes]
            keys, values = (spread_heads(full, runner.shards) for full in fresh)
            return keys, values

        return [pair(spec) for spec in runner.layers]

    def _answer(self, action: Callable[[], None]) -> None:
        """Do what is answered.  What it raises is rank 0's to report; this process is as before."""
        reply = Reply()
        try:
            action()
        except (WingbeatError, OSError, RuntimeError, KeyError, ValueError) as error:
            reply = Reply(error=str(error), setup=isinstance(error, SetupError))
        self._pipe.send(frame(reply))

    def _load(self, number: int, folder: str, dtype: str) -> None:
        model = self._load_model(folder, dtype)
        shards = shard_model(model, rank=self._rank, size=self._size)
        model.to(self._device).eval().requires_grad_(False)  # pyright: ignore[reportArgumentType]
        self._hosted[number] = _Hosted(model, shards)

    def _open(self, number: int, capacity_tokens: int) -> None:
        hosted = self._hosted[number]
        hosted.runner = ShardRunner(
            hosted.model, shards=hosted.shards, capacity_tokens=capacity_tokens, device=self._device
        )

    def _prepare(self, number: int, path: Path, adapter: AdapterInfo | None) -> None:
        runner = self._hosted[number].runner
        assert runner is not None, "prepared before it was opened"
        self._hosted[number].prepared = (runner.own_weights(path, adapter), adapter is not None)

    def _runner(self, number: int) -> ShardRunner:
        runner = self._hosted[number].runner
        assert runner is not None, "used before it was opened"
        return runner


def _packed(numbers: Sequence[int] | Sequence[tuple[int, ...]]) -> bytes:
    return np.asarray(numbers, "<i4").tobytes()


def _unpacked(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i4").tolist()
