"""Who is calling, and what that role may do.

::

    admin     everything
    client    runs agents: leases, begins and ends episodes, announces its tasks, reads status, policies and mixing
    worker    /worker/v1 only
    collect   an application whose conversations are recorded: model calls, and feedback on its own episodes
    episode   model calls, heartbeat, finish, abort and state of one attempt (issued by begin, never in the key file)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

KEY_ID = re.compile(r"key-[0-9a-f]{12}")


class Role(StrEnum):
    """What a key is for."""

    ADMIN = "admin"
    CLIENT = "client"
    WORKER = "worker"
    COLLECT = "collect"


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller of a request, as its key says."""

    role: Role
    key_id: str = ""
    """Of the key file; "" for the keys of the configuration, and where no key is needed."""
    name: str = ""
    """What people call the key."""
    train: bool = False
    """Role ``collect``: whether its conversations may train."""
    record: bool = True
    """Role ``collect``: whether its conversations are kept at all."""
    policies: tuple[str, ...] = ()
    """Role ``collect``: the policies that it may call; () means all."""

    def client(self, client_id: str) -> str:
        """Whose quota a request counts against: a key's own, where it is one of several, else the client's word.

        A word that looks like the id of a key is no such id: nobody may use another's quota up.
        """
        if self.key_id:
            return self.key_id
        return f"~{client_id}" if KEY_ID.fullmatch(client_id) else client_id


MAY_ADMINISTRATE = frozenset({Role.ADMIN})
MAY_RUN_AGENTS = frozenset({Role.ADMIN, Role.CLIENT})
MAY_HOLD_EPISODES = frozenset({Role.ADMIN, Role.CLIENT, Role.COLLECT})
"""May act on episodes that they began; an admin on every one."""
MAY_COLLECT = frozenset({Role.ADMIN, Role.COLLECT})
"""May list and delete conversations: those of its own key; an admin all."""
MAY_WORK = frozenset({Role.WORKER})
MAY_REPORT = frozenset({Role.ADMIN, Role.CLIENT, Role.WORKER})
"""May say what their pool of resources does."""
MAY_LEND = frozenset({Role.ADMIN, Role.WORKER})
"""May say where clients find a resources server: they send their keys there."""

NEEDED: Mapping[frozenset[Role], str] = {
    MAY_ADMINISTRATE: "an admin key",
    MAY_RUN_AGENTS: "a client key or an admin key",
    MAY_HOLD_EPISODES: "the key of the episode, the client key that began it, or an admin key",
    MAY_COLLECT: "a collect key or an admin key",
    MAY_WORK: "a worker key",
    MAY_REPORT: "a client key, a worker key or an admin key",
    MAY_LEND: "a worker key or an admin key",
}
"""In messages."""
