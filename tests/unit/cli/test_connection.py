"""One server, or the servers of a team, on the command line; and the example that has two."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from wingbeat.cli.connection import DEFAULT_URL, certificates_hints, keys_by_server, named_servers
from wingbeat.cli.run import reach
from wingbeat.client.agents import load_agent
from wingbeat.client.plans import RolloutPlan, connect, dump_plan, load_plan
from wingbeat.client.team import AsyncTeam
from wingbeat.core.config.load import validate_config
from wingbeat.core.errors import SetupError

EXAMPLE = Path(__file__).parents[3] / "examples" / "two-servers"


def test_one_server_or_several_with_names() -> None:
    assert named_servers(None) == (DEFAULT_URL, {})
    assert named_servers(["http://h:1"]) == ("http://h:1", {})
    assert named_servers(["http://h:1/?a=b"]) == ("http://h:1/?a=b", {})
    url, servers = named_servers(["west=https://w:1", "east=http://e:2"])
    assert url == "" and list(servers.items()) == [("west", "https://w:1"), ("east", "http://e:2")]


@pytest.mark.parametrize("given", [["http://a", "http://b"], ["a=http://a", "http://b"], ["a=http://a", "a=http://b"]])
def test_a_mixture_is_refused(given: list[str]) -> None:
    with pytest.raises(SetupError, match="expected one URL, or several different NAME=URL"):
        named_servers(given)


async def test_a_plan_of_several_servers_makes_a_team(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WINGBEAT_KEY_WEST_2", "of the west")
    servers = {"east": "http://e:1", "west-2": "http://w:1"}
    assert keys_by_server(servers) == {"west-2": "of the west"}
    plan = RolloutPlan("a.py", servers=servers, key="all", keys=keys_by_server(servers), journal=str(tmp_path / "j"))
    plan = load_plan(dump_plan(plan))
    async with connect(plan) as team:
        assert isinstance(team, AsyncTeam) and team.lead == "east"
        assert {name: swarm._transport.key for name, swarm in team.swarms.items()} == {
            "east": "all",
            "west-2": "of the west",
        }
    assert (tmp_path / "j").is_dir()


def test_the_example_of_two_servers_is_whole() -> None:
    configs = {name: tomllib.loads((EXAMPLE / f"{name}.toml").read_text()) for name in ("solver", "verifier")}
    lead, other = (validate_config(config) for config in configs.values())
    assert other.server.peers == [f"http://127.0.0.1:{lead.server.port}"]
    assert list(lead.policies) == ["solver"] and list(other.policies) == ["verifier"]
    assert load_agent(str(EXAMPLE / "agent.py")).is_async


def test_who_trusts_a_certificate_for_wingbeat_alone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's SDK would try for minutes, and say nothing but "Connection error"."""
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.delenv("WINGBEAT_CA_FILE", raising=False)
    assert certificates_hints(["https://h:1"]) == ()
    monkeypatch.setenv("WINGBEAT_CA_FILE", "cert.pem")
    assert certificates_hints(["http://h:1"]) == ()
    (hint,) = certificates_hints(["http://h:1", "https://h:1"])
    assert "SSL_CERT_FILE is not" in hint
    monkeypatch.setenv("SSL_CERT_FILE", "cert.pem")
    assert certificates_hints(["https://h:1"]) == ()


@pytest.mark.parametrize(
    ("url", "names", "reach_of_it"),
    [
        ("http://127.0.0.1:8321", [], ("on this machine", "http://127.0.0.1:8321")),
        ("https://0.0.0.0:1", ["localhost", "train.lan"], ("from any machine", "https://train.lan:1")),
        ("http://0.0.0.0:1", [], ("from any machine", "http://HOST:1")),
        ("http://[::]:1", [], ("from any machine", "http://HOST:1")),
        ("http://10.0.0.7:1", ["train.lan"], ("from any machine", "http://10.0.0.7:1")),
    ],
)
def test_serve_says_how_it_can_be_called(url: str, names: list[str], reach_of_it: tuple[str, str]) -> None:
    assert reach(url, names) == reach_of_it
