"""The key file: what is at rest, what is refused, and several programs that change it at once."""

from __future__ import annotations

import json
import stat
import threading
from pathlib import Path

import pytest

from wingbeat.core.errors import NotFoundError, RequestError, SetupError
from wingbeat.server.keys.file import KeyFile, NewKey, key_file_path
from wingbeat.server.keys.principals import Role


def test_only_digests_are_at_rest_and_only_for_the_owner(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "deep" / "keys.json")
    assert file.read() == () and file.stamp() is None
    made = [file.create(NewKey(role, name=f"of {role}")) for role in Role]
    for (record, key), role in zip(made, Role, strict=True):
        assert key.startswith(f"wb-{role}-") and len(key.removeprefix(f"wb-{role}-")) == 32, "192 bits"
        assert key not in file.path.read_text() and record.digest in file.path.read_text()
    assert len({key for _, key in made}) == len(Role)
    assert file.read() == tuple(record for record, _ in made)
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in file.path.parent.iterdir())


def test_a_change_is_seen_by_its_stamp(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json", now=lambda: 5.0)
    record, _ = file.create(NewKey(Role.COLLECT, train=True, policies=("solver",)))
    stamp = file.stamp()
    revoked = file.revoke(record.id)
    assert file.stamp() != stamp and revoked.state(5.0) == "revoked"
    stamp = file.stamp()
    assert file.revoke(record.id) == revoked and file.stamp() == stamp, "a second time changes nothing"
    assert revoked.principal.train and revoked.principal.policies == ("solver",)
    with pytest.raises(NotFoundError, match="wingbeat keys list"):
        file.revoke("key-000000000000")


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (NewKey(Role.CLIENT, train=True), "are of collect keys"),
        (NewKey(Role.WORKER, policies=("solver",)), "are of collect keys"),
        (NewKey(Role.ADMIN, record=False), "are of collect keys"),
        (NewKey(Role.COLLECT, train=True, record=False), "what is not recorded cannot train"),
        (NewKey(Role.CLIENT, expires_s=0), "above 0"),
        (NewKey(Role.CLIENT, expires_s=float("nan")), "above 0"),
        (NewKey(Role.CLIENT, expires_s=float("inf")), "above 0"),
        (NewKey(Role.CLIENT, name="a/b"), "without a slash"),
        (NewKey(Role.CLIENT, name="x" * 65), "at most 64"),
        (NewKey(Role.CLIENT, name="a\nb"), "printable"),
    ],
)
def test_what_does_not_fit_is_refused(wanted: NewKey, told: str, tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    with pytest.raises(RequestError, match=told):
        file.create(wanted)
    assert file.read() == ()


def test_asked_over_http_it_is_the_same_key() -> None:
    for wanted in (
        NewKey(Role.CLIENT, name="laptop", expires_s=60.0),
        NewKey(Role.COLLECT, train=True, policies=("solver", "judge")),
        NewKey(Role.COLLECT, record=False),
    ):
        assert NewKey.of(wanted.request()) == wanted
    with pytest.raises(RequestError, match=r"`name`: .* at most 64 characters"):
        NewKey(Role.CLIENT, name="x" * 65).request()


def test_a_damaged_file_is_refused_by_its_name(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    file.create(NewKey(Role.ADMIN))
    good = json.loads(file.path.read_text())
    secret = "wb-admin-somebody-put-a-plain-key-here"
    broken = [
        "",
        "{",
        "[]",
        json.dumps(good | {"more": 1}),
        json.dumps(good | {"format": 2}),
        json.dumps({"format": 1, "keys": [{**good["keys"][0], "digest": secret}]}),
        json.dumps({"format": 1, "keys": [{**good["keys"][0], "role": "root"}]}),
        file.path.read_text()[:-20],
    ]
    for text in broken:
        file.path.write_text(text)
        with pytest.raises(SetupError, match=r"keys\.json") as caught:
            file.read()
        assert secret not in caught.value.message
        with pytest.raises(SetupError):
            file.create(NewKey(Role.CLIENT))
        assert file.path.read_text() == text, "nothing is written over it"
    file.path.unlink()
    file.path.mkdir()
    with pytest.raises(SetupError, match="cannot read the key file"):
        file.read()


def test_programs_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    """Each has an object of its own, as programs would; the lock is the file's."""
    path = tmp_path / "keys.json"
    threads = [
        threading.Thread(target=lambda: [KeyFile(path).create(NewKey(Role.CLIENT)) for _ in range(5)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(KeyFile(path).read()) == 20


def test_where_it_is() -> None:
    assert key_file_path(None, runs=Path("/a/runs")) == Path("/a/runs/keys.json")
    assert key_file_path("/b/k.json", runs=Path("/a/runs")) == Path("/b/k.json")
    assert key_file_path("k.json", runs=Path("/a/runs"), folder=Path("/c")) == Path("/c/k.json")
