"""Presets: settings with which a tiny model trains on an environment, on two CPU cores, without any download.

What an environment says (:attr:`Kind.preset`) lies over :data:`BASE`, table by table.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from wingbeat.core.config import Config, validate_config
from wingbeat.environments.registry import find_kind

POLICY = "solver"
"""The policy of presets that train one."""

BASE: Mapping[str, Any] = MappingProxyType(
    {
        "run": {"steps": 60},
        "policies": {
            POLICY: {
                "model": "builtin:calculator",
                "context_tokens": 256,
                "trainer": {
                    "algorithm": "rloo",
                    "learning_rate": 1.5e-3,
                    "schedule": "linear",
                    "warmup_steps": 5,
                    "min_lr_ratio": 0.1,
                    "threads": 1,
                },
            }
        },
        "engine": {"kv_tokens": 32768, "threads": 1},
        "dataflow": {"max_staleness": 2},
        "eval": {"max_tasks": 64},
        "agent": {"path": "builtin", "concurrency": 32},
    }
)


def preset_data(spec: str) -> dict[str, Any]:
    """The configuration tables that train a tiny model on an environment, without what is default anyway.

    An environment whose preset names policies of its own has those alone.  Raises ConfigError for an unknown name.
    """
    own = find_kind(spec)[0].preset
    base = dict(BASE)
    if POLICY not in own.get("policies", {POLICY: {}}):
        del base["policies"]
    return merged(merged(base, own), {"tasks": {"environment": spec}})


def preset_config(spec: str, over: Mapping[str, Any] | None = None) -> Config:
    """The preset, validated, with ``over`` laid over it."""
    return validate_config(merged(preset_data(spec), over or {}))


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """One table of both; where both have a key, tables are merged and values are those of ``over``."""
    result = dict(under)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result
