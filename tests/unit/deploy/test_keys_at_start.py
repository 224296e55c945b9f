"""Keys and addresses at the start of a server: what is refused, and where plain keys go (nowhere but environments)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from wingbeat.core.config import Config, dump_toml, load_config
from wingbeat.core.config.load import validate_config
from wingbeat.core.errors import ConfigError, NotFoundError, SetupError
from wingbeat.core.keys import digest, hashed
from wingbeat.deploy.checks import check_exposure
from wingbeat.deploy.paths import absolute_paths
from wingbeat.deploy.run_keys import RunKeys, without_plain_keys
from wingbeat.deploy.training import agent_specs
from wingbeat.server.keys.file import KeyFile, NewKey
from wingbeat.server.keys.principals import Role

KEY = "a-plain-key-of-an-admin"


def config_of(folder: Path, **server: Any) -> Config:
    return validate_config(
        {
            "run": {"dir": str(folder / "runs")},
            "policies": {"solver": {"model": "builtin:calculator"}},
            "server": server,
            "agent": {"path": "agent.py"},
        }
    )


def test_beyond_loopback_an_admin_key_is_needed_from_wherever(tmp_path: Path) -> None:
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        check_exposure(config_of(tmp_path, host=host), tmp_path)
    for host in ("0.0.0.0", "::", "192.168.0.7", "train.lan"):
        with pytest.raises(ConfigError, match=r"reachable from other machines, .*`wingbeat keys create admin --file"):
            check_exposure(config_of(tmp_path, host=host), tmp_path)
    check_exposure(config_of(tmp_path, host="0.0.0.0", admin_key=KEY), tmp_path)
    check_exposure(config_of(tmp_path, host="0.0.0.0", admin_key=hashed(KEY)), tmp_path)
    file = KeyFile(tmp_path / "runs" / "keys.json")
    file.create(NewKey(Role.CLIENT))
    with pytest.raises(ConfigError, match="no admin key"):
        check_exposure(config_of(tmp_path, host="0.0.0.0"), tmp_path)
    file.create(NewKey(Role.ADMIN))
    check_exposure(config_of(tmp_path, host="0.0.0.0"), tmp_path)
    check_exposure(config_of(tmp_path / "else", host="0.0.0.0"), tmp_path, resume=tmp_path / "runs" / "old")
    file.path.write_text("damaged")
    with pytest.raises(SetupError, match=r"runs/keys\.json is damaged"):
        check_exposure(config_of(tmp_path), tmp_path)


def test_a_key_file_that_was_named_must_be_there(tmp_path: Path) -> None:
    """Else a typing error would open the server."""
    with pytest.raises(ConfigError, match=r"server\.keys_file: no file .*mine\.json"):
        check_exposure(config_of(tmp_path, keys_file="mine.json"), tmp_path)
    KeyFile(tmp_path / "mine.json").create(NewKey(Role.ADMIN))
    check_exposure(config_of(tmp_path, keys_file="mine.json", host="0.0.0.0"), tmp_path)
    made = absolute_paths(config_of(tmp_path, keys_file="mine.json", tls_cert="c.pem", tls_key="~/k.pem"), tmp_path)
    assert made.server.keys_file == str(tmp_path / "mine.json")
    assert made.server.tls_cert == str(tmp_path / "c.pem") and made.server.tls_key == str(Path.home() / "k.pem")


def test_a_server_does_not_open_because_its_key_file_is_gone(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    file = KeyFile(tmp_path / "runs" / "keys.json")
    with pytest.raises(NotFoundError):
        file.revoke("key-000000000000")
    check_exposure(config, tmp_path)
    file.create(NewKey(Role.ADMIN))
    file.path.unlink()
    with pytest.raises(SetupError, match=r"keys\.json is gone: restore it .* remove .*\.keys\.json\.lock"):
        check_exposure(config, tmp_path)
    file.create(NewKey(Role.ADMIN))
    check_exposure(config, tmp_path)


def test_configurations_show_no_key(tmp_path: Path) -> None:
    config = config_of(tmp_path, admin_key=KEY, worker_key="a-plain-key-of-workers")
    assert KEY not in repr(config) and KEY not in str(config.server)
    stored = without_plain_keys(config)
    text = dump_toml(stored)
    assert "a-plain-key" not in text and f'admin_key = "sha256:{digest(KEY)}"' in text
    (tmp_path / "config.toml").write_text(text)
    again = load_config(tmp_path / "config.toml")
    assert again.server == stored.server == again.server.without_keys()
    for wrong in ("short-key", "sha256:" + "ab" * 31, "sha256:" + "G" * 64):
        with pytest.raises(ConfigError) as caught:
            config_of(tmp_path, admin_key=wrong)
        assert wrong not in caught.value.message and "server.admin_key" in caught.value.message


def test_our_own_processes_get_keys_by_their_environment(tmp_path: Path) -> None:
    keys = RunKeys.new()
    own = {keys.admin, keys.worker, keys.client}
    assert len(own) == 3 and own.isdisjoint({RunKeys.new().admin}) and not any(key in repr(keys) for key in own)
    assert own.isdisjoint(keys.of_control.values()), "control has hashes"
    assert set(keys.of_control.values()) == {hashed(key) for key in own}
    assert list(keys.of_worker.values()) == [keys.worker]
    (spec,) = agent_specs(config_of(tmp_path, admin_key=KEY), url="http://here", key=keys.client, run_dir=tmp_path)
    assert spec.environment["WINGBEAT_KEY"] == keys.client
    assert not any(key in part for key in (*own, KEY) for part in spec.command)


@pytest.mark.parametrize(
    ("server", "told"),
    [
        ({"tls_cert": "c.pem"}, "`tls_key` is unset"),
        ({"tls_key": "k.pem"}, "`tls_cert` is unset"),
        ({"allowed_hosts": []}, "allowed_hosts"),
        ({"allowed_hosts": ["https://a.b"]}, "a name without port and scheme"),
        ({"allowed_hosts": ["*.a.b"]}, "a name without port and scheme"),
        ({"max_connections": 0}, "of at least 1"),
        ({"request_timeout_s": 0}, "above 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path: Path, server: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(tmp_path, **server)
    assert told in caught.value.message
