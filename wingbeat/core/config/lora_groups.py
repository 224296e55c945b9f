"""Policies that share one base model (``lora.group``): which they are, and what they must have in common.

A group is asked for rather than found.  It saves memory: a copy of the base model per policy, in trainers and in every
engine.  It costs time where there are cores or devices for more than one trainer, since the policies of a group train
by turns, and adapters that are not merged cost a little in every forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING

from wingbeat.core.config.trainer import LoraConfig

if TYPE_CHECKING:
    from wingbeat.core.config.schema import Config, PolicyConfig

COMMON = ("model", "dtype")
"""What a base model is."""
COMMON_IN_TRAINING = (*COMMON, "trainer.device", "trainer.threads")
"""What a trainer process has one of."""
OF_TRAINING = tuple(key for key in LoraConfig.model_fields if key != "group")


def group_of(policy: PolicyConfig) -> str | None:
    """The group of policies with which this one shares its base model; None: it has its own."""
    return None if policy.lora is None else policy.lora.group


def trainer_processes(policies: Mapping[str, PolicyConfig]) -> dict[str, tuple[str, ...]]:
    """The policies that each trainer process hosts, by the name of the process.

    ``trainer-POLICY`` hosts one, ``trainers-GROUP`` those of a group.
    """
    found: dict[str, tuple[str, ...]] = {}
    for name, policy in policies.items():
        if policy.trainable:
            group = group_of(policy)
            process = f"trainer-{name}" if group is None else f"trainers-{group}"
            found[process] = (*found.get(process, ()), name)
    return found


def check_lora_groups(config: Config) -> None:
    """Raises ValueError where policies of one group cannot share a base model, an engine or a process."""
    groups: dict[str, list[str]] = {}
    for name, policy in config.policies.items():
        if (group := group_of(policy)) is not None:
            groups.setdefault(group, []).append(name)
            _check_alone(name, policy, config)
    for group, names in groups.items():
        trained = [name for name in names if config.policies[name].trainable]
        _check_common(COMMON, group, names, config)
        _check_common(COMMON_IN_TRAINING, group, trained, config)


def _check_alone(name: str, policy: PolicyConfig, config: Config) -> None:
    """What no policy of a group can have."""
    key = f"policies.{name}.lora.group"
    if policy.trainable and policy.trainer.processes > 1:
        raise ValueError(
            f"{key}: policies of a group are trained in one process, and trainer.processes = {policy.trainer.processes}"
            " spreads this one over several; leave one of the two out"
        )
    if config.engine.tensor_parallel > 1:
        raise ValueError(
            f"{key}: engines serve a group from one model in one process, and engine.tensor_parallel ="
            f" {config.engine.tensor_parallel} divides it; leave one of the two out"
        )
    if policy.lora is not None and not policy.trainable:
        defaults = LoraConfig()
        changed = [own for own in OF_TRAINING if getattr(policy.lora, own) != getattr(defaults, own)]
        if changed:
            raise ValueError(
                f"policies.{name}.lora.{changed[0]} is of training, and trainable is false: of a frozen policy"
                " lora.group alone has an effect; leave the rest out"
            )
    original = config.policies.get(policy.snapshot_of or "")
    if original is not None and original.lora is None:
        raise ValueError(
            f"{key}: a group serves adapters, and {policy.snapshot_of!r}, of which this is a snapshot, trains all"
            " weights; leave lora out"
        )


def _check_common(keys: tuple[str, ...], group: str, names: list[str], config: Config) -> None:
    for name in names[1:]:
        for key in keys:
            first, own = (attrgetter(key)(config.policies[one]) for one in (names[0], name))
            if own != first:
                raise ValueError(
                    f"policies.{name}.{key}: policies of lora.group {group!r} share it, and that of {names[0]!r} is"
                    f" {first!r}; got {own!r}. Set it alike, or give one of them another group"
                )
