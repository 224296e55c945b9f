"""``[weights]``: how policy versions get from their trainer to the engines."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from wingbeat.core.config.section import Section


class WeightsConfig(Section):
    """How weights travel.  Engines on the trainer's host map its files; these keys rule the way to all others."""

    encoding: Literal["auto", "full"] = Field(
        default="auto",
        description="What engines on other hosts pull: what differs from the version that they hold (`auto`; nothing"
        " is encoded where all engines are on the trainer's host), or always all weights.",
    )
    delta_chain: int = Field(
        default=8,
        ge=1,
        description="So many versions an engine may be behind and still catch up with differences alone.",
    )
    fan_out: int = Field(
        default=2,
        ge=1,
        description="Hosts that pull from the same server; the others pull from engines that relay"
        " (`wingbeat engine --relay`).",
    )
    stall_s: float = Field(
        default=30.0, gt=0, description="Seconds without a byte after which a receiver turns to its next source."
    )
    give_up_s: float = Field(
        default=120.0,
        gt=0,
        description="Seconds without a byte from any source, after which an engine reports that it lacks a version.",
    )

    @model_validator(mode="after")
    def _keys_have_an_effect(self) -> WeightsConfig:
        if self.encoding == "full" and self.delta_chain != type(self).model_fields["delta_chain"].default:
            raise ValueError('`delta_chain` is of `encoding = "auto"`, and it is "full": leave one of the two out')
        if self.give_up_s < self.stall_s:
            raise ValueError(
                f"`give_up_s` must not be below `stall_s`, after which the next source is tried; got {self.give_up_s:g}"
                f" and {self.stall_s:g}"
            )
        return self
