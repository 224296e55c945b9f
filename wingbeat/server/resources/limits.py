"""What one client of a resources server may hold and ask for (``[resources]``), as control's ``[limits]`` do it."""

from __future__ import annotations

from collections.abc import Callable

from wingbeat.core.config.resources import ResourcesConfig
from wingbeat.server.limits import Quota, Rate, body_quota

SECTION = "resources"


class LendingLimits:
    """All of them; of one event loop."""

    def __init__(
        self,
        config: ResourcesConfig,
        *,
        clock: Callable[[], float],
        refused: Callable[[str], None] = lambda name: None,
    ) -> None:
        """``refused`` is told the key of each limit that refuses something."""
        self.leases = Quota(
            "leases_per_client",
            "resources held, waited for or fetched ahead",
            limit=config.leases_per_client,
            total=config.total_leases,
            refused=refused,
            help="give some back first",
            section=SECTION,
            total_name="total_leases",
        )
        self.bodies = body_quota(config, refused=refused, section=SECTION)
        self.rate = Rate(
            per_s=config.requests_per_s,
            burst=config.request_burst,
            clock=clock,
            refused=refused,
            section=SECTION,
        )
