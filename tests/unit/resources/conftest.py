"""Helpers of this folder (``conformance``, the fakes) are importable by its tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
