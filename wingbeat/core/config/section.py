"""The base of all configuration sections."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of all sections: unknown keys fail, values are immutable, defaults are validated."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
