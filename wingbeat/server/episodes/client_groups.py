"""Groups that clients declare under names of their own.

Such a group belongs to its client: its slots are dealt to nobody else, since only that client's agents
know its task.  Our id of it is ``client:NAME:SUFFIX``, so that after a restart the names are read back from
the open groups.  Ids of episodes begin with it and stand in paths, so what is special there is spelt ``~2F``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from urllib.parse import quote, unquote

from wingbeat.core.errors import ConflictError

PREFIX = "client:"
REMEMBERED = 10_000


def is_client_group(group_id: str) -> bool:
    """Whether a client declared this group (or began a task of its own without one)."""
    return group_id.startswith(PREFIX)


class ClientGroups:
    """The names in use, and those that are over."""

    def __init__(self) -> None:
        self._open: dict[str, str] = {}
        """Name to our id."""
        self._closed: OrderedDict[str, None] = OrderedDict()
        """Names of groups that closed, oldest first: a straggler is told so, within memory bounds."""

    def find(self, name: str) -> str | None:
        """Our id of an open group; None for a name that is new.  Raises ConflictError once it has closed."""
        if name in self._closed:
            raise ConflictError(f"group {name!r} has closed; use a new group id", param="group")
        return self._open.get(name)

    def add(self, name: str, *, suffix: str) -> str:
        """The id of a new group; the empty name is for a task without a group, and is not kept."""
        group_id = f"{PREFIX}{spell(name, safe=':')}:{suffix}"
        if name:
            self._open[name] = group_id
        return group_id

    def close(self, group_ids: Iterable[str]) -> None:
        """These groups closed: their names take no more members."""
        for group_id in filter(is_client_group, group_ids):
            name = _name(group_id)
            if self._open.pop(name, None) is not None:
                self._closed[name] = None
        while len(self._closed) > REMEMBERED:
            self._closed.popitem(last=False)

    def restore(self, group_ids: Iterable[str]) -> None:
        """Groups that were open when the server stopped: their clients may come back."""
        self._open.update({_name(g): g for g in group_ids if is_client_group(g) and _name(g)})


def spell(name: str, *, safe: str = "") -> str:
    """A name as part of an id that stands in paths; what is ``safe`` stays as it is."""
    return quote(name, safe=safe).replace("~", "%7E").replace("%", "~")


def _name(group_id: str) -> str:
    return unquote(group_id.removeprefix(PREFIX).rpartition(":")[0].replace("~", "%"))
