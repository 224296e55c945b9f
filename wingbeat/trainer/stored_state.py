"""The files of one checkpoint, whoever wrote them: which tensors there are, and where their parts lie.

    format 1    state.safetensors                  whole tensors, written by one process
    format 2    part-00000-of-00002.safetensors    parts of tensors along their first dimension, a file per process
                part-00001-of-00002.safetensors    (a tensor without dimensions is in the first file)

Both are read by ranges, so that a process loads its own part whatever number of processes wrote: nothing but the
bytes asked for is read.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from wingbeat.core.errors import SetupError
from wingbeat.core.files import sha256_of, sync

FORMAT = 1
SHARDED_FORMAT = 2
TENSORS = "state.safetensors"
SCALARS = "state.json"
_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16", "I64": "int64"}
"""As safetensors names them."""


class DamagedCheckpoint(ValueError):
    """A checkpoint's files are not what was written."""


@dataclass(frozen=True, slots=True)
class Part:
    """Where rows ``[start, stop)`` of a tensor lie; [0, 1) of one without dimensions."""

    file: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor and its parts, ascending and without gaps."""

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[Part, ...]

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1


@dataclass(frozen=True, slots=True)
class WrittenParts:
    """What the processes wrote, for state.json."""

    files: Mapping[str, tuple[str, int]]
    """Each file's SHA-256 and size."""
    tensors: Mapping[str, StoredTensor]

    def facts(self) -> dict[str, Any]:
        return {
            "files": {name: {"sha256": sha, "size": size} for name, (sha, size) in self.files.items()},
            "tensors": {
                name: {
                    "shape": list(tensor.shape),
                    "dtype": tensor.dtype,
                    "parts": [[part.file, part.start, part.stop] for part in tensor.parts],
                }
                for name, tensor in self.tensors.items()
            },
        }


@dataclass(frozen=True, slots=True)
class StoredState:
    """A checkpoint that can be read."""

    folder: Path
    step: int
    lineage: int
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)

    @classmethod
    def verified(cls, folder: Path, *, step: int) -> StoredState:
        """After every byte has been checked.

        Raises DamagedCheckpoint, or SetupError on another format.
        """
        scalars = _scalars(folder, step=step)
        try:
            files = {name: (facts["sha256"], facts["size"]) for name, facts in scalars["files"].items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise DamagedCheckpoint(f"{SCALARS} cannot be read ({type(error).__name__}: {error})") from error
        if not files or (scalars["format"] == FORMAT and set(files) != {TENSORS}):
            raise DamagedCheckpoint(f"{SCALARS} cannot be read (it names the files {sorted(files)})")
        for name, (sha, size) in files.items():
            _verify(folder, name, sha=sha, size=size)
        stored = cls._of(folder, scalars)
        named = {part.file for tensor in stored.tensors.values() for part in tensor.parts}
        if not named <= files.keys():
            raise DamagedCheckpoint(
                f"{SCALARS} cannot be read (it gives no checksum of {sorted(named - files.keys())})"
            )
        return stored

    @classmethod
    def unverified(cls, folder: Path, *, step: int) -> StoredState:
        """One that another process has verified.  Raises as :meth:`verified` does."""
        return cls._of(folder, _scalars(folder, step=step))

    @classmethod
    def _of(cls, folder: Path, scalars: Mapping[str, Any]) -> StoredState:
        try:
            lineage = int(scalars.get("lineage", 0))
            if scalars["format"] == SHARDED_FORMAT:
                tensors = {name: _stored(facts) for name, facts in scalars["tensors"].items()}
            else:
                tensors = _whole_tensors(folder)
            return cls(folder, int(scalars["step"]), lineage, tensors)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise DamagedCheckpoint(f"{SCALARS} cannot be read ({type(error).__name__}: {error})") from error
        except (OSError, SafetensorError) as error:
            raise DamagedCheckpoint(f"{TENSORS} cannot be read ({error})") from error

    def read(self, ranges: Mapping[str, tuple[int, int]]) -> dict[str, Tensor]:
        """Rows ``[start, stop)`` of tensors, by name.  Raises DamagedCheckpoint where their parts do not hold them.

        Each file is opened once: that reads the names of all its tensors.
        """
        with ExitStack() as files:
            opened = functools.cache(lambda name: files.enter_context(safe_open(self.folder / name, framework="pt")))
            return {name: self._read(name, start, stop, opened=opened) for name, (start, stop) in ranges.items()}

    def whole(self) -> dict[str, Tensor]:
        """All tensors.  Raises DamagedCheckpoint."""
        return self.read({name: (0, stored.rows) for name, stored in self.tensors.items()})

    def _read(self, name: str, start: int, stop: int, *, opened: Callable[[str], Any]) -> Tensor:
        stored = self.tensors[name]
        found: list[Tensor] = []
        try:
            for part in stored.parts:
                low, high = max(start, part.start), min(stop, part.stop)
                if low >= high:
                    continue
                if not stored.shape:
                    return opened(part.file).get_tensor(name)
                found.append(opened(part.file).get_slice(name)[low - part.start : high - part.start])
        except (OSError, SafetensorError) as error:
            raise DamagedCheckpoint(f"{name} cannot be read ({error})") from error
        if not found:
            return torch.empty((0, *stored.shape[1:]), dtype=getattr(torch, stored.dtype))
        values = found[0] if len(found) == 1 else torch.cat(found)
        if len(values) != stop - start:
            raise DamagedCheckpoint(f"{name}: expected rows {start} to {stop}, got {len(values)} of them")
        return values


def write_part(
    folder: Path, tensors: Mapping[str, tuple[Tensor, tuple[int, ...], int]], *, rank: int, size: int
) -> WrittenParts:
    """One process's file, synced: of each tensor its rows, the whole tensor's shape, and its first row."""
    name = f"part-{rank:05d}-of-{size:05d}.safetensors"
    held = {key: value for key, value in tensors.items() if value[0].numel()}
    save_file({key: part.detach().cpu().contiguous() for key, (part, _, _) in held.items()}, folder / name)
    sync(folder / name)
    stored = {
        key: StoredTensor(
            shape, str(part.dtype).removeprefix("torch."), (Part(name, start, start + (len(part) if shape else 1)),)
        )
        for key, (part, shape, start) in held.items()
    }
    return WrittenParts({name: (sha256_of(folder / name), (folder / name).stat().st_size)}, stored)


def joined_parts(written: Sequence[WrittenParts]) -> WrittenParts:
    """What all processes wrote, by rank."""
    files: dict[str, tuple[str, int]] = {}
    tensors: dict[str, StoredTensor] = {}
    for one in written:
        files |= one.files
        for name, tensor in one.tensors.items():
            before = tensors[name].parts if name in tensors else ()
            tensors[name] = StoredTensor(tensor.shape, tensor.dtype, (*before, *tensor.parts))
    return WrittenParts(files, tensors)


def seal_of(scalars: Mapping[str, Any]) -> str:
    """Of everything in state.json but the seal."""
    return hashlib.sha256(json.dumps(scalars, sort_keys=True).encode()).hexdigest()


def _scalars(folder: Path, *, step: int) -> dict[str, Any]:
    try:
        scalars: dict[str, Any] = json.loads((folder / SCALARS).read_text(encoding="utf-8"))
        seal = scalars.pop("seal", None)  # (older checkpoints have none)
        form, written = scalars["format"], scalars["step"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{SCALARS} cannot be read ({type(error).__name__}: {error})") from error
    if seal is not None and seal != seal_of(scalars):
        raise DamagedCheckpoint(f"{SCALARS} is not what was written (its seal differs)")
    if form not in (FORMAT, SHARDED_FORMAT):
        raise SetupError(
            f"checkpoint {folder} has format {form!r}, this release reads formats {FORMAT} and {SHARDED_FORMAT}; "
            "resume with the release that wrote it, or use another run directory"
        )
    if written != step:
        raise DamagedCheckpoint(f"{SCALARS}: expected step {step}, got {written!r}")
    return scalars


def _verify(folder: Path, name: str, *, sha: str, size: int) -> None:
    if Path(name).name != name:
        raise DamagedCheckpoint(f"{SCALARS} cannot be read (it names a file elsewhere, {name!r})")
    try:
        found = (folder / name).stat().st_size
        if found != size:
            raise DamagedCheckpoint(f"{name}: expected {size} bytes, got {found}")
        if sha256_of(folder / name) != sha:
            raise DamagedCheckpoint(f"{name}: the checksum differs from the one written")
    except OSError as error:
        raise DamagedCheckpoint(f"{name} cannot be read ({error})") from error


def _stored(facts: Mapping[str, Any]) -> StoredTensor:
    parts = tuple(Part(file, start, stop) for file, start, stop in facts["parts"])
    return StoredTensor(tuple(facts["shape"]), facts["dtype"], parts)


def _whole_tensors(folder: Path) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    with safe_open(folder / TENSORS, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            piece = file.get_slice(name)
            shape = tuple(piece.get_shape())
            dtype = _DTYPES[piece.get_dtype()]
            found[name] = StoredTensor(shape, dtype, (Part(TENSORS, 0, shape[0] if shape else 1),))
    return found
