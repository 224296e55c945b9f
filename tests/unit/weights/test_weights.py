"""Publishing and receiving through a folder; damage is refused by name."""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from wingbeat.core.errors import SetupError, UnavailableError, VersionGone
from wingbeat.core.weight_protocol import AdapterInfo, Manifest, TensorInfo
from wingbeat.weights.checksum import tensors_checksum
from wingbeat.weights.publish import WeightPublisher
from wingbeat.weights.receive import receive

HOST = "host-a"


def _tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "b.weight": torch.randn(3, 4, generator=generator),
        "a.weight": torch.randn(5, generator=generator).bfloat16(),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "transposed": torch.randn(4, 2, generator=generator).T,
        "empty": torch.zeros(0, 3),
    }


def _publisher(directory: Path, policy: str = "solver") -> WeightPublisher:
    return WeightPublisher(directory, host_id=HOST, policy=policy)


def _publish(publisher: WeightPublisher, version: int = 1, tensors: dict[str, Tensor] | None = None) -> Manifest:
    return publisher.publish(tensors or _tensors(), version=version, kind="full", base_model="/models/base")


def test_what_is_published_is_received(tmp_path: Path) -> None:
    manifest = _publish(_publisher(tmp_path / "w"), 7)
    received = receive(manifest, host_id=HOST).tensors
    wanted = _tensors()
    assert received.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(received[name], tensor)
        assert received[name].dtype == tensor.dtype
    assert (manifest.policy, manifest.version, manifest.kind) == ("solver", 7, "full")
    assert manifest.tensors[0] == TensorInfo(name="a.weight", dtype="BF16", shape=(5,))
    assert manifest.size_bytes == Path(manifest.path).stat().st_size
    assert manifest.checksum == tensors_checksum(received) == tensors_checksum(wanted)


def test_checksum_is_what_it_says() -> None:
    """sha256 over a line per tensor and its bytes, in name order."""
    tensors = {"y": torch.tensor([1.0, 2.0]), "x": torch.tensor([[3]], dtype=torch.int32)}
    wanted = hashlib.sha256(b"x I32 1,1\n" + struct.pack("<i", 3) + b"y F32 2\n" + struct.pack("<2f", 1.0, 2.0))
    assert tensors_checksum(tensors) == wanted.hexdigest()
    assert tensors_checksum(dict(reversed(tensors.items()))) == wanted.hexdigest()


@pytest.mark.parametrize(
    "changed",
    [
        {"z": torch.tensor([1.0, 2.0])},
        {"y": torch.tensor([[1.0, 2.0]])},
        {"y": torch.tensor([1.0, 2.0]).view(torch.int32)},
        {"y": torch.tensor([1.0, 2.0000002])},
    ],
    ids=["name", "shape", "dtype", "value"],
)
def test_checksum_sees_every_difference(changed: dict[str, Tensor]) -> None:
    assert tensors_checksum(changed) != tensors_checksum({"y": torch.tensor([1.0, 2.0])})


def test_a_dtype_that_cannot_be_published_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="complex64; convert it first"):
        _publish(_publisher(tmp_path), tensors={"x": torch.zeros(1, dtype=torch.complex64)})


def test_adapters_carry_their_scale(tmp_path: Path) -> None:
    publisher = _publisher(tmp_path)
    info = AdapterInfo(rank=2, alpha=4.0)
    manifest = publisher.publish(_tensors(), version=1, kind="adapter", base_model="/m", adapter=info)
    assert manifest.adapter == info
    with pytest.raises(ValueError, match="needs an AdapterInfo"):
        publisher.publish(_tensors(), version=2, kind="adapter", base_model="/m")
    with pytest.raises(ValueError, match="needs no AdapterInfo"):
        publisher.publish(_tensors(), version=2, kind="full", base_model="/m", adapter=info)
    with pytest.raises(ValueError, match="no tensors"):
        publisher.publish({}, version=2, kind="full", base_model="/m")


def test_release_and_close_delete_and_mapped_tensors_live_on(tmp_path: Path) -> None:
    publisher = _publisher(tmp_path / "w")
    first, second = _publish(publisher, 1), _publish(publisher, 2)
    received = receive(first, host_id=HOST).tensors
    publisher.release(1)
    publisher.release(1)
    assert not Path(first.path).exists()
    assert Path(second.path).exists()
    assert tensors_checksum(received) == first.checksum
    publisher.close()
    publisher.close()
    assert not (tmp_path / "w").exists()


def test_a_version_of_two_lineages_is_released_by_checksum(tmp_path: Path) -> None:
    with _publisher(tmp_path / "w") as publisher:
        abandoned, anew = _publish(publisher, 3), _publish(publisher, 3, {"x": torch.zeros(2)})
        publisher.release(3, checksum=abandoned.checksum)
        publisher.release(3, checksum="unknown")
        assert not Path(abandoned.path).exists() and Path(anew.path).exists()
        publisher.release(3)
        assert not Path(anew.path).exists()


def test_a_version_made_again_gets_another_file(tmp_path: Path) -> None:
    with _publisher(tmp_path / "w") as publisher:
        first = _publish(publisher, 3)
        again = _publish(publisher, 3, {"x": torch.zeros(2)})
        assert first.path != again.path
        assert receive(first, host_id=HOST).tensors.keys() == _tensors().keys()
        publisher.release(3)
        assert not list((tmp_path / "w").iterdir())


def test_a_new_publisher_adopts_what_its_predecessor_left(tmp_path: Path) -> None:
    left = _publish(_publisher(tmp_path))
    other = _publish(_publisher(tmp_path, "solver-2"))
    notes = tmp_path / "solver-notes.txt"
    notes.write_text("mine")
    (tmp_path / f"solver-00000001-{'0' * 16}.safetensors.partial").write_bytes(b"half")
    successor = _publisher(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {notes.name, Path(left.path).name, Path(other.path).name}
    successor.release(left.version)
    assert {path.name for path in tmp_path.iterdir()} == {notes.name, Path(other.path).name}


def test_no_room_is_told_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = _publisher(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(SetupError, match="which has 10"):
        _publish(publisher)
    assert not list(tmp_path.iterdir())


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(SetupError, match="belongs to user"):
        _publisher(tmp_path)


def test_publishing_is_atomic(tmp_path: Path) -> None:
    publisher = _publisher(tmp_path)
    shared = torch.zeros(4)
    with pytest.raises(RuntimeError, match="share memory"):
        _publish(publisher, tensors={"a": shared, "b": shared})
    assert not list(tmp_path.iterdir())


def test_another_host_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"tensors of another host cannot be mapped: .* on host host-a.* host host-b"):
        receive(_publish(_publisher(tmp_path)), host_id="host-b")


def test_a_released_version_is_gone(tmp_path: Path) -> None:
    publisher = _publisher(tmp_path)
    manifest = _publish(publisher)
    publisher.release(1)
    with pytest.raises(VersionGone, match="no such file"):
        receive(manifest, host_id=HOST)


def _corrupt(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "flipped bit":
        data[-1] ^= 1
    elif how == "broken header":
        data[:8] = b"\xff" * 8
    else:
        del data[-1]
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("flipped bit", "expected checksum"),
        ("broken header", "not a safetensors file"),
        ("truncated", "expected .* bytes"),
    ],
)
def test_a_damaged_file_is_refused(how: str, message: str, tmp_path: Path) -> None:
    manifest = _publish(_publisher(tmp_path))
    _corrupt(Path(manifest.path), how)
    with pytest.raises(UnavailableError, match=message):
        receive(manifest, host_id=HOST)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"checksum": "0" * 64}, "expected checksum 000"),
        ({"tensors": ()}, "5 tensors differ from the manifest; 'a.weight'"),
        ({"size_bytes": 1}, "expected 1 bytes"),
    ],
)
def test_a_manifest_that_promises_something_else_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    manifest = _publish(_publisher(tmp_path))
    with pytest.raises(UnavailableError, match=message):
        receive(msgspec.structs.replace(manifest, **change), host_id=HOST)


@pytest.mark.parametrize("policy", ["", "a/b", ".hidden"])
def test_policy_names_that_are_no_file_names_are_refused(policy: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="policy name"):
        _publisher(tmp_path, policy)


def test_what_predecessors_left_goes_unless_it_is_kept(tmp_path: Path) -> None:
    dead = _publisher(tmp_path / "w")
    others = [_publish(dead, version, {"w": torch.full((2,), float(version))}) for version in (1, 2, 3)]
    foreign = _publish(_publisher(tmp_path / "w", "checker"))
    heir = _publisher(tmp_path / "w")
    newest = _publish(heir, 3, {"w": torch.zeros(2)})
    heir.keep([others[1].checksum, newest.checksum])
    assert [Path(m.path).exists() for m in (*others, newest, foreign)] == [False, True, False, True, True]
    heir.release(2)
    heir.close()
    assert [Path(m.path).exists() for m in (others[1], newest, foreign)] == [False, False, True]
