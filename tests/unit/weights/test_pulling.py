"""Weights of another host: pulled, resumed, made of differences, passed on; nothing damaged is ever loaded."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor

from wingbeat.core.errors import SetupError, UnavailableError, VersionGone
from wingbeat.core.weight_protocol import CONTROL, Manifest
from wingbeat.weights.checksum import tensors_checksum
from wingbeat.weights.publish import WeightPublisher
from wingbeat.weights.pull import NoSource, PullLimits, Source
from wingbeat.weights.receiver import Remote, WeightReceiver
from wingbeat.weights.relay import RelayServer
from wingbeat.weights.store import HostStore

sys.path.insert(0, str(Path(__file__).parent))  # test folders are no packages
from weight_server import WeightServer

RELAY_KEY = "relay-key"
LIMITS = PullLimits(stall_s=2.0, give_up_s=4.0)


def tensors(version: int) -> dict[str, Tensor]:
    """Each version differs from the one before in a hundredth of its elements."""
    generator = torch.Generator().manual_seed(0)
    found = {f"layer.{i}.weight": torch.randn(64, 512, generator=generator).bfloat16() for i in range(4)}
    for step in range(version):
        for tensor in found.values():
            tensor.view(-1)[step::100] += 0.5
    return found


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pull.SHORTEST_PAUSE_S", "pull.WAIT_S", "wanted.POLL_S"):
        monkeypatch.setattr(f"wingbeat.weights.{name}", 0.01)


@dataclass
class Host:
    """A machine with an engine, and maybe a relay."""

    folder: Path
    control: WeightServer
    relay: RelayServer | None = None
    receiver: WeightReceiver = field(init=False)

    def __post_init__(self) -> None:
        self.receiver = WeightReceiver("elsewhere")
        if self.relay is not None:
            self.relay.key = RELAY_KEY

        def open_store(size_bytes: int) -> HostStore:
            store = HostStore(self.folder)
            if self.relay is not None:
                self.relay.store = store
            return store

        self.receiver.remote = Remote(
            open_store=open_store,
            source=lambda name: self.control.source if name == CONTROL else Source(name, RELAY_KEY),
            limits=LIMITS,
            expect=self.relay.expect if self.relay is not None else lambda manifest: None,
        )

    def receive(self, manifest: Manifest, *sources: str, **more: object) -> str:
        """The checksum of what it then serves."""
        received = self.receiver.receive(manifest, (*sources, CONTROL), **more)  # pyright: ignore[reportArgumentType]
        assert received.path.parent == self.folder and received.receive_s > 0
        return tensors_checksum(received.tensors)

    def files(self, suffix: str) -> list[str]:
        return sorted(path.name for path in self.folder.glob(f"*{suffix}"))


@pytest.fixture
def control() -> Iterator[WeightServer]:
    with WeightServer() as server:
        yield server


@pytest.fixture
def publish(control: WeightServer, tmp_path: Path) -> Iterator[Callable[[int], Manifest]]:
    """Publish a version on the trainer's host, where control serves it."""
    with WeightPublisher(tmp_path / "trainer", host_id="here", policy="solver", delta_chain=3) as publisher:

        def one(version: int) -> Manifest:
            manifest = publisher.publish(
                tensors(version), version=version, kind="full", base_model="/m", delta=version > 0
            )
            control.give(manifest)
            return manifest

        yield one


@pytest.fixture
def host(control: WeightServer, tmp_path: Path) -> Iterator[Host]:
    found = Host(tmp_path / "elsewhere", control)
    yield found
    found.receiver.close()


def test_a_chain_of_deltas_is_kept_as_long_as_it_is_told(publish: Callable[[int], Manifest]) -> None:
    manifests = [publish(version) for version in range(6)]
    folder = Path(manifests[0].path).parent
    for version, manifest in enumerate(manifests):
        whole, *deltas = manifest.files
        assert (whole.encoding, whole.checksum, whole.size_bytes) == ("full", manifest.checksum, manifest.size_bytes)
        assert len(deltas) == min(version, 3)
        bases = [one.checksum for one in manifests[version - len(deltas) : version]]
        assert [delta.base_checksum for delta in deltas] == bases
        assert [delta.checksum for delta in deltas] == [*bases[1:], manifest.checksum][: len(deltas)]
    assert {path.name for path in folder.glob("*.delta")} == {file.name for file in manifests[-1].files[1:]}
    assert manifests[-1].files[-1].size_bytes < manifests[-1].size_bytes / 20


def test_a_version_without_a_delta_breaks_the_chain(tmp_path: Path) -> None:
    with WeightPublisher(tmp_path / "w", host_id="here", policy="solver") as publisher:

        def one(version: int, *, delta: bool, **other: Tensor) -> Manifest:
            return publisher.publish(
                tensors(version) | other, version=version, kind="full", base_model="/m", delta=delta
            )

        one(0, delta=True)
        assert len(one(1, delta=True).files) == 2
        assert len(one(1, delta=True).files) == 2  # nothing has changed since
        assert len(one(2, delta=False).files) == 1
        assert len(one(3, delta=True).files) == 2
        assert len(one(4, delta=True, more=torch.zeros(3)).files) == 1  # of other tensors
        publisher.release(4)
        assert len(one(5, delta=True, more=torch.zeros(3)).files) == 1  # its base is gone
        assert {path.suffix for path in (tmp_path / "w").iterdir()} == {".safetensors"}


def test_what_is_held_catches_up_by_deltas(
    host: Host, publish: Callable[[int], Manifest], control: WeightServer
) -> None:
    first = publish(0)
    assert host.receive(first) == first.checksum
    publish(1)
    third = [publish(2), publish(3)][-1]
    assert host.receive(third) == third.checksum  # by three deltas
    assert control.sent[third.files[0].name] == 0
    assert sum(control.sent[file.name] for file in third.files[1:]) == sum(f.size_bytes for f in third.files[1:])
    last = [publish(version) for version in range(4, 8)][-1]
    assert host.receive(last) == last.checksum  # too far behind
    assert control.sent[last.files[0].name] == last.size_bytes
    assert len(host.files(".safetensors")) == 2 and not host.files(".partial")
    before = control.sent.total()
    assert host.receive(last) == last.checksum  # another engine of the host
    assert control.sent.total() == before


def test_a_broken_connection_goes_on_where_it_was(
    host: Host, publish: Callable[[int], Manifest], control: WeightServer
) -> None:
    manifest = publish(0)
    control.faults.extend(["cut", "cut"])
    assert host.receive(manifest) == manifest.checksum
    half, quarter = manifest.size_bytes // 2, manifest.size_bytes - manifest.size_bytes // 2
    assert [asked for _, asked in control.asked] == ["", f"bytes={half}-", f"bytes={half + quarter // 2}-"]
    assert control.sent.total() == manifest.size_bytes


def test_a_process_that_died_left_its_part(
    host: Host, publish: Callable[[int], Manifest], control: WeightServer
) -> None:
    manifest = publish(0)
    store = HostStore(host.folder)
    store.partial(manifest.files[0].name).write_bytes(Path(manifest.path).read_bytes()[:1000])
    assert host.receive(manifest) == manifest.checksum
    assert control.asked == [(manifest.files[0].name, "bytes=1000-")]
    store.close()


def test_damaged_bytes_are_pulled_again_and_never_loaded(
    host: Host, publish: Callable[[int], Manifest], control: WeightServer
) -> None:
    manifest = publish(0)
    control.faults.extend(["flip"])
    assert host.receive(manifest) == manifest.checksum and len(control.asked) == 2
    again = publish(1)
    control.faults.extend(["flip"] * 4)  # the delta, until it is given up, and then all of it
    assert host.receive(again) == again.checksum
    assert control.sent[again.files[0].name] == again.size_bytes
    hopeless = publish(2)
    control.faults.extend(["flip"] * 8)
    with pytest.raises(UnavailableError, match="came damaged 4 times; it is not loaded"):
        host.receive(hopeless)
    assert not host.files(".partial") and len(host.files(".safetensors")) == 2


def test_another_file_of_the_same_name_is_not_mixed_with_what_is_here(
    host: Host, publish: Callable[[int], Manifest], control: WeightServer
) -> None:
    manifest = publish(0)
    control.faults.extend(["cut", "other"])
    assert host.receive(manifest) == manifest.checksum
    half = manifest.size_bytes // 2
    assert [span for _, span in control.asked] == ["", f"bytes={half}-", f"bytes={half}-"]


def test_a_delta_of_another_base_gives_nothing(
    host: Host, publish: Callable[[int], Manifest], control: WeightServer
) -> None:
    first, second = publish(0), publish(1)
    host.receive(first)
    held = host.folder / first.files[0].name
    with WeightPublisher(host.folder / "other", host_id="x", policy="solver") as other:
        wrong = other.publish(tensors(5), version=0, kind="full", base_model="/m")
        held.write_bytes(Path(wrong.path).read_bytes())  # under the name of what the delta starts from
    assert host.receive(second) == second.checksum
    assert control.sent[second.files[0].name] == second.size_bytes  # so all of it was pulled


def test_a_base_that_cannot_be_read_and_a_result_that_cannot_be_written_do_no_harm(
    host: Host, publish: Callable[[int], Manifest], control: WeightServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = publish(0), publish(1)
    host.receive(first)
    (host.folder / first.files[0].name).write_bytes(b"\xff" * 100)
    assert host.receive(second) == second.checksum

    def full(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr("wingbeat.weights.receiver.save_file", full)
    third = publish(2)
    assert host.receive(third) == third.checksum  # all of it was pulled
    assert control.sent[third.files[0].name] == third.size_bytes


def test_a_file_that_was_damaged_on_this_host_is_pulled_again(host: Host, publish: Callable[[int], Manifest]) -> None:
    manifest = publish(0)
    host.receive(manifest)
    held = host.folder / manifest.files[0].name
    data = bytearray(held.read_bytes())
    data[-5] ^= 1
    held.write_bytes(bytes(data))
    assert host.receive(manifest) == manifest.checksum


def test_a_released_version_is_gone_and_a_silent_server_is_named(
    host: Host, publish: Callable[[int], Manifest], control: WeightServer
) -> None:
    manifest = publish(0)
    Path(manifest.path).unlink()
    with pytest.raises(VersionGone, match="no source has"):
        host.receive(manifest)
    assert host.receiver.remote is not None
    host.receiver.remote = replace(host.receiver.remote, limits=PullLimits(stall_s=0.2, give_up_s=0.3))
    control.stop()
    other = publish(1)
    with pytest.raises(NoSource, match=r"no source gave .* for 0.3 s: http://127.0.0.1:\d+: ClientConnector"):
        host.receive(other)


def test_a_dead_relay_does_not_hold_up_the_word_that_a_version_was_released(
    host: Host, publish: Callable[[int], Manifest], control: WeightServer
) -> None:
    manifest = publish(0)
    Path(manifest.path).unlink()
    assert host.receiver.remote is not None
    host.receiver.remote = replace(host.receiver.remote, limits=PullLimits(stall_s=2.0, give_up_s=600.0))
    with pytest.raises(VersionGone):
        host.receive(manifest, "http://127.0.0.1:1")


def test_without_a_way_there_the_host_is_named(publish: Callable[[int], Manifest]) -> None:
    with pytest.raises(SetupError, match=r"published on host here, this is host elsewhere; no source was named"):
        WeightReceiver("elsewhere").receive(publish(0))


@pytest.mark.parametrize("name", ["../evil.safetensors", "/etc/passwd", ".hidden", "", "a\\b"])
def test_no_name_leads_out_of_the_folder(host: Host, publish: Callable[[int], Manifest], name: str) -> None:
    manifest = publish(0)
    evil = msgspec.structs.replace(manifest, files=(msgspec.structs.replace(manifest.files[0], name=name),))
    with pytest.raises(UnavailableError, match="plain name of a weight file"):
        host.receive(evil)


def test_what_is_no_longer_wanted_ends(host: Host, publish: Callable[[int], Manifest], control: WeightServer) -> None:
    manifest = publish(0)
    control.faults.extend(["500"] * 100)
    started = time.monotonic()
    with pytest.raises(UnavailableError, match="not wanted any more"):
        host.receive(manifest, is_wanted=lambda: time.monotonic() < started + 0.1)
    assert time.monotonic() - started < 2.0


def test_pinned_files_stay_until_they_are_unpinned(host: Host, publish: Callable[[int], Manifest]) -> None:
    first = publish(0)
    host.receive(first, pinned=True)
    for version in (1, 2, 3):
        host.receive(publish(version))
    assert first.files[0].name in host.files(".safetensors")
    host.receiver.unpin("solver", 0)
    host.receive(publish(4))
    assert first.files[0].name not in host.files(".safetensors") and len(host.files(".safetensors")) == 2


@pytest.fixture
def near(control: WeightServer, tmp_path: Path) -> Iterator[Host]:
    """A host that passes on what it has."""
    relay = RelayServer("127.0.0.1:0", dial=control.url)
    relay.start()
    found = Host(tmp_path / "near", control, relay)
    yield found
    found.receiver.close()
    relay.close()


def url_of(host: Host) -> str:
    assert host.relay is not None
    return host.relay.url


def test_a_relay_spares_control(
    near: Host, host: Host, publish: Callable[[int], Manifest], control: WeightServer
) -> None:
    """Whole files, and deltas; both hosts are told at the same time."""
    for version in (0, 1):
        manifest = publish(version)
        with ThreadPoolExecutor(1) as threads:
            child = threads.submit(host.receive, manifest, url_of(near))
            assert near.receive(manifest) == child.result(20) == manifest.checksum
    assert control.sent.total() == manifest.files[1].size_bytes + Path(manifest.path).stat().st_size


def test_a_relay_passes_on_what_it_has_not_whole_yet(
    near: Host, host: Host, publish: Callable[[int], Manifest], control: WeightServer
) -> None:
    manifest = publish(0)
    name, data = manifest.files[0].name, Path(manifest.path).read_bytes()
    assert near.relay is not None
    store = near.relay.store = HostStore(near.folder)
    near.relay.expect(manifest)
    store.partial(name).write_bytes(data[:1000])
    found: list[str] = []
    child = threading.Thread(target=lambda: found.append(host.receive(manifest, url_of(near))))
    child.start()
    partial = host.folder / f"{name}.partial"
    deadline = time.monotonic() + 10
    while not (partial.exists() and partial.stat().st_size == 1000):  # the child has what there is
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
    with store.partial(name).open("ab") as out:
        out.write(data[1000:])
    store.partial(name).replace(store.path(name))
    child.join(20)
    assert found == [manifest.checksum] and control.asked == []
    store.close()


def test_a_relay_that_dies_is_left_for_the_next_source(
    near: Host, host: Host, publish: Callable[[int], Manifest], control: WeightServer
) -> None:
    manifest = publish(0)
    near.receive(manifest)
    before = control.sent.total()
    assert near.relay is not None
    near.relay.close()
    assert host.receive(manifest, url_of(near)) == manifest.checksum
    assert control.sent.total() == before + manifest.size_bytes


def test_a_relay_that_holds_damaged_bytes_is_asked_last(
    near: Host, host: Host, publish: Callable[[int], Manifest], control: WeightServer
) -> None:
    manifest = publish(0)
    near.receive(manifest)
    held = near.folder / manifest.files[0].name
    held.write_bytes(held.read_bytes()[:-1] + b"\xff")
    before = control.sent.total()
    assert host.receive(manifest, url_of(near)) == manifest.checksum
    assert control.sent.total() == before + manifest.size_bytes


def test_a_relay_serves_nobody_without_the_key_of_its_run(
    near: Host, host: Host, publish: Callable[[int], Manifest], control: WeightServer
) -> None:
    manifest = publish(0)
    near.receive(manifest)
    assert near.relay is not None
    near.relay.key = "of another run"
    before = control.sent.total()
    assert host.receive(manifest, url_of(near)) == manifest.checksum
    assert control.sent.total() == before + manifest.size_bytes


@pytest.mark.parametrize("listen", ["x", "127.0.0.1:", "127.0.0.1:70000", "203.0.113.1:0"])
def test_an_address_that_cannot_be_relayed_at_is_refused(listen: str) -> None:
    with pytest.raises(SetupError, match="relay"):
        RelayServer(listen, dial="http://127.0.0.1:1")


@pytest.mark.parametrize("listen", ["0", "0.0.0.0:0"])
def test_a_relay_without_a_host_names_the_address_that_reaches_the_server(listen: str) -> None:
    relay = RelayServer(listen, dial="http://127.0.0.1:9")
    assert relay.url.startswith("http://127.0.0.1:") and not relay.url.endswith(":0")
    relay._socket.close()
