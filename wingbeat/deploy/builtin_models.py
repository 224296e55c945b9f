"""Built-in models (``model = "builtin:NAME"``): built once for each seed and state of the code, kept for later runs.

A build takes up to a minute.  What it makes depends on the name, the seed, the files of environments and tools (code,
and what that reads) and the versions of the libraries, whose digest names its folder below ``$WINGBEAT_CACHE/builtin``
(else ``~/.cache/wingbeat/builtin``)::

    NAME-DIGEST/          the files of the model, and CHECKSUMS (SHA-256 of each)
    .NAME-DIGEST-…/       one that is being written; it is renamed once it is whole

A run has a copy of its own, so it does not miss what is removed here.  A damaged one is removed and built again, and a
cache that cannot be written is told and left: both cost time only.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import wingbeat
from wingbeat.core.errors import SetupError
from wingbeat.core.files import cache_folder, sha256_of
from wingbeat.deploy.children import run_to_end
from wingbeat.environments.tiny_recipes import builder_of

logger = logging.getLogger(__name__)

CHECKSUMS = "CHECKSUMS.json"
LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "gymnasium", "reasoning-gym", "textarena")
"""What decides on the weights besides our own code: numerics, file formats, and the games that are demonstrated."""
CODE = ("environments", "tools")
"""Our packages that hold builders, recipes and what those demonstrate, some of it as text."""
COMPILED = "__pycache__"
KEPT = 32
"""Models, the last used ones: every other state of the code adds some, of half a megabyte each."""


def model_digest(name: str, *, seed: int) -> str:
    """Names what a build makes."""
    digest = hashlib.sha256(f"{name} {seed} {sys.version_info[:2]}".encode())
    for library in LIBRARIES:
        digest.update(f"{library} {_version(library)}\n".encode())
    root = Path(wingbeat.__file__).parent
    files = (path for package in CODE for path in (root / package).rglob("*") if path.is_file())
    for path in sorted(path for path in files if COMPILED not in path.parts):
        digest.update(f"{path.relative_to(root)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


async def place_builtin(name: str, *, seed: int, folder: Path, on_note: Callable[[str], None]) -> Path:
    """Have a built-in model in ``folder``, whole; from the cache, or built.

    Raises ConfigError for an unknown name, SetupError where it cannot be built.
    """
    builder = builder_of(name)
    if os.path.exists(folder):  # noqa: ASYNC240 - a stat takes microseconds
        return folder
    kept = cache_folder() / "builtin" / f"{name}-{model_digest(name, seed=seed)[:16]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as temporary:
        place = Path(temporary) / "model"
        if take(kept, place):
            on_note(f"the built-in model {name} was built before: taken from {kept}")
        else:
            on_note(f"making the built-in model {name} (up to a minute, once for each seed and version)")
            command = [sys.executable, "-m", *builder, "--out", str(place), "--seed", str(seed)]
            await run_to_end(command, what="building the model")
            keep(place, kept)
        place.rename(folder)
    return folder


def take(kept: Path, place: Path) -> bool:
    """Copy a kept model to the new folder ``place``; False where there is none, or none that is whole.

    Raises SetupError where ``place`` cannot be written, which says nothing of the kept one.
    """
    if not kept.is_dir():
        return False
    try:
        files = _whole(kept)
    except (OSError, ValueError) as error:
        logger.warning("the kept model %s is damaged and built again: %s", kept, error)
        shutil.rmtree(kept, ignore_errors=True)
        return False
    try:
        place.mkdir(parents=True)
        for name, data in files.items():
            (place / name).write_bytes(data)
    except OSError as error:
        raise SetupError(f"cannot write a model into {place.parent}: {error}; make room, or set run.dir") from error
    _use(kept)
    return True


def _whole(kept: Path) -> dict[str, bytes]:
    """The files of a kept model.  Raises OSError or ValueError where they are not what was written."""
    checksums: dict[str, str] = json.loads((kept / CHECKSUMS).read_bytes())
    files = {name: (kept / name).read_bytes() for name in checksums}
    for name, data in files.items():
        if hashlib.sha256(data).hexdigest() != checksums[name]:
            raise ValueError(f"{name} has another checksum than when it was written")
    return files


def keep(made: Path, kept: Path) -> None:
    """Copy a finished model into the cache, all or nothing; what the disk does not take is told."""
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{kept.name}-", dir=kept.parent) as temporary:
            place = Path(temporary) / "model"
            shutil.copytree(made, place)
            checksums = {path.name: sha256_of(path) for path in sorted(made.iterdir())}
            (place / CHECKSUMS).write_text(json.dumps(checksums, indent=2) + "\n", encoding="utf-8")
            _rename_first(place, kept)
        _forget_old(path for path in kept.parent.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        logger.warning("the built-in model is not kept for later runs: %s; WINGBEAT_CACHE names another place", error)


def _rename_first(place: Path, kept: Path) -> None:
    """Unless another run, which built the same at the same time, was faster."""
    try:
        place.rename(kept)
    except OSError:
        if not kept.is_dir():
            raise


def _use(kept: Path) -> None:
    """Make it the one used last, where that may be written."""
    try:
        kept.touch()
    except OSError as error:
        logger.debug("%s keeps its time: %s", kept, error)


def _forget_old(folders: Iterable[Path]) -> None:
    newest_first = sorted(folders, key=_used_at, reverse=True)
    for path in newest_first[KEPT:]:
        shutil.rmtree(path, ignore_errors=True)


def _used_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another run has removed it
        return 0.0
