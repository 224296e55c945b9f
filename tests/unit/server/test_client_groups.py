"""Names that clients give their groups."""

from __future__ import annotations

import pytest

from wingbeat.core.errors import ConflictError
from wingbeat.server.episodes import client_groups
from wingbeat.server.episodes.client_groups import ClientGroups, is_client_group


def test_a_name_is_found_until_its_group_closes() -> None:
    groups = ClientGroups()
    assert groups.find("a") is None
    own = groups.add("a", suffix="s1")
    assert is_client_group(own) and groups.find("a") == own
    groups.close([own, "somebody-elses"])
    with pytest.raises(ConflictError, match="has closed"):
        groups.find("a")


def test_names_with_separators_survive_a_restart() -> None:
    before = ClientGroups()
    own = [before.add(name, suffix="ep-1") for name in ("a:b", "client:x", "ü 1")]
    lone = before.add("", suffix="ep-2")
    after = ClientGroups()
    after.restore([*own, lone, "ep-3"])
    assert [after.find(name) for name in ("a:b", "client:x", "ü 1")] == own
    assert after.find("") is None


def test_names_stand_in_paths_and_never_meet() -> None:
    names = ("a/b", "a~2Fb", "a%2Fb", "x?y#z", "[/red]", "..", "ü")
    groups = ClientGroups()
    ids = [groups.add(name, suffix="s") for name in names]
    assert len(set(ids)) == len(names)
    assert all(own.replace(":", "").replace("~", "").replace(".", "").isalnum() and own.isascii() for own in ids)
    groups.close(ids)
    for name in names:
        with pytest.raises(ConflictError):
            groups.find(name)


def test_names_of_closed_groups_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_groups, "REMEMBERED", 2)
    groups = ClientGroups()
    for number in range(4):
        groups.close([groups.add(f"mine-{number}", suffix="s")])
    assert groups.find("mine-0") is None
    with pytest.raises(ConflictError):
        groups.find("mine-3")
