"""An engine's own copy of the server's models: found by what is in a folder, fetched where there is none."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from wingbeat.core.errors import SetupError
from wingbeat.core.model_files import SAMPLE_BYTES, WHOLE_BYTES, fingerprint, model_files
from wingbeat.core.worker_protocol import PolicySpec
from wingbeat.workers.models import ModelFolders, Stopped

WEIGHTS = bytes(range(256)) * (WHOLE_BYTES // 256 + 40)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "server" / "model"
    made.mkdir(parents=True)
    (made / "config.json").write_text('{"model_type": "qwen3"}')
    (made / "tokenizer.json").write_text("{}")
    (made / "model.safetensors").write_bytes(WEIGHTS)
    (made / "README.md").write_text("not the model's")
    return made


def test_a_fingerprint_is_of_the_files_that_make_a_model(folder: Path, tmp_path: Path) -> None:
    assert [path.name for path in model_files(folder)] == ["config.json", "model.safetensors", "tokenizer.json"]
    before = fingerprint(folder)
    (folder / "README.md").write_text("changed")
    assert fingerprint(folder) == before
    for place in (0, len(WEIGHTS) // 2, len(WEIGHTS) - 1):  # as any fine-tune does, in far more places
        changed = bytearray(WEIGHTS)
        for i in range(place % SAMPLE_BYTES, len(WEIGHTS), SAMPLE_BYTES):
            changed[i] ^= 1
        (folder / "model.safetensors").write_bytes(changed)
        assert fingerprint(folder) != before
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    assert fingerprint(folder) == before
    (folder / "tokenizer.json").write_text("[]")
    assert fingerprint(folder) != before


class Shelf:
    """Serves a model as control does; ``cuts`` says after how many bytes a reply breaks off, one for each."""

    def __init__(self, folder: Path) -> None:
        self.cuts: list[int] = []
        self.garbles = 0
        self.asked: list[tuple[str, str]] = []
        shelf = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name, span = self.path.rpartition("/")[2], self.headers.get("Range", "")
                shelf.asked.append((name, span))
                if self.headers["Authorization"] != "Bearer worker-key":
                    self.send_error(401)
                    return
                if name == "solver":
                    body = json.dumps({"files": [entry(path) for path in model_files(folder)]}).encode()
                    self.reply(200, body)
                    return
                body = (folder / name).read_bytes()
                start = int(match[1]) if (match := re.match(r"bytes=(\d+)-", span)) else 0
                if shelf.garbles and name.endswith("safetensors"):
                    shelf.garbles -= 1
                    body = bytes(len(body))
                self.reply(206 if span else 200, body[start:])

            def reply(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                is_cut = shelf.cuts and len(body) > 1000
                self.wfile.write(body[: shelf.cuts.pop(0)] if is_cut else body)

            def log_message(self, format: str, *args: Any) -> None: ...

        def entry(path: Path) -> dict[str, Any]:
            data = path.read_bytes()
            return {"name": path.name, "size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"
        self.spec = PolicySpec("solver", "/nowhere/model", 64, {}, "/nowhere/model", fingerprint(folder))


@pytest.fixture
def shelf(folder: Path) -> Iterator[Shelf]:
    made = Shelf(folder)
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


def folders(shelf: Shelf, cache: Path, **options: Any) -> ModelFolders:
    return ModelFolders(shelf.url, options.pop("key", "worker-key"), folder=cache, sleep=lambda s: None, **options)


def test_the_same_model_at_the_same_path_is_taken(folder: Path, shelf: Shelf, tmp_path: Path) -> None:
    spec = msgspec.structs.replace(shelf.spec, model=str(folder))
    assert folders(shelf, tmp_path / "cache").local(spec).model == str(folder)
    assert shelf.asked == []


def test_what_is_missing_is_fetched_once_and_goes_on_where_it_broke_off(shelf: Shelf, tmp_path: Path) -> None:
    shelf.cuts = [5000, 100_000]
    got = Path(folders(shelf, tmp_path / "cache").local(shelf.spec).model)
    assert fingerprint(got) == shelf.spec.fingerprint and (got / "model.safetensors").read_bytes() == WEIGHTS
    spans = [span for name, span in shelf.asked if name == "model.safetensors"]
    assert spans == ["", "bytes=5000-", "bytes=105000-"]
    count = len(shelf.asked)
    assert folders(shelf, tmp_path / "cache").local(shelf.spec).model == str(got) and len(shelf.asked) == count


def test_a_path_that_cannot_be_looked_at_and_a_damaged_copy_are_passed_over(shelf: Shelf, tmp_path: Path) -> None:
    damaged = tmp_path / "cache" / shelf.spec.fingerprint
    damaged.mkdir(parents=True)
    (damaged / "config.json").write_text("{", encoding="utf-8")
    spec = msgspec.structs.replace(shelf.spec, model="/x" * 5000)
    found = folders(shelf, tmp_path / "cache").local(spec)
    assert Path(found.model) == damaged and fingerprint(damaged) == spec.fingerprint


def test_garbled_bytes_are_not_kept(shelf: Shelf, tmp_path: Path) -> None:
    shelf.garbles = 1
    got = Path(folders(shelf, tmp_path / "cache").local(shelf.spec).model)
    assert (got / "model.safetensors").read_bytes() == WEIGHTS
    shelf.garbles = 100
    with pytest.raises(SetupError, match=r"cannot fetch model.safetensors .* others than the server promised"):
        folders(shelf, tmp_path / "other").local(shelf.spec)


def test_one_that_is_told_to_end_stops_and_keeps_what_came(shelf: Shelf, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        folders(shelf, tmp_path / "cache", is_stopped=lambda: True).local(shelf.spec)
    folders(shelf, tmp_path / "cache").local(shelf.spec)


def test_a_model_that_changed_on_the_server_and_a_wrong_key_are_told(
    folder: Path, shelf: Shelf, tmp_path: Path
) -> None:
    with pytest.raises(SetupError, match="401"):
        folders(shelf, tmp_path / "cache", key="guess").local(shelf.spec)
    (folder / "tokenizer.json").write_text("[]")
    with pytest.raises(SetupError, match="changed on the server since it started"):
        folders(shelf, tmp_path / "cache").local(shelf.spec)
