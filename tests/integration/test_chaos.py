"""A training run under a minute of faults: processes are killed and stopped, connections break, the disk fills up,
clocks jump.  ``python -m bench.chaos`` is the same at full length.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT, environment

TIMEOUT_S = 240.0
"""A run takes about a minute; this stops a hung one."""


@pytest.mark.slow
@pytest.mark.alone
def test_a_run_under_faults_loses_nothing_and_trains_nothing_twice(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.chaos", "--quick", "--seed", "0", "--keep", str(tmp_path / "kept")]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.stdout, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    failed = [bar for bar, held in found["bars"].items() if not held]
    assert not failed, f"{failed}: {found['details']} {found['ledger_problems']} {done.stderr[-3000:]}"
    assert done.returncode == 0
    assert found["episodes_finished"] > 50
    assert min(found["sigkill_by_role"][role] for role in ("control", "trainer", "engine", "client")) >= 1
