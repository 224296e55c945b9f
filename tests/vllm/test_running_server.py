"""A server that somebody started as the manual says (``engine.vllm.url``): taken, refused, waited for."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rig import CONTEXT, Replies, Rig, gap, logits_of, perturb
from test_adapters import adapter, merged

from wingbeat.core.errors import SetupError
from wingbeat.core.types import FinishReason

CLOSE = 1e-4
MANUAL = Path(__file__).parents[2] / "docs" / "howto" / "vllm.md"
SMALL = f"--max-model-len {CONTEXT} --kv-cache-memory-bytes 67108864"


class Running:
    """The manual's own command, with another place, model and size."""

    def __init__(self, models: Path, python: str, log: Path) -> None:
        (found,) = re.findall(r"```sh\n(LAUNCHER=.+?)\n```", MANUAL.read_text(encoding="utf-8"), re.DOTALL)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        places = {
            "python -c": f"{shlex.quote(sys.executable)} -c",
            "/opt/vllm/bin/python": f"exec {shlex.quote(python)}",
            "--port 8000": f"--port {port}",
            "models/solver": shlex.quote(str(models / "tied")),
        }
        for documented, here in places.items():
            assert found.count(documented) == 1, documented
            found = found.replace(documented, here)
        self._command, self._log = found, log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, more: str = "", **environment: str) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", f"{self._command} {SMALL} {more}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", **environment},
                start_new_session=True,
            )

    def kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@pytest.fixture(scope="module")
def running(vllm_python: str, vllm_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One with room for adapters, which whole models need not know; the tests use it in their order."""
    server = Running(vllm_models, vllm_python, tmp_path_factory.mktemp("running") / "vllm.log")
    server.start("--enable-lora --max-loras 2 --max-lora-rank 8", VLLM_ALLOW_RUNTIME_LORA_UPDATING="1")
    yield server
    server.kill()


def attached(make_rig: Callable[..., Rig], server: Running, **options: object) -> Rig:
    return make_rig(python="", vllm={"url": server.url, "start_timeout_s": 120.0}, **{"model": "tied", **options})


def test_adapters_are_loaded_into_a_running_server(make_rig: Callable[..., Rig], running: Running) -> None:
    for seed in (1, 2):  # the second worker finds what the first has left
        rig = attached(make_rig, running, lora={"rank": 8, "alpha": 16.0})
        host = rig.load()
        tensors, info = adapter(rig, rank=8, seed=seed)
        rig.serve(host, rig.publish(tensors, version=seed, adapter=info))
        asked = Replies(host)
        asked.submit("a", [7, 8, 9])
        (reply,) = asked.finish().values()
        assert set(reply.versions) == {seed}
        assert gap(logits_of(merged(rig, tensors, info), [7, 8, 9], reply), reply) < CLOSE
        rig.close()


def test_a_worker_takes_a_running_server_and_so_does_the_next_one(
    make_rig: Callable[..., Rig], running: Running
) -> None:
    for seed in (1, 2):  # also: weights, labels, KV
        rig = attached(make_rig, running)
        host, reference = rig.load(), rig.reference()
        for version in (1, 2):
            rig.serve(host, rig.publish(perturb(reference, seed=10 * seed + version), version=version))
            asked = Replies(host)
            asked.submit("a", list(range(1, 200)))
            (reply,) = asked.finish().values()
            assert set(reply.versions) == {version}
            assert gap(logits_of(reference, list(range(1, 200)), reply), reply) < CLOSE
        rig.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "untied"}, r"to serve the model in .*untied, got .*tied: start it with --model .*untied"),
        ({"policy": {"dtype": "bfloat16"}}, "expected --dtype bfloat16, got float32"),
        ({"policy": {"context_tokens": 2 * CONTEXT}}, "start it with a larger --max-model-len"),
        ({"lora": {"rank": 16}}, "expected --max-lora-rank 16 or more, got 8"),
        ({"lora": {"rank": 8}}, "holds weights that were trained before .*: start it anew"),
        ({"policy": {"trainable": False}}, "holds weights that were trained before .*: start it anew"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_by_the_name_of_what_is_wrong(
    make_rig: Callable[..., Rig], running: Running, options: dict[str, object], said: str
) -> None:
    with pytest.raises(SetupError, match=said):
        attached(make_rig, running, **options).load()


def test_a_server_that_ends_is_waited_for_and_what_ran_goes_on(make_rig: Callable[..., Rig], running: Running) -> None:
    rig = attached(make_rig, running)
    host, reference = rig.load(), rig.reference()
    rig.serve(host, rig.publish(perturb(reference, seed=5), version=1))
    asked = Replies(host)
    asked.submit("a", [3, 4], max_tokens=900)
    asked.until(lambda: len(asked.replies["a"].tokens) >= 10)
    running.kill()
    running.start()
    (reply,) = asked.finish().values()
    assert (len(reply.tokens), reply.finish, reply.error) == (900, FinishReason.LENGTH, "")
    assert set(reply.versions) == {1}
    assert gap(logits_of(reference, [3, 4], reply), reply) < CLOSE
    rig.close()
    with pytest.raises(SetupError, match="expected --max-loras 2 or more, got 0; expected --max-lora-rank 8"):
        attached(make_rig, running, lora={"rank": 8}).load()
