"""x"""
from dataclasses import dataclass
@dataclass(frozen=True, slots=True)
class DemoPreset:
    x: int = 1
DEMO_PRESET = DemoPreset()
