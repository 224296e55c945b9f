"""A whole run with vLLM as its engine: real processes, evaluation of a pinned version included."""

from __future__ import annotations

import json
from pathlib import Path

from harness import cli, train_config

STEPS = 4


def test_a_tiny_model_is_trained_end_to_end(vllm_python: str, vllm_models: Path, tmp_path: Path) -> None:
    settings = {
        "run__steps": STEPS,
        "dataflow__max_staleness": 0,  # so that policy and sampling logprobs are of the same weights
        "engine__backend": "vllm",
        "engine__vllm__python": vllm_python,
    }
    config = tmp_path / "config.toml"
    config.write_text(train_config(tmp_path, vllm_models, **settings), encoding="utf-8")
    done = cli("train", str(config), timeout_s=240)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "mismatch_kl" in line]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert all(line["mismatch_kl"] < 1e-6 and line["max_abs_logprob_diff"] < 1e-3 for line in steps)
    assert all(line["excluded_tokens"] == 0 and 0 <= line["reward/mean"] <= 1 for line in steps)
    assert (run / "export" / "solver" / "config.json").exists()
    result = json.loads((run / "result.json").read_text())
    assert result["complete"]
    assert len(result["after"]) == 6
