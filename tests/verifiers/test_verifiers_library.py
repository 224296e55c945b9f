"""The real verifiers library in an environment of its own; `make test-verifiers` makes it and names its interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from wingbeat.environments.calculator.model import build_model
from wingbeat.environments.calculator.tokenizer import write_tokenizer

PYTHON = "WINGBEAT_VERIFIERS_PYTHON"
DIGITS = """
import verifiers as vf
from datasets import Dataset


def load_environment(held_out=2, words=("3", "5", "8", "13", "21", "34")):
    rows = [{"question": f"what is {word} plus 0 ?", "answer": word} for word in words]

    def is_short(completion, answer, **kwargs):
        return float(len(completion[-1]["content"]) < 20)

    def replied(completion, answer, **kwargs):
        return float(completion[-1]["role"] == "assistant")

    train, held_out_rows = Dataset.from_list(rows[held_out:]), Dataset.from_list(rows[:held_out])
    rubric = vf.Rubric([is_short, replied], weights=[0.5, 0.25])
    return vf.SingleTurnEnv(dataset=train, eval_dataset=held_out_rows, rubric=rubric)
"""


@pytest.fixture(scope="module")
def python() -> str:
    """The interpreter of an environment with verifiers."""
    found = os.environ.get(PYTHON, "")
    assert found, f"set {PYTHON} to the Python of an environment with verifiers, or run `make test-verifiers`"
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An environment of the library, and a model that says anything."""
    (tmp_path / "digits.py").write_text(DIGITS)
    write_tokenizer(tmp_path / "model")
    build_model(0).save_pretrained(tmp_path / "model")
    return tmp_path


def wingbeat(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "wingbeat.cli", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_its_own_loop_and_rubric_score_a_policy(folder: Path, python: str) -> None:
    own = ["--environment", "verifiers:digits", "--options", f"python={python}", "--options", f"folder={folder}"]
    limits = ["--policies.solver.context_tokens=128", "--options", "max_tokens=4"]
    done = wingbeat(folder, "eval", *own, *limits, "--model", "model", "--samples", "3", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    reply = json.loads(done.stdout)
    assert (reply["num_finished"], reply["num_expected"]) == (6, 6)
    assert 0.25 <= reply["mean_reward"] <= 0.75  # by the weights of the rubric: it replied, and it may be short
    assert set(reply["sources"]) == {"verifiers:digits"}


def test_it_trains(folder: Path, python: str) -> None:
    options = ["--options", f"python={python}", "--options", f"folder={folder}", "--options", "max_tokens=4"]
    made = wingbeat(folder, "init", "mine", "--environment", "verifiers:digits", *options)
    assert made.returncode == 0, made.stderr[-3000:]
    sizes = [f"--policies.solver.model={folder / 'model'}", "--policies.solver.context_tokens=128"]
    steps = ["--run.steps=2", "--dataflow.groups_per_step=2", "--dataflow.group_size=2"]
    done = wingbeat(folder / "mine", "train", "config.toml", *sizes, *steps, "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert (result["complete"], result["train_steps"]) == (True, 2)
    assert [set(done["sources"]) for done in result["evaluations"]] == [{"verifiers:digits"}] * 2  # before and after
