"""Keys of one start: what the supervisor, its workers and its agents call the server with.

They live in memory and in the environment of our own processes, so that a run can be continued without any plain key
on disk.  Control gets hashes only.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from wingbeat.core.config import Config
from wingbeat.core.keys import ADMIN_KEY_VARIABLE, CLIENT_KEY_VARIABLE, WORKER_KEY_VARIABLE, hashed


@dataclass(frozen=True, slots=True, repr=False)
class RunKeys:
    """One key of each role that our own processes have."""

    admin: str
    worker: str
    client: str

    @classmethod
    def new(cls) -> Self:
        return cls(*(f"wb-own-{secrets.token_urlsafe(24)}" for _ in range(3)))

    @property
    def of_control(self) -> Mapping[str, str]:
        """Environment of control."""
        return {
            WORKER_KEY_VARIABLE: hashed(self.worker),
            ADMIN_KEY_VARIABLE: hashed(self.admin),
            CLIENT_KEY_VARIABLE: hashed(self.client),
        }

    @property
    def of_resources(self) -> Mapping[str, str]:
        """Environment of a resources server: it reports as a worker, and knows whom control knows."""
        return {**self.of_control, WORKER_KEY_VARIABLE: self.worker}

    @property
    def of_worker(self) -> Mapping[str, str]:
        """Environment of an engine or a trainer."""
        return {WORKER_KEY_VARIABLE: self.worker}


def without_plain_keys(config: Config) -> Config:
    """The configuration as files and logs may hold it, with hashes in place of keys."""
    return config.model_copy(update={"server": config.server.without_keys()})
