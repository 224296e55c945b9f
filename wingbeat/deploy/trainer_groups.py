"""Which policies share a trainer process."""

from __future__ import annotations

from wingbeat.core.config import Config
from wingbeat.core.config.lora_groups import trainer_processes


def trainer_groups(config: Config) -> dict[str, tuple[str, ...]]:
    """Policies by the name of the worker that trains them: one each, or all of a ``lora.group``."""
    return trainer_processes(config.policies)
