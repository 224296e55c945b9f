"""Configuration of what one client may take, so that none can take what others need."""

from __future__ import annotations

from pydantic import Field, model_validator

from wingbeat.core.config.section import Section


class LimitsConfig(Section):
    """What one client may hold and ask for at once, and all together. More is refused with 429 and `Retry-After`.

    A client is a key of the key file or, where callers share a key or need none, what calls itself the same
    `client_id`. While a total is used up, a client that has less than an equal share of it is still served.
    """

    open_episodes: int = Field(default=4096, ge=1, description="Episodes of one client that run at once.")
    total_open_episodes: int = Field(default=20_000, ge=1, description="Episodes of all clients that run at once.")
    leases: int = Field(default=1024, ge=1, description="Leases that one client holds without having begun.")
    waiting: int = Field(
        default=1024, ge=1, description="Begin and lease calls of one client that wait for work at once."
    )
    total_waiting: int = Field(default=4096, ge=1, description="Begin and lease calls of all that wait at once.")
    calls: int = Field(
        default=2048, ge=1, description="Model calls of one client that run or wait for an engine at once."
    )
    total_calls: int = Field(default=8192, ge=1, description="Model calls of all that run or wait at once.")
    requests_per_s: float = Field(
        default=2000.0,
        gt=0,
        description="Requests of one client per second, on average. A body counts as one more for every 64 KiB.",
    )
    request_burst: int = Field(default=20_000, ge=1, description="Requests of one client that may come at once.")
    body_bytes: int = Field(
        default=256 * 2**20, ge=1, description="Request bodies of one client that are received or read at once."
    )
    total_body_bytes: int = Field(default=2**30, ge=1, description="Request bodies of all at once.")
    task_sources: int = Field(
        default=1000,
        ge=1,
        description="Task sources of the run, training and evaluation counted apart; more get 413. They stay in memory"
        " and on disk until an admin removes them.",
    )
    task_bytes: int = Field(default=2 * 2**30, ge=1, description="Tasks of all sources together; more get 413.")
    call_s: float = Field(
        default=3600.0, gt=0, description="The longest life of a model call, its wait for an engine included."
    )

    @model_validator(mode="after")
    def _totals_hold_a_client(self) -> LimitsConfig:
        for name in ("open_episodes", "waiting", "calls", "body_bytes"):
            one, total = getattr(self, name), getattr(self, f"total_{name}")
            if total < one:
                raise ValueError(f"`total_{name}` = {total} is less than what one client may have, `{name}` = {one}")
        return self
