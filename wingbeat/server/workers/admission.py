"""Which workers may join: control's answers to registrations that cannot be, each by name and with what to do."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from wingbeat.core.events import EventLog
from wingbeat.core.worker_protocol import Refused, Register
from wingbeat.server.calls.flights import EngineLink
from wingbeat.server.workers.hub import SILENT_HEARTBEATS
from wingbeat.server.workers.software import differences, own_software

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineAdmission:
    """What control holds engines to, and of trainers their software."""

    policies: Collection[str]
    version_mismatch: Literal["warn", "refuse"]
    heartbeat_s: float
    events: EventLog
    software: dict[str, str] = field(default_factory=own_software)
    """Of this server."""

    def refusal(self, register: Register, links: Sequence[EngineLink]) -> Refused | None:
        """Why an engine may not join; None where it may."""
        unknown = [name for name in register.policies if name not in self.policies]
        if unknown:
            return Refused(f"there is no policy {', '.join(map(repr, unknown))} here, only {', '.join(self.policies)}")
        for link in links:
            if link.worker_id == register.worker_id and (link.host_id, link.pid) != (register.host_id, register.pid):
                return Refused(
                    f"an engine named {register.worker_id!r} is connected already: give each one another --name (one"
                    f" that was killed is let go within {self.heartbeat_s * SILENT_HEARTBEATS:.0f} s)",
                    for_now=True,
                )
        return self.refusal_of_software(register)

    def refusal_of_software(self, register: Register) -> Refused | None:
        """Why a worker of another release may not join; None where it may."""
        found = differences(register.software, self.software)
        if not found:
            return None
        text = f"{'; '.join(found)}: install the same on both"
        if self.version_mismatch == "refuse":
            return Refused(f'{text} (engine.version_mismatch = "refuse")')
        logger.warning("%s %s has %s", register.role, register.worker_id, text)
        self.events.emit(f"{register.role}_differs", worker_id=register.worker_id, differences=found)
        return None

    def trainer_warning(self, worker_id: str, software: Mapping[str, str]) -> str:
        """Of a trainer that runs another release, for the status; "" where it does not."""
        found = differences(software, self.software)
        return (
            f"trainer {worker_id!r} has {'; '.join(found)}: it may compute other probabilities than were sampled, see"
            " mismatch_kl"
            if found
            else ""
        )

    def warnings(self, links: Sequence[EngineLink]) -> list[str]:
        """Engines that run other releases than this server, for the status."""
        return [
            f"engine {link.worker_id!r} has {'; '.join(found)}: it may sample other probabilities than are trained,"
            " see mismatch_kl"
            for link in links
            if (found := differences(link.software, self.software))
        ]
