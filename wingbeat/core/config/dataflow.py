"""Configuration of the dataflow: groups, staleness, operators, tasks."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from wingbeat.core.config.section import Section


class OperatorConfig(Section):
    """One operator of the chain between closed groups and training batches.

    The key is a list: `operators = [{ use = "..." }, ...]`, or one `[[dataflow.operators]]` table for each. Any further
    key is an option of the operator (docs/operators.md); an unknown one is refused.
    """

    model_config = ConfigDict(extra="allow", frozen=True, validate_default=True)

    use: str = Field(
        min_length=1,
        description="A built-in operator's name, or a class of yours: `module:Class` or `path/to/file.py:Class`.",
    )
    policies: list[str] | None = Field(default=None, description="The policies it applies to; unset: all that train.")
    on_error: Literal["quarantine", "stop"] = Field(
        default="quarantine",
        description="Where it raises: leave it out from then on and go on with its input, or stop training.",
    )

    @property
    def options(self) -> dict[str, Any]:
        """What the operator itself is configured with."""
        return dict(self.model_extra or {})


class DataflowConfig(Section):
    """From episodes to batches."""

    group_size: int = Field(default=8, ge=1, description="Episodes per task that share a baseline.")
    groups_per_step: int = Field(default=8, ge=1, description="Groups per optimiser step.")
    max_staleness: int = Field(
        default=1, ge=0, description="Versions a sample may be behind the trainer; 0 is synchronous."
    )
    straggler: Literal["wait", "mask", "drop"] = Field(
        default="wait",
        description="What a step does about old groups that still run: wait for them up to `straggler_wait_s`, then"
        " mask tokens that have become over-age; or never wait and mask them; or never wait and drop their episodes.",
    )
    straggler_wait_s: Annotated[float, Field(ge=0)] | Literal["unlimited"] = Field(
        default=60.0, description="Of `wait`: how long a step waits for older running groups."
    )
    barrier: bool = Field(
        default=False,
        description="Policies step together: none starts its next step before all that train have finished theirs.",
    )
    operators: list[OperatorConfig] = Field(
        default=[], description="What is done to every closed group before it may train, in this order."
    )
    group_floor: int | None = Field(
        default=None,
        ge=1,
        description="Members with which a group may close at its deadline (unset: its size), or when its agent version"
        " is gone (unset: half of it).",
    )
    group_deadline_s: float = Field(default=600.0, gt=0, description="Age at which a group may close at its floor.")
    episode_deadline_s: float | None = Field(
        default=None,
        gt=0,
        description="The longest life of an attempt, however alive its client is: it then ends as `timeout`, its slot"
        " reopens; unset: none. A restart of the server begins it anew.",
    )
    ledger_backup_s: float = Field(
        default=600.0,
        ge=0,
        description="Seconds between copies of the ledger (`ledger.backup.sqlite`), each verified, to which `wingbeat"
        " ledger restore` goes back; 0 makes none.",
    )
    mix_agent_versions: bool = Field(
        default=False,
        description="Let different versions of an agent (label, code digest) share a group or an evaluation.",
    )
    variant_wait_s: float = Field(
        default=30.0,
        gt=0,
        description="How long a version of an agent that asks for no work and runs no episode keeps its groups, while"
        " another version asks.",
    )
    max_attempts: int = Field(default=3, ge=1, description="Attempts of an episode before its slot is given up.")
    drop_zero_variance: bool = Field(
        default=True, description="Groups whose rewards are all equal count for the batch but are not trained."
    )
    dynamic_sampling: bool = Field(
        default=False, description="Do not count such groups: sample on until the batch is full (DAPO)."
    )

    @model_validator(mode="after")
    def _only_wait_waits(self) -> DataflowConfig:
        if self.straggler != "wait" and self.straggler_wait_s != type(self).model_fields["straggler_wait_s"].default:
            raise ValueError(
                f'`straggler_wait_s` is of `straggler` = "wait"; "{self.straggler}" never waits: leave it out'
            )
        return self

    @model_validator(mode="after")
    def _batches_can_fill(self) -> DataflowConfig:
        if self.dynamic_sampling and self.group_size == 1:
            raise ValueError(
                "`dynamic_sampling` skips groups of equal rewards, which every group of one is, so no batch would ever"
                " fill: set `group_size` to 2 or more, or leave `dynamic_sampling` out"
            )
        return self


class SourceConfig(Section):
    """One of several task sources: an environment or a Python file, whose tasks are dealt under the name NAME."""

    environment: str | None = Field(
        default=None, description="The name of an environment, or `MODULE:CLASS`, `FILE.py:CLASS`."
    )
    options: dict[str, Any] = Field(default={}, description="Options of the environment.")
    file: str | None = Field(
        default=None, description="A Python file with `train_tasks()` and `eval_tasks()` that return tasks."
    )

    @model_validator(mode="after")
    def _one_origin(self) -> SourceConfig:
        if (self.environment is None) == (self.file is None):
            raise ValueError("set `environment` or `file`" + (", not both" if self.file is not None else ""))
        if self.options and self.environment is None:
            raise ValueError("`options` belong to an `environment`; none is set")
        return self


def ratios_fault(left_out: str, unknown: Sequence[str]) -> str:
    """What is wrong with ratios that have no share for a configured source, which a misspelt one may be."""
    near = difflib.get_close_matches(left_out, unknown, n=1, cutoff=0.5)
    if near:
        return f"`ratios` name {near[0]!r}, which is no source; did you mean {left_out!r}?"
    also = f" (they name {unknown[0]!r}, which is none of the configuration)" if unknown else ""
    return f"`ratios` leave out the source {left_out!r}{also}: give it a share, 0 to deal none of it, or take it out"


class TasksConfig(Section):
    """Where tasks come from: an environment or a Python file, or several of them."""

    environment: str | None = Field(
        default=None, description="The name of an environment, or `MODULE:CLASS`, `FILE.py:CLASS`."
    )
    options: dict[str, Any] = Field(default={}, description="Options of the environment.")
    file: str | None = Field(
        default=None, description="A Python file with `train_tasks()` and `eval_tasks()` that return tasks."
    )
    ratios: dict[str, float] = Field(
        default={},
        description="Shares of the training groups by task source, which sum to 1; 0 deals none of it. Unset: by the"
        " number of tasks.",
    )
    epochs: int | None = Field(
        default=None, ge=1, description="Times that each task is dealt; then its source is exhausted. Unset: no limit."
    )
    sources: dict[str, SourceConfig] = Field(
        default={}, description="Several task sources by name, in place of `environment` or `file`."
    )

    @model_validator(mode="after")
    def _one_form(self) -> TasksConfig:
        if self.sources and (self.environment is not None or self.file is not None):
            raise ValueError("set `environment` or `file`, or several [tasks.sources.NAME], not both")
        if self.sources and self.ratios and (left_out := sorted(set(self.sources) - set(self.ratios))):
            unknown = sorted(set(self.ratios) - set(self.sources))
            raise ValueError(ratios_fault(left_out[0], unknown))
        return self

    @model_validator(mode="after")
    def _one_source(self) -> TasksConfig:
        if self.environment is not None and self.file is not None:
            raise ValueError("set `environment` or `file`, not both")
        if self.options and self.environment is None:
            raise ValueError("`options` belong to an `environment`; none is set")
        return self

    @model_validator(mode="after")
    def _ratios_are_shares(self) -> TasksConfig:
        if self.ratios and (not abs(sum(self.ratios.values()) - 1.0) <= 1e-6 or not min(self.ratios.values()) >= 0):
            shown = ", ".join(f"{source} = {share:g}" for source, share in self.ratios.items())
            raise ValueError(
                f"`ratios` must be 0 or more and sum to 1, got {shown}, which sums to {sum(self.ratios.values()):g}"
            )
        return self
