"""A pickle in place of any file or message of ours is refused, and what it holds does not run."""

from __future__ import annotations

import hashlib
import json
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zstandard

from wingbeat.core.errors import ModelSourceError, SetupError, UnavailableError, WingbeatError
from wingbeat.core.support import decode_support, encode_support
from wingbeat.core.weight_protocol import Manifest
from wingbeat.core.worker_protocol import decode_from_control, decode_from_worker
from wingbeat.dataflow.ledger_decoding import decode_samples
from wingbeat.environments.calculator.tokenizer import write_tokenizer
from wingbeat.server.episodes.sources import load_sources
from wingbeat.tracking.serialize import load_graph, load_turns
from wingbeat.trainer.checkpoint import CheckpointStore
from wingbeat.trainer.models import load_model
from wingbeat.weights.receive import receive


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.mark,)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "it-ran"


@pytest.fixture
def bomb(mark: Path) -> bytes:
    data = pickle.dumps(Bomb(mark))
    pickle.loads(data)
    assert mark.exists(), "it does run where somebody unpickles it"
    mark.unlink()
    return data


def model_folder(folder: Path) -> Path:
    write_tokenizer(folder)
    config = {"model_type": "qwen3", "hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 32}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def refused(read: Callable[[], Any], *kinds: type[Exception]) -> str:
    with pytest.raises(kinds) as caught:
        read()
    return str(caught.value)


def test_weights_of_a_model(tmp_path: Path, bomb: bytes, mark: Path) -> None:
    folder = model_folder(tmp_path / "model")

    def read() -> Any:
        return load_model(folder, dtype=torch.float32, device="cpu")

    torch.save({"weight": Bomb(mark)}, folder / "pytorch_model.bin")
    assert "expected model.safetensors" in refused(read, ModelSourceError)
    (folder / "model.safetensors").write_bytes(bomb)
    refused(read, ModelSourceError)
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    for shard in ("pytorch_model.bin", "../model.safetensors", "/etc/model.safetensors", 7):
        index.write_text(json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": shard}}))
        assert "expected .safetensors files beside it" in refused(read, ModelSourceError)
    index.write_text("[]")
    assert "weight_map" in refused(read, ModelSourceError)
    assert not mark.exists()


def test_code_that_comes_with_a_model(tmp_path: Path, mark: Path) -> None:
    """``auto_map`` names code of the folder's own; transformers would run it, or ask on the terminal."""
    folder = model_folder(tmp_path / "model")
    (folder / "own.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    names = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (folder / "config.json").write_text(json.dumps({"model_type": "my-own", "auto_map": names}))
    (folder / "model.safetensors").write_bytes(b"")
    refused(lambda: load_model(folder, dtype=torch.float32, device="cpu"), ModelSourceError)
    assert not mark.exists()


def test_a_checkpoint(tmp_path: Path, bomb: bytes, mark: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    folder = store.path_of(3)
    folder.mkdir(parents=True)
    file = {"sha256": hashlib.sha256(bomb).hexdigest(), "size": len(bomb)}
    (folder / "state.json").write_text(json.dumps({"format": 1, "step": 3, "files": {"state.safetensors": file}}))
    (folder / "state.safetensors").write_bytes(bomb)

    trainer: Any = None  # which gets no state
    report = store.load_latest(trainer)
    assert report.step is None and "state.safetensors cannot be read" in report.skipped[0].reason
    assert not mark.exists()


def test_published_weights_and_adapters(tmp_path: Path, bomb: bytes, mark: Path) -> None:
    path = tmp_path / "solver-00000001-0123456789abcdef.safetensors"
    path.write_bytes(bomb)
    manifest = Manifest("solver", 1, "full", str(path), "here", "0" * 64, len(bomb), (), "model", 0)
    assert "not a safetensors file" in refused(lambda: receive(manifest, host_id="here"), UnavailableError)
    assert not mark.exists()


def test_what_the_ledger_and_the_run_directory_hold(tmp_path: Path, bomb: bytes, mark: Path) -> None:
    packed = zstandard.compress(bomb)
    for payload in (bomb, packed):
        refused(lambda payload=payload: decode_samples(payload), WingbeatError, ValueError, msgspec.MsgspecError)
        refused(lambda payload=payload: load_graph(payload), WingbeatError, ValueError, msgspec.MsgspecError)
        refused(lambda payload=payload: load_turns("e", [payload]), WingbeatError, ValueError, msgspec.MsgspecError)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "a-train.json").write_bytes(bomb)
    assert "is damaged" in refused(lambda: load_sources(tmp_path), SetupError)
    assert not mark.exists()


def test_frames_of_workers(bomb: bytes, mark: Path) -> None:
    for decode in (decode_from_worker, decode_from_control):
        refused(lambda decode=decode: decode(bomb), msgspec.MsgspecError)
    assert not mark.exists()


def test_few_bytes_that_unpack_to_many() -> None:
    """Whatever is unpacked has a bound: a ledger's value, and the support that a worker sends."""
    honest = bytearray(zstandard.compress(b"x" * 300_000))
    # the frame header's content size: descriptor byte 4 says a field of 4 bytes follows
    assert zstandard.frame_content_size(bytes(honest)) == 300_000
    lying = bytes(honest).replace((300_000).to_bytes(4, "little"), (2**32 - 1).to_bytes(4, "little"), 1)
    assert "claims 4294967295 bytes" in refused(lambda: decode_samples(lying), WingbeatError)
    bits = np.zeros(1000, np.bool_)
    bits[::2] = True
    assert (decode_support(encode_support(bits), vocabulary=1000) == bits).all()
    flood = b"\x00" + zlib.compress(bytes(50_000_000), 9)
    assert len(flood) < 60_000
    assert "does not end within" in refused(lambda: decode_support(flood, vocabulary=1000), ValueError)
