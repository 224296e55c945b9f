"""The client is light: what its import loads and how long it takes."""

from __future__ import annotations

import json
import subprocess
import sys

PROBE = """
import json, sys, time
start = time.process_time()
import wingbeat.client
seconds = time.process_time() - start
import wingbeat
heavy = [name for name in ("torch", "transformers", "vllm", "ray", "openai", "numpy", "msgspec") if name in sys.modules]
sys.stdout.write(json.dumps({"seconds": seconds, "heavy": heavy, "version": wingbeat.__version__}))
"""

ROOT_PROBE = """
import sys, wingbeat
loaded = [name for name in ("aiohttp", "pydantic", "wingbeat.client") if name in sys.modules]
assert not loaded, loaded
assert all(getattr(wingbeat, name) is not None for name in wingbeat.__all__)
try:
    wingbeat.nothing
except AttributeError:
    pass
"""


def test_client_import_is_light_and_fast() -> None:
    probes = [
        json.loads(subprocess.run([sys.executable, "-c", PROBE], capture_output=True, check=True).stdout)
        for _ in range(2)
    ]
    assert probes[0]["heavy"] == []
    assert min(probe["seconds"] for probe in probes) < 0.5


def test_root_exports_load_on_use() -> None:
    subprocess.run([sys.executable, "-c", ROOT_PROBE], check=True)
