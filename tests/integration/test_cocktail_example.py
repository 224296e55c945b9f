"""examples/cocktail, cut short: three clients as their users start them, one policy, a few steps."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from harness import ROOT, environment, eventually_now

EXAMPLE = ROOT / "examples" / "cocktail"
CLIENTS = ("sums", "echo", "backward")
SHORT = ("--run.steps=6", "--eval.max_tasks=12", "--eval.samples_per_task=1", "--server.port=0")


@contextmanager
def running(*command: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, *command], env=environment(), stdout=out, stderr=out)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def address(folder: Path, process: subprocess.Popen[bytes], log: Path) -> str:
    def found() -> str:
        assert process.poll() is None, log.read_text()
        for path in folder.glob("runs/*/server.json"):
            return str(json.loads(path.read_bytes())["url"])
        return ""

    return eventually_now(found, what="the server", timeout_s=180)


@pytest.mark.slow
def test_the_example_trains_a_mix_of_three_clients_tasks(models: Path, tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    log = tmp_path / "train.log"
    overrides = (f"--policies.solver.model={models / 'solver'}", f"--run.dir={tmp_path / 'runs'}", *SHORT)
    with ExitStack() as stack:
        train = stack.enter_context(
            running("-m", "wingbeat.cli", "train", str(EXAMPLE / "config.toml"), *overrides, log=log)
        )
        url = address(tmp_path, train, log)
        clients = {
            name: stack.enter_context(running(str(EXAMPLE / f"{name}.py"), url, log=tmp_path / f"{name}.log"))
            for name in CLIENTS
        }
        mixing: dict[str, float] = {}

        def ended() -> bool:
            for name, client in clients.items():
                assert client.poll() in (None, 0), (tmp_path / f"{name}.log").read_text()
            try:
                with urllib.request.urlopen(f"{url}/api/mixing", timeout=5) as reply:
                    mixing.update({name: place["share"] for name, place in json.load(reply)["sources"].items()})
            except (OSError, http.client.HTTPException):  # it has ended, or is about to
                pass
            return train.poll() is not None

        eventually_now(ended, what="the end of the run", timeout_s=400)
        assert train.returncode == 0, log.read_text()
        for name, client in clients.items():
            assert client.wait(60) == 0, (tmp_path / f"{name}.log").read_text()
    (result,) = (json.loads(path.read_text()) for path in tmp_path.glob("runs/*/result.json"))
    assert result["complete"] and result["train_steps"] == 6
    for moment in ("before", "after"):
        assert set(result[f"{moment}_by_source"]) == set(CLIENTS)
        assert len(result[moment]) == 12
    assert mixing == pytest.approx({"sums": 0.5, "echo": 0.2, "backward": 0.3}, abs=0.2)


@pytest.mark.slow
def test_the_examples_model_is_made(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE / "make_model.py"), "--out", str(tmp_path / "model"), "--steps", "2"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200, check=True)
    assert json.loads(done.stdout)["loss"] > 0
    assert (tmp_path / "model" / "tokenizer.json").exists() and (tmp_path / "model" / "config.json").exists()


def test_clients_import_only_public_names() -> None:
    for name in CLIENTS:
        imports = [line for line in (EXAMPLE / f"{name}.py").read_text().splitlines() if "wingbeat" in line]
        assert [line for line in imports if line.startswith(("import wingbeat", "from wingbeat"))] == [
            line for line in imports if line.startswith("from wingbeat import ")
        ]
