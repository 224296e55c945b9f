"""The run's event log: one JSON object per line in ``events.jsonl``, read by inspect, plots and dashboards."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from wingbeat.core.files import LineFile


class EventLog:
    """Appends ``{"t": unix_seconds, "event": name, ...}`` lines and tells subscribers.

    Lines are handed to the system as written; the log is a record for people and tools, never the truth (that
    is the ledger), so a torn last line after a crash is skipped by :func:`read_events`.  A full disk stops
    nobody: events are lost until there is room, and ``events_lost`` then says how many.
    """

    def __init__(self, path: Path | None, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._file = LineFile(path) if path is not None else None
        self._subscribers: list[Callable[[dict[str, Any]], None]] = []

    def emit(self, event: str, **fields: Any) -> None:
        """Record one event; ``fields`` must be JSON data."""
        record = {"t": round(self._clock(), 4), "event": event, **fields}
        self._append(record)
        for subscriber in tuple(self._subscribers):
            subscriber(record)

    def _append(self, record: dict[str, Any]) -> None:
        file = self._file
        if file is None:
            return
        lost = file.num_lost
        if lost:
            told = file.append(_line({"t": record["t"], "event": "events_lost", "count": lost}))
            file.num_lost = 0 if told else lost
        file.append(_line(record))

    def subscribe(self, callback: Callable[[dict[str, Any]], None]) -> Callable[[], None]:
        """Call ``callback`` with every later event; returns the function that ends it."""
        self._subscribers.append(callback)
        return lambda: self._subscribers.remove(callback)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, separators=(",", ":"))


def read_events(path: Path) -> list[dict[str, Any]]:
    """All whole lines of an event log, oldest first."""
    records: list[dict[str, Any]] = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                records.append(json.loads(line))
    return records
