"""Who is calling."""

from __future__ import annotations

import pytest

from wingbeat.core.errors import AuthenticationError
from wingbeat.server.keys import EPISODE_PREFIX, RoleKeys, bearer, digest, new_episode_key


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
    keys = RoleKeys.of("admin-key", "worker-key")
    admin, worker = {"authorization": "Bearer admin-key"}, {"authorization": "Bearer worker-key"}
    assert keys.is_admin(admin) and not keys.is_admin(worker) and not keys.is_admin({})
    assert keys.is_worker(worker) and not keys.is_worker(admin) and not keys.is_worker({})
    keys.require_admin(admin)
    for headers, told in (
        ({}, "no API key: "),
        (worker, "wrong API key, it is another key than server.admin_key: "),
        ({"x-api-key": "wb-ep-x"}, "wrong API key, it is the key of an episode: "),
    ):
        with pytest.raises(AuthenticationError) as caught:
            keys.require_admin(headers)
        assert caught.value.message.startswith(told + "this call needs the server's admin key")
        assert "WINGBEAT_KEY or --key" in caught.value.message and "Swarm(url, key=KEY)" in caught.value.message


def test_without_an_admin_key_everybody_administrates_but_nobody_is_a_worker() -> None:
    keys = RoleKeys.of(None, "worker-key")
    assert keys.is_admin({})
    assert not keys.is_worker({})


def test_only_digests_are_kept() -> None:
    assert "secret" not in repr(RoleKeys.of("secret", "secret"))


def test_episode_keys_are_random_and_recognisable() -> None:
    keys = {new_episode_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith(EPISODE_PREFIX) and len(key) >= 32 for key in keys)
    assert digest("é") != digest("e")
