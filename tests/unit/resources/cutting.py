"""Cancelling a coroutine at each of its awaits in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any


class Cut:
    """A coroutine that is cancelled at its n-th await: as it begins to wait, or as what it waited for has come."""

    def __init__(self, inner: Coroutine[Any, Any, Any], at: int | None, *, late: bool = False) -> None:
        self._inner = inner
        self._at = at
        self._late = late
        self.num_awaits = 0

    async def run(self) -> Any:
        return await self

    def __await__(self) -> Generator[Any, Any, Any]:
        inner, sent, error = self._inner, None, None
        while True:
            try:
                waited = inner.send(sent) if error is None else inner.throw(error)
            except StopIteration as done:
                return done.value
            if self.num_awaits == self._at:
                self._cut(waited)
            self.num_awaits += 1
            sent, error = None, None
            try:
                sent = yield waited
            except BaseException as thrown:  # noqa: BLE001 (handed on to the inner coroutine, whatever it is)
                error = thrown

    def _cut(self, waited: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._late and isinstance(waited, asyncio.Future):
            waited.add_done_callback(lambda _: task.cancel())
        else:
            task.get_loop().call_soon(task.cancel)
