"""A worker that cannot do its work says so in one line and by its exit code: it is not started again and again."""

from __future__ import annotations

from typing import Any

import pytest

from wingbeat.core.errors import SetupError
from wingbeat.workers import main


class Link:
    failed = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.heartbeat: Any = None

    def start(self) -> None: ...
    def close(self) -> None: ...
    def send(self, *messages: Any) -> None: ...
    def deliver(self, message: Any) -> None: ...
    def receive(self, **how: Any) -> list[Any]:
        return []


class Refusing:
    def run(self, receive: Any) -> None:
        raise SetupError("the checkpoint is of another rank\nuse rank 4")

    def heartbeat(self) -> None: ...


def test_what_must_be_fixed_first_ends_the_worker_with_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main, "WorkerLink", Link)
    for name in ("_stop_on_signals", "end_with_supervisor"):
        monkeypatch.setattr(main, name, lambda *a, **k: None)
    monkeypatch.setattr(main.torch, "set_num_interop_threads", lambda number: None)
    arguments = main.WorkerArguments("http://x", "key", "trainer-solver", (), 1)
    build: Any = lambda *parts: Refusing()  # noqa: E731
    with pytest.raises(SystemExit) as ended:
        main.run_worker("trainer", arguments, build)
    assert ended.value.code == SetupError.exit_code == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: the checkpoint is of another rank use rank 4"
