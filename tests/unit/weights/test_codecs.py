from __future__ import annotations

import hashlib
import re
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from wingbeat.core.errors import UnavailableError
from wingbeat.weights.checksum import tensors_checksum
from wingbeat.weights.codecs import bits, decode_delta, delta_base, encode_delta, rice, sparse
from wingbeat.weights.codecs.container import Container, Entry, Header, Reader, read_container, varint

HEADER_START = 48
few = settings(max_examples=40, deadline=None)
patterns = arrays.arrays(np.int16, st.integers(0, 300), elements=st.integers(-(2**15), 2**15 - 1))


def encode(base: dict[str, Tensor], target: dict[str, Tensor]) -> bytes:
    checksums = {"base_checksum": tensors_checksum(base), "target_checksum": tensors_checksum(target)}
    return bytes(encode_delta(base, target, **checksums))


def assert_exact(base: dict[str, Tensor], target: dict[str, Tensor]) -> bytes:
    data = encode(base, target)
    assert delta_base(data) == tensors_checksum(base)
    decoded = decode_delta(data, base)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in decoded.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in target.items()
    }
    assert tensors_checksum(decoded) == tensors_checksum(target)
    return data


def encodings(data: bytes) -> dict[str, str]:
    return {entry.name: entry.encoding for entry in read_container(memoryview(data)).header.entries}


def trained(weights: Tensor, *, step: float, seed: int = 0) -> Tensor:
    """Every weight moved by about ``step``, in float32."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(weights.shape, generator=generator) + 0.5
    return weights + step * sizes * torch.sign(torch.randn(weights.shape, generator=generator))


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def tensor_of(array: np.ndarray) -> Tensor:
    return torch.tensor(array.tolist(), dtype=torch.int16)


def damage(data: bytes, **changes: object) -> bytes:
    """The delta with another header, or with its last bytes replaced, and checksums that fit."""
    container = read_container(memoryview(data))
    payload = bytes(changes.pop("payload", container.payload))  # pyright: ignore[reportArgumentType]
    header = msgspec.structs.replace(container.header, payload_sha256=hashlib.sha256(payload).digest(), **changes)
    return sealed(msgspec.msgpack.encode(header)) + payload


def sealed(header: bytes) -> bytes:
    packed = zstandard.ZstdCompressor().compress(header)
    fixed = struct.pack("<8sII", b"WBDELTA\0", 1, len(packed))
    return fixed + hashlib.sha256(fixed + packed).digest() + packed


@few
@given(patterns, st.sampled_from([torch.bfloat16, torch.float16]), st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_any_bit_patterns_survive(old: np.ndarray, dtype: torch.dtype, seed: int, density: float) -> None:
    rng = np.random.default_rng(seed)
    new = np.where(rng.random(old.size) < density, rng.integers(-(2**15), 2**15, old.size), old).astype(np.int16)
    base, target = tensor_of(old).view(dtype), tensor_of(new).view(dtype)
    assert_exact({"w": base}, {"w": target})
    chunks = b"".join(sparse.encode_sparse(base, target, piece=100))
    decoded = sparse.decode_sparse(memoryview(chunks), base=base, piece=100)
    assert torch.equal(decoded.view(torch.int16), target.view(torch.int16))


def test_all_16_bit_patterns_against_their_opposites() -> None:
    """NaN with any payload, infinities, both zeros and denormals, each moved across all of the others."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        assert_exact({"w": every.view(dtype)}, {"w": every.flip(0).contiguous().view(dtype)})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, torch.int32, torch.int8, torch.bool])
def test_other_dtypes_are_exact(dtype: torch.dtype) -> None:
    base = (gaussian(33, 7) * 1000).to(dtype)
    target = base.clone()
    target[::5] = (gaussian(7, 7, seed=1) * 1000).to(dtype)
    assert_exact({"a": base}, {"a": target})


def test_tensors_of_no_element_of_no_dimension_and_without_change() -> None:
    base = {
        "empty": torch.zeros(0, 4, dtype=torch.bfloat16),
        "scalar": torch.tensor(1.5, dtype=torch.bfloat16),
        "zero": torch.tensor([0.0], dtype=torch.float16),
        "nan": torch.tensor([float("nan"), 1.0], dtype=torch.bfloat16),
        "strided": gaussian(40, 30).bfloat16().T,
    }
    target = {**base, "scalar": torch.tensor(-1.5, dtype=torch.bfloat16), "zero": torch.tensor([-0.0]).half()}
    target["strided"] = base["strided"] * 2
    data = assert_exact(base, target)
    assert encodings(data)["empty"] == encodings(data)["nan"] == "same"
    assert decode_delta(data, base)["nan"] is base["nan"]


@pytest.mark.parametrize("step", [1e-6, 1e-5, 1e-3])
def test_steps_of_an_optimiser_take_less_than_40_percent_of_xor_and_zstd(step: float) -> None:
    weights = gaussian(2**18)
    base, target = {"w": weights.bfloat16()}, {"w": trained(weights, step=step).bfloat16()}
    data = assert_exact(base, target)
    differing = (base["w"].view(torch.int16) ^ target["w"].view(torch.int16)).numpy()
    assert encodings(data) == {"w": "sparse"}
    changed = np.count_nonzero(differing) / differing.size
    if changed < 0.1:
        assert len(data) * 2.5 < len(zstandard.ZstdCompressor(level=1).compress(differing.data))


def test_each_tensor_gets_the_encoding_that_suits_it() -> None:
    weights = gaussian(200, 100)
    noise = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 40000), dtype=np.uint8))
    base = {"same": weights, "little": weights.bfloat16(), "float32": weights, "all": noise[0].view(torch.bfloat16)}
    target = {
        "same": weights.clone(),
        "little": trained(weights, step=1e-6).bfloat16(),
        "float32": trained(weights, step=1e-6),
        "all": noise[1].view(torch.bfloat16),
    }
    data = assert_exact(base, target)
    assert encodings(data) == {"same": "same", "little": "sparse", "float32": "xor", "all": "raw"}


@pytest.mark.parametrize(
    "target",
    [
        {"w": torch.zeros(3, dtype=torch.bfloat16)},
        {"w": torch.zeros(2, 2, dtype=torch.float16)},
        {"v": torch.zeros(2, 2, dtype=torch.bfloat16)},
        {},
    ],
)
def test_other_names_dtypes_or_shapes_have_no_delta(target: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match="publish the full version"):
        encode_delta({"w": torch.zeros(2, 2, dtype=torch.bfloat16)}, target, base_checksum="", target_checksum="")


def small_delta() -> tuple[dict[str, Tensor], bytes]:
    weights = gaussian(60, 50)
    base = {"a": weights.bfloat16(), "b": weights[:5].clone(), "c": weights.half()}
    target = {"a": trained(weights, step=1e-4).bfloat16(), "b": trained(weights[:5], step=1e-4)}
    target["c"] = trained(weights, step=1e-2).half()  # most elements of most exponents: inverted
    return base, encode(base, target)


def test_another_base_is_refused() -> None:
    base, data = small_delta()
    with pytest.raises(UnavailableError, match="another base"):
        decode_delta(data, {**base, "a": -base["a"]})
    with pytest.raises(UnavailableError, match="belongs to another base: 1 tensors differ"):
        decode_delta(data, {**base, "b": base["b"][:4]})
    with pytest.raises(UnavailableError, match="another base"):
        decode_delta(data, {**base, "b": base["b"] + 1})


@few
@given(st.data())
def test_torn_and_flipped_deltas_are_refused(draw: st.DataObject) -> None:
    base, data = small_delta()
    at = draw.draw(st.integers(0, len(data) - 1))
    flipped = bytearray(data)
    flipped[at] ^= 1 << draw.draw(st.integers(0, 7))
    for broken in (data[:at], bytes(flipped), data + b"\0"):
        with pytest.raises(UnavailableError):
            decode_delta(broken, base)
    assert delta_base(data[: HEADER_START + 500]) == tensors_checksum(base)
    with pytest.raises(UnavailableError):
        delta_base(data[: min(at, HEADER_START + 10)])


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_damage_that_keeps_the_checksums_never_loads(draw: st.DataObject) -> None:
    """An attacker can compute SHA-256 too: every count and place in the payload is checked by itself."""
    base, data = small_delta()
    payload = bytearray(read_container(memoryview(data)).payload)
    start = draw.draw(st.integers(0, len(payload) - 1))
    patch = draw.draw(st.binary(min_size=1, max_size=16))
    payload[start : start + len(patch)] = patch
    broken = damage(data, payload=payload[: read_size(data)])
    if bytes(payload) == bytes(read_container(memoryview(data)).payload):
        return
    with pytest.raises(UnavailableError):
        decode_delta(broken, base)


def read_size(data: bytes) -> int:
    return len(read_container(memoryview(data)).payload)


@few
@given(st.binary(max_size=80), st.sampled_from(["same", "raw", "xor", "sparse"]), st.sampled_from([0, 1, 100, 2**40]))
def test_any_payload_is_refused_or_exact(payload: bytes, encoding: str, piece: int) -> None:
    base = {"w": torch.zeros(30, dtype=torch.bfloat16)}
    entry = Entry("w", "BF16", (30,), encoding, len(payload))  # pyright: ignore[reportArgumentType]
    digest = hashlib.sha256(payload).digest()
    header = Header(tensors_checksum(base), "0" * 64, digest, piece, (entry,))
    with pytest.raises(UnavailableError):
        decode_delta(sealed(msgspec.msgpack.encode(header)) + payload, base)


@pytest.mark.parametrize("encoding", ["raw", "xor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_empty_tensor_may_have_any_encoding(dtype: torch.dtype, encoding: str) -> None:
    """Ours writes ``same``; another writer need not."""
    base = {"w": torch.zeros(0, 4, dtype=dtype)}
    data = encode(base, base)
    payload = zstandard.ZstdCompressor().compress(b"") if encoding == "xor" else b""
    entry = read_container(memoryview(data)).header.entries[0]
    changed = msgspec.structs.replace(entry, encoding=encoding, size_bytes=len(payload))
    decoded = decode_delta(damage(data, entries=(changed,), payload=payload), base)["w"]
    assert (decoded.shape, decoded.dtype) == ((0, 4), dtype)


@pytest.mark.parametrize(
    "header",
    [b"", b"\x00", msgspec.msgpack.encode(["a", "b", b"", 1, [["w", "BF16", [1], "lzma", 0]]]), b"\xff" * 100],
)
def test_a_header_of_something_else_is_refused(header: bytes) -> None:
    with pytest.raises(UnavailableError):
        delta_base(sealed(header))


def test_bytes_that_nobody_reads_are_refused() -> None:
    """Otherwise one version would have many deltas, and a torn one might look whole."""
    base = {"w": gaussian(40).bfloat16()}
    changed = {"w": trained(base["w"].float(), step=1e-4).bfloat16()}
    for target in (base, changed):
        data = encode(base, target)
        container = read_container(memoryview(data))
        (entry,) = container.header.entries
        longer = msgspec.structs.replace(entry, size_bytes=entry.size_bytes + 1)
        with pytest.raises(UnavailableError):
            decode_delta(damage(data, entries=(longer,), payload=bytes(container.payload) + b"\0"), base)


def test_sizes_that_lie_are_refused() -> None:
    base, data = small_delta()
    container = read_container(memoryview(data))
    entries, payload = container.header.entries, container.payload

    def resized(index: int, by: int, **more: Any) -> Entry:
        return msgspec.structs.replace(entries[index], size_bytes=entries[index].size_bytes + by, **more)

    swollen, shrunken = (zstandard.ZstdCompressor().compress(bytes(size)) for size in (10**6, 5 * 50 * 4 - 1))
    xor = [Entry("b", "F32", (5, 50), "xor", len(frame)) for frame in (swollen, shrunken)]
    below_zero = (resized(0, -len(payload)), resized(1, 0), resized(2, len(payload)))
    for entries_of_it, payload_of_it, words in (
        (below_zero, payload, "negative size"),
        ((entries[0], *entries), bytes(payload[: entries[0].size_bytes]) + payload, "another base"),
        ((resized(0, 0, encoding="same"), *entries[1:]), payload, "an unchanged tensor has"),
        ((entries[0], xor[0], entries[2]), _with(container, swollen), "at most 1000 bytes"),
        ((entries[0], xor[1], entries[2]), _with(container, shrunken), "expected 1000 bytes of a tensor, got 999"),
        ((entries[0], resized(1, 0, encoding="raw"), entries[2]), payload, "bytes of a tensor, got"),
    ):
        with pytest.raises(UnavailableError, match=words):
            decode_delta(damage(data, entries=entries_of_it, payload=payload_of_it), base)


def _with(container: Container, second: bytes) -> bytes:
    """The payload with other bytes for the second tensor."""
    parts = [bytes(part) for _, part in container.parts()]
    return parts[0] + second + parts[2]


def test_another_format_or_payload_is_refused_by_name() -> None:
    base, data = small_delta()
    size = struct.unpack("<8sII", data[:16])[2]
    fixed, packed = struct.pack("<8sII", b"WBDELTA\0", 2, size), data[HEADER_START : HEADER_START + size]
    with pytest.raises(UnavailableError, match="expected format 1, got 2"):
        delta_base(fixed + hashlib.sha256(fixed + packed).digest() + packed)
    with pytest.raises(UnavailableError, match="its checksum differs"):
        decode_delta(data[:-1] + bytes([data[-1] ^ 1]), base)


def coded(*values: int) -> bytes:
    return b"".join(bits.collect(rice.pack(torch.tensor(values))))


NO_LIST = varint(0)
TWO = b"\x01" + bytes([127, 128])
"""A piece in which something of both exponents changed."""
ONE_UP = TWO + coded(2 * 0, 2 * 1) + coded(3) + b"\0"
"""A piece in which the fourth two became larger."""
ONE_DOWN = b"\x01" + bytes([0, 0]) + coded(2) + coded(0) + b"\x01"
"""A piece in which the first element, a zero, became smaller."""


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (TWO + coded(2 * 2, 2 * 11), "more elements of an exponent are listed"),
        (TWO + coded(2 * 0, 2 * 21), "at most 41"),
        (TWO + coded(2 * 1, 2 * 1) + coded(3, 12), "beyond the last of its exponent"),
        (ONE_UP + varint(2) + coded(1), "a place lies beyond the last"),
        (ONE_UP + varint(2 * 2), "at most 3, got 4"),
        (ONE_DOWN + NO_LIST * 3, "out of the 16-bit patterns"),
        (ONE_UP + NO_LIST * 2 + varint(2) + coded(0) + b"\x02", "expected 0 or 1"),
        (
            ONE_UP + NO_LIST * 2 + varint(2) + coded(0)
            + b"\x01" + varint(10) + zstandard.ZstdCompressor().compress(b"\x05"),
            "expected 1 lengths, got 0.5",
        ),
        (ONE_UP + NO_LIST * 3 + b"\0", "1 bytes follow"),
        (b"\x02", "expected 0 or 1 at the begin"),
    ],
)  # fmt: skip
def test_every_place_that_a_sparse_tensor_names_is_checked_before_it_is_used(stream: bytes, words: str) -> None:
    """On a GPU, one place beyond the last would end the process."""
    one, two = torch.ones(20, dtype=torch.bfloat16), torch.full((10,), 2.0, dtype=torch.bfloat16)
    base = torch.zeros(4, dtype=torch.bfloat16) if stream.startswith(ONE_DOWN) else torch.cat([one, two])
    with pytest.raises(UnavailableError, match=words):
        sparse.decode_sparse(memoryview(stream), base=base, piece=100)


@pytest.mark.parametrize(
    ("data", "count", "words"),
    [
        (coded(9), 1, "at most 8"),  # found once it is whole: 4, and the remainder
        (b"\x01\x01\x01\x01\x01\x01\x80", 1, "at most 8"),  # k = 31
        (b"\0\0\0\0\0\x01\x03", 1, "expected 1 values, got 2"),
        (b"\0\0\0\0\0\x02\x01\0", 1, "expected 1 values, got 1"),  # an empty byte at the end
        (b"\x03\0\0\0\0\x01\x01\0", 1, "bits are set after the last"),
        (b"\0\0\0\0\0\x00", 1, "expected 1 values, got 0"),
        (b"\0\0\0\0\0\x05\x01", 1, "at most 2, got 5"),
    ],
)
def test_numbers_beyond_their_limit_are_refused(data: bytes, count: int, words: str) -> None:
    with pytest.raises(UnavailableError, match=words):
        rice.unpack(Reader(memoryview(data)), count=count, limit=8, device=torch.device("cpu"))


@few
@given(st.lists(st.integers(0, 2**28), max_size=400), st.integers(0, 27))
def test_rice_is_exact(values: list[int], shift: int) -> None:
    wanted = torch.tensor([value >> shift for value in values], dtype=torch.int64)
    data = memoryview(b"".join(bits.collect(rice.pack(wanted))))
    reader = Reader(data)
    got = rice.unpack(reader, count=len(values), limit=2**28 >> shift, device=torch.device("cpu"))
    assert torch.equal(got, wanted) and reader.left == 0


def test_rice_by_hand() -> None:
    """Values 0, 1, 5 with parameter 0 would take 9 bits of unary, with 1: quotients 0, 0, 2 and three bits."""
    data = b"".join(bits.collect(rice.pack(torch.tensor([0, 1, 5]))))
    unary, remainders = 0b10011, 0b110
    assert data == bytes([1, 0, 0, 0, 0, 1, unary, remainders])


def test_the_example_of_the_documentation() -> None:
    """Readers elsewhere rely on docs/reference/weights-format.md: these bytes are its example."""
    old = torch.tensor([0x3F80, 0x3F00] * 4, dtype=torch.int16)
    new = old.clone()
    new[2], new[5], new[7] = 0x3F81, 0x3EFD, 0xBF00 - 2**16
    page = (Path(__file__).parents[3] / "docs/reference/weights-format.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ((?:`[0-9a-f ]+` ?)+)\|", page.partition("## An example")[2], flags=re.MULTILINE)
    documented = bytes.fromhex("".join(rows).replace("`", ""))
    chunks = sparse.encode_sparse(old.view(torch.bfloat16), new.view(torch.bfloat16), piece=100)
    assert b"".join(chunks) == documented
    decoded = sparse.decode_sparse(memoryview(documented), base=old.view(torch.bfloat16), piece=100)
    assert torch.equal(decoded.view(torch.int16), new)


def test_varints() -> None:
    for value, encoded in [(0, b"\0"), (127, b"\x7f"), (128, b"\x80\x01"), (2**35, b"\x80\x80\x80\x80\x80\x01")]:
        assert varint(value) == encoded
        assert Reader(memoryview(encoded)).varint(limit=2**35) == value
    with pytest.raises(UnavailableError, match="at most 5"):
        Reader(memoryview(b"\x06")).varint(limit=5)
    with pytest.raises(UnavailableError):
        Reader(memoryview(b"\x80" * 20)).varint(limit=2**80)


def test_other_devices_do_what_the_cpu_does() -> None:
    """The forms for a GPU, run on the CPU."""
    keys = torch.from_numpy(np.random.default_rng(0).integers(0, 40, 1000, dtype=np.uint8))
    flags = keys[:997] > 20
    order, starts = bits.stable_order(keys)
    other_order, other_starts = bits.stable_order_on_device(keys)
    assert torch.equal(order, other_order) and torch.equal(starts, other_starts)
    on_device = bits.pack_bits_on_device(flags)
    packed = bits.collect([b"first", on_device, b"", bits.pack_bits(flags), on_device])
    assert packed == [b"first", packed[3], b"", bits.pack_bits(flags), packed[3]]
    cpu = torch.device("cpu")
    here, there = (
        unpack(memoryview(packed[3]), device=cpu) for unpack in (bits.unpack_bits, bits.unpack_bits_on_device)
    )
    assert torch.equal(here, there) and torch.equal(here[:997], flags) and not here[997:].any()
