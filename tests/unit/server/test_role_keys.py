"""Who is calling, and what a caller may do."""

from __future__ import annotations

from pathlib import Path

import pytest

from wingbeat.core.errors import AuthenticationError, PermissionDenied
from wingbeat.core.keys import digest_of, hashed, is_hashed
from wingbeat.server.keys.file import KeyFile, NewKey
from wingbeat.server.keys.principals import MAY_ADMINISTRATE, MAY_RUN_AGENTS, MAY_WORK, Principal, Role
from wingbeat.server.keys.ring import EPISODE_PREFIX, KeyRing, OwnKeys, bearer, digest, new_episode_key


class Clock:
    """A wall clock that tests set."""

    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def by(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({"authorization": "Bearer abc"}, "abc"),
        ({"authorization": "bearer  abc "}, "abc"),
        ({"authorization": "Basic abc", "x-api-key": "xyz"}, "xyz"),
        ({"authorization": "Bearer abc", "x-api-key": "xyz"}, "abc"),
        ({"authorization": "Bearer"}, ""),
        ({}, ""),
    ],
)
def test_the_key_of_a_request(headers: dict[str, str], key: str) -> None:
    assert bearer(headers) == key


def test_roles_are_told_apart() -> None:
    keys = KeyRing.of("admin-key", "worker-key", own=OwnKeys(client="agents-key"))
    assert keys.is_admin(by("admin-key")) and not keys.is_admin(by("worker-key")) and not keys.is_admin({})
    assert keys.is_worker(by("worker-key")) and not keys.is_worker(by("admin-key")) and not keys.is_worker({})
    assert keys.require(by("agents-key"), MAY_RUN_AGENTS).role is Role.CLIENT
    assert keys.principal({}, path_key="admin-key").role is Role.ADMIN
    assert keys.principal({"authorization": "Bearer dummy", "x-api-key": "admin-key"}).role is Role.ADMIN
    for headers, told in (
        ({}, "no API key: "),
        (by("another"), "wrong API key, it is a key that this server does not know: "),
        ({"x-api-key": "wb-ep-x"}, "wrong API key, it is the key of an episode: "),
    ):
        with pytest.raises(AuthenticationError) as caught:
            keys.require(headers, MAY_ADMINISTRATE)
        assert caught.value.message.startswith(told) and "this call needs an admin key" in caught.value.message
        assert "WINGBEAT_KEY or --key" in caught.value.message and "Swarm(url, key=KEY)" in caught.value.message
    for key, allowed, told in (
        ("agents-key", MAY_ADMINISTRATE, "needs an admin key, and yours is a client key"),
        ("worker-key", MAY_RUN_AGENTS, "needs a client key or an admin key, and yours is a worker key"),
        ("admin-key", MAY_WORK, "needs a worker key, and yours is an admin key"),
    ):
        with pytest.raises(PermissionDenied, match=told):
            keys.require(by(key), allowed)


def test_without_an_admin_key_everybody_administrates_but_nobody_is_a_worker() -> None:
    keys = KeyRing.of(None, "worker-key", own=OwnKeys(admin="supervisor", client="agents"))
    assert keys.is_open and keys.is_admin({}) and keys.is_admin(by("dummy"))
    assert not keys.is_worker({}) and not keys.is_worker(by("dummy"))
    with pytest.raises(PermissionDenied):  # a known key is held to its role
        keys.require(by("agents"), MAY_ADMINISTRATE)
    with pytest.raises(PermissionDenied):
        keys.require(by("worker-key"), MAY_RUN_AGENTS)


def test_a_hashed_key_works_and_its_hash_is_no_key() -> None:
    key = hashed("a key of an admin")
    assert is_hashed(key) and hashed(key) == key and digest_of(key) == digest("a key of an admin")
    keys = KeyRing.of(key, hashed("worker-key"))
    assert keys.is_admin(by("a key of an admin")) and keys.is_worker(by("worker-key"))
    assert not keys.is_admin(by(key)) and not keys.is_admin(by(digest_of(key)))


def test_keys_of_the_file_expire_and_are_revoked_while_the_server_runs(tmp_path: Path) -> None:
    clock = Clock()
    file = KeyFile(tmp_path / "keys.json", now=clock)
    keys = KeyRing.of("admin-key", "worker-key", file=file, now=clock)
    record, key = file.create(NewKey(Role.CLIENT, name="laptop", expires_s=60))
    with pytest.raises(AuthenticationError):
        keys.principal(by(key))
    keys.refresh()
    caller = keys.principal(by(key))
    assert (caller.role, caller.key_id, caller.name, caller.client("mine")) == (
        Role.CLIENT,
        record.id,
        "laptop",
        record.id,
    )
    assert Principal(Role.CLIENT).client(record.id) == f"~{record.id}", "nobody uses another key's quota up"
    assert Principal(Role.CLIENT).client("key-of-mine") == "key-of-mine"
    clock.now += 60
    with pytest.raises(AuthenticationError, match=rf"{record.id} \(laptop\) has expired"):
        keys.principal(by(key))
    clock.now -= 1
    keys.principal(by(key))
    file.revoke(record.id)
    keys.refresh()
    with pytest.raises(AuthenticationError, match="was revoked"):
        keys.require(by(key), MAY_RUN_AGENTS)


def test_a_file_that_could_not_be_read_is_read_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = KeyFile(tmp_path / "keys.json")
    record, key = file.create(NewKey(Role.CLIENT))
    keys = KeyRing.of("admin-key", "worker-key", file=file)
    file.revoke(record.id)

    def fail(path: Path) -> bytes:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as broken:
        broken.setattr(Path, "read_bytes", fail)
        keys.refresh()
        keys.refresh()
    assert keys.principal(by(key)).role is Role.CLIENT
    assert [entry.getMessage().count("Too many open files") for entry in caplog.records] == [1], "told once"
    keys.refresh()
    with pytest.raises(AuthenticationError, match="was revoked"):
        keys.principal(by(key))


def test_a_ring_that_closed_never_opens_again(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    keys = KeyRing.of(None, "worker-key", file=file)
    _, client = file.create(NewKey(Role.CLIENT))
    keys.refresh()
    assert keys.is_open and keys.is_admin({})
    record, admin = file.create(NewKey(Role.ADMIN))
    keys.refresh()
    assert not keys.is_open and not keys.is_admin({}) and keys.is_admin(by(admin))
    file.revoke(record.id)
    keys.refresh()
    assert not keys.is_open and not keys.is_admin({}) and not keys.is_admin(by(admin))
    file.path.write_text("{")
    keys.refresh()
    assert keys.principal(by(client)).role is Role.CLIENT, "a damaged file changes nothing"
    file.path.unlink()
    keys.refresh()
    assert not keys.is_open and not keys.is_admin({}), "neither does one that is gone open the server"
    file.create(NewKey(Role.ADMIN))
    assert not KeyRing.of(None, "worker-key", file=file).is_open
    file.revoke(file.read()[0].id)
    assert not KeyRing.of(None, "worker-key", file=file).is_open, "people wanted keys here"


def test_a_revoked_key_is_refused_in_an_open_server_too(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    record, key = file.create(NewKey(Role.CLIENT))
    file.revoke(record.id)
    keys = KeyRing.of(None, "worker-key", file=file)
    assert keys.is_open
    with pytest.raises(AuthenticationError, match="was revoked"):
        keys.require(by(key), MAY_ADMINISTRATE)


def test_only_digests_are_kept() -> None:
    keys = KeyRing.of("secret", "secret")
    assert "secret" not in repr(vars(keys))


def test_episode_keys_are_random_and_recognisable() -> None:
    keys = {new_episode_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith(EPISODE_PREFIX) and len(key) >= 32 for key in keys)
    assert digest("é") != digest("e")
