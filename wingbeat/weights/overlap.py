"""Publishing beside training: a copy of the weights is taken at once, and written while the next step runs.

    compute thread    step n ── stage ── step n + 1 ───────── (waits for n) ── stage ── step n + 2
                                  └──▶ thread    write, checksum, delta ──▶ on_published(n)

At most one version is on its way.  Staging costs a copy of the weights in the host's memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import msgspec
import torch
from torch import Tensor

from wingbeat.core.weight_protocol import AdapterInfo, Manifest
from wingbeat.weights.publish import NoRoom, WeightPublisher

RETRY_S = 1.0
"""Between attempts to publish into a full folder."""
UNPINNED = ("cpu", "mps")
"""Kinds of devices to which page-locked memory is nothing."""


@dataclass(frozen=True, slots=True)
class Version:
    """What is published, beside the tensors."""

    version: int
    lineage: int
    kind: Literal["full", "adapter"]
    base_model: str
    adapter: AdapterInfo | None
    delta: bool


Carry = Callable[[Manifest, Callable[[], bool], Callable[[str], None]], bool]
"""Brings a version's files where receivers find them, for as long as the second argument says; whether it did.

The third one is told what keeps them from it.
"""


def stay(manifest: Manifest, is_wanted: Callable[[], bool], on_trouble: Callable[[str], None]) -> bool:
    """A :data:`Carry` of files that lie where receivers look for them."""
    return True


class Staging:
    """Copies of tensors in the host's memory; page-locked ones, which are dear to make, are used again."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Independent of ``tensors`` when it returns.  What was taken before is overwritten."""
        staged = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            staged[name].copy_(tensor, non_blocking=True)
        self._buffers = {name: buffer for name, buffer in staged.items() if buffer.is_pinned()}
        for device in {tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"}:
            torch.accelerator.synchronize(device)
        return staged

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        known = self._buffers.get(name)
        if known is not None and known.shape == tensor.shape and known.dtype == tensor.dtype:
            return known
        return torch.empty(
            tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.device.type not in UNPINNED
        )


class OverlappedPublisher:
    """Driven by one thread; publishes on another."""

    def __init__(
        self,
        publisher: WeightPublisher,
        *,
        on_published: Callable[[Manifest, float], None],
        on_trouble: Callable[[str], None],
        on_ended: Callable[[BaseException | None], None],
        carry: Carry = stay,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """All of these are called on the publishing thread.

        ``on_published`` is also told the seconds that it took; ``on_trouble`` why a version is not published yet, while
        it is tried again; ``on_ended`` always, once another version may be started, with what was raised where this one
        is not published.  ``carry`` brings the files where receivers find them.
        """
        self.publisher = publisher
        self._on_published = on_published
        self._on_trouble = on_trouble
        self._on_ended = on_ended
        self._carry = carry
        self._sleep = sleep
        self._staging = Staging()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._under_way: Future[None] | None = None
        self._stopping = False

    @property
    def is_busy(self) -> bool:
        """A version is on its way: no other one may be started."""
        return self._under_way is not None and not self._under_way.done()

    def start(self, tensors: Mapping[str, Tensor], version: Version) -> None:
        """Publish a copy of ``tensors``, which may change once this returns."""
        assert not self.is_busy, "one version at a time"
        staged = self._staging.take(tensors)
        self._under_way = self._thread.submit(self._run, staged, version)
        self._under_way.add_done_callback(lambda done: self._on_ended(done.exception()))

    def check(self) -> None:
        """Raise what ended the last version, if something did; waits for it."""
        if self._under_way is not None:
            self._under_way.result()

    def close(self) -> None:
        """Give up what waits for room, end what is being written, and delete every version."""
        self._stopping = True
        self._thread.shutdown()
        self.publisher.close()

    def _run(self, staged: Mapping[str, Tensor], version: Version) -> None:
        started = time.perf_counter()
        manifest = self._publish(staged, version)
        if manifest is not None and self._carry(manifest, lambda: not self._stopping, self._on_trouble):
            self._on_published(manifest, time.perf_counter() - started)

    def _publish(self, staged: Mapping[str, Tensor], version: Version) -> Manifest | None:
        """None where it is told to stop before there is room."""
        is_told = False
        while not self._stopping:
            try:
                manifest = self.publisher.publish(
                    staged,
                    version=version.version,
                    kind=version.kind,
                    base_model=version.base_model,
                    adapter=version.adapter,
                    delta=version.delta,
                )
                return msgspec.structs.replace(manifest, lineage=version.lineage)
            except NoRoom as error:
                if not is_told:
                    self._on_trouble(str(error))
                is_told = True
            self._sleep(RETRY_S)
        return None
