"""The models of a server's policies, on an engine's own host.

On the server's host its folders are there.  Elsewhere a path says nothing, so what counts is the fingerprint of what
lies in a folder.  Taken is the first of: the same path, what was fetched before, what the configuration's hub name or
package gives here, and at last the server's own files, which are fetched once.

The whole folder comes, with its weights: an adapter is merged into exactly these, and an engine loads its architecture
from them before the first version of a fully trained policy replaces them.
"""

from __future__ import annotations

import fcntl
import json
import logging
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

import msgspec

from wingbeat.core.errors import SetupError
from wingbeat.core.files import cache_folder, sha256_of
from wingbeat.core.model_files import SUFFIXES, fingerprint
from wingbeat.core.tls import client_context
from wingbeat.core.worker_protocol import PolicySpec
from wingbeat.trainer.models import PYPI, resolve_model

logger = logging.getLogger(__name__)

TIMEOUT_S = 60.0
"""Without a byte."""
RETRIES_S = (1.0, 2.0, 5.0, 10.0, 30.0)
CHUNK_BYTES = 1 << 18


class Stopped(SetupError):
    """The worker was told to end while it fetched a model."""


def default_folder() -> Path:
    """Where fetched models are kept: below ``$WINGBEAT_CACHE``, else ``~/.cache/wingbeat``."""
    return cache_folder() / "fetched"


class ModelFolders:
    """Finds or fetches model folders."""

    def __init__(
        self,
        url: str,
        key: str,
        *,
        folder: Path | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``url`` and ``key``: of control, as the worker dials it."""
        self._url = url.rstrip("/")
        self._key = key
        self._folder = folder or default_folder()
        self._is_stopped = is_stopped
        self._sleep = sleep

    def local(self, spec: PolicySpec) -> PolicySpec:
        """The same policy with a folder of this host that holds its model.  Raises SetupError where there is none."""
        return msgspec.structs.replace(spec, model=str(self._find(spec)))

    def _find(self, spec: PolicySpec) -> Path:
        wanted, fetched = spec.fingerprint, self._folder / spec.fingerprint
        for folder in (Path(spec.model), fetched):
            if _holds(folder, wanted):
                return folder
        if spec.source.startswith(PYPI) or not Path(spec.source).is_absolute():
            try:
                named = resolve_model(spec.source)
            except SetupError as error:
                logger.info("%s is not to be had on this host (%s)", spec.source, error)
            else:
                if _holds(named, wanted):
                    return named
                logger.info("%s is another model here than on the server", spec.source)
        self._fetch(spec, fetched)
        return fetched

    def _fetch(self, spec: PolicySpec, target: Path) -> None:
        """The server's own files, whole or not at all; several engines of a host fetch them once."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_suffix(".lock")):
            if _holds(target, spec.fingerprint):
                return
            listing = json.loads(self._read(f"/worker/v1/models/{spec.name}"))
            partial = target.with_suffix(".partial")
            partial.mkdir(exist_ok=True)
            total = sum(int(file["size_bytes"]) for file in listing["files"])
            _check_room(partial, total)
            logger.info("fetching the model of %s from the server: %.1f MB", spec.name, total / 1e6)
            for file in listing["files"]:
                self._fetch_file(spec.name, file, partial)
            if not _holds(partial, spec.fingerprint):
                shutil.rmtree(partial)
                raise SetupError(
                    f"the model of policy {spec.name!r} changed on the server since it started: start the server again"
                )
            shutil.rmtree(target, ignore_errors=True)  # damaged since it was fetched
            partial.replace(target)

    def _fetch_file(self, policy: str, file: dict[str, Any], folder: Path) -> None:
        """One file, from where an earlier try ended."""
        name, size = str(file["name"]), int(file["size_bytes"])
        if Path(name).name != name or not name.endswith(SUFFIXES):
            raise SetupError(f"the server names a model file {name!r}, which this worker does not write")
        path, fault, num_failures = folder / name, "", 0
        while num_failures < len(RETRIES_S):
            had = _size(path)
            try:
                if had < size:
                    self._continue(f"/worker/v1/models/{policy}/{name}", path)
                if _size(path) < size:
                    raise ConnectionError("the connection broke off")
                if sha256_of(path) == file["sha256"]:
                    return
                path.unlink()
                fault = "its bytes are others than the server promised"
            except (OSError, HTTPException) as error:
                fault = str(error)
            num_failures = 0 if _size(path) > had else num_failures + 1
            pause_s = RETRIES_S[max(0, num_failures - 1)]
            logger.warning("fetching %s: %s; trying again in %.0f s", name, fault, pause_s)
            self._sleep(pause_s)
        raise SetupError(
            f"cannot fetch {name} of policy {policy!r} from {self._url}: {fault}; or copy the model's folder here, to"
            " the path that it has on the server"
        )

    def _continue(self, path: str, target: Path) -> None:
        """Append what a file lacks.  Raises OSError, HTTPException."""
        have = _size(target)
        reply = self._open(path, {"Range": f"bytes={have}-"} if have else {})
        with reply, target.open("ab" if reply.status == 206 else "wb") as out:
            while chunk := reply.read(CHUNK_BYTES):
                if self._is_stopped():
                    raise Stopped("told to end while a model was fetched; what came is kept for the next start")
                out.write(chunk)

    def _read(self, path: str) -> bytes:
        try:
            with self._open(path, {}) as reply:
                return reply.read()
        except (OSError, HTTPException) as error:
            raise SetupError(f"cannot ask {self._url} for the files of a model: {error}") from error

    def _open(self, path: str, headers: dict[str, str]) -> Any:
        request = urllib.request.Request(
            self._url + path, headers={"Authorization": f"Bearer {self._key}", "Accept-Encoding": "identity", **headers}
        )
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]  # as the connection itself
        if self._url.startswith("https://"):
            handlers.append(urllib.request.HTTPSHandler(context=client_context()))
        return urllib.request.build_opener(*handlers).open(request, timeout=TIMEOUT_S)


def _holds(folder: Path, wanted: str) -> bool:
    """Whether a folder has that model, and may be read: on another host the same path may be somebody else's."""
    try:
        return folder.is_dir() and fingerprint(folder) == wanted
    except OSError as error:
        logger.info("%s is not used: %s", folder, error)
        return False


def _check_room(folder: Path, needed: int) -> None:
    have = sum(path.stat().st_size for path in folder.iterdir())
    free = shutil.disk_usage(folder).free
    if free < needed - have:
        raise SetupError(
            f"fetching the model needs {needed - have} bytes in {folder}, which has {free}: make room, or name another"
            " place in WINGBEAT_CACHE"
        )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
