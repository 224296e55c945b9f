"""Requests generated from our own OpenAPI description, against a real control process: no 500, and no answer that
the description does not declare."""

from __future__ import annotations

import itertools
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from schemathesis import checks
from schemathesis.config import SchemathesisConfig

from bench.scripted_server import OPENER, ScriptedServer, scripted_server

pytestmark = pytest.mark.slow
SKIPPED = {("POST", "/api/stop"), ("GET", "/api/events")}
"""One ends the server, the other never ends."""
EXAMPLES, OF_MESSAGES = 15, 5
"""Of each operation; those of `/v1/messages` take long to make."""
CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    settings = {"server.begin_wait_s": 0.02, "server.retry_grace_s": 0.0, "server.idle_timeout_s": 3600.0}
    with scripted_server(tmp_path_factory.mktemp("openapi"), "fine", settings=settings, context_tokens=2048) as running:
        yield running


@pytest.fixture(scope="module")
def operations(server: ScriptedServer) -> dict[str, Any]:
    with OPENER.open(f"{server.url}/openapi.json", timeout=10) as answer:
        described = json.load(answer)
    schema = schemathesis.openapi.from_dict(described, config=SchemathesisConfig())
    found = {f"{op.method.upper()} {op.path}": op for op in (o.ok() for o in schema.get_all_operations())}
    found = dict(sorted(found.items(), key=lambda item: item[0] == "POST /api/keys"))  # the first ends the open mode
    return {name: op for name, op in found.items() if tuple(name.split(" ", 1)) not in SKIPPED}


def begin(server: ScriptedServer) -> dict[str, Any]:
    """An eval episode: these are always admitted."""
    body = {"idempotency_key": f"k{next(NUMBERS)}", "task": {"id": "t"}, "split": "eval"}
    request = urllib.request.Request(f"{server.url}/api/episodes", json.dumps(body).encode(), method="POST")
    with OPENER.open(request, timeout=10) as answer:
        return json.load(answer)


def test_every_operation_declares_its_errors(operations: dict[str, Any]) -> None:
    assert len(operations) > 25
    for name, operation in operations.items():
        declared = set(operation.definition.raw["responses"])
        assert {"200", "400", "401", "403", "404", "409", "413", "429", "500", "503"} <= declared, name


def attack(operation: Any, *, name: str, server: ScriptedServer, session: requests.Session) -> None:
    """Send what hypothesis makes of an operation; half of it to an episode that is open.  Raises what is wrong."""
    held = begin(server)

    @given(case=operation.as_strategy(), own=st.booleans())
    @hypothesis.settings(
        max_examples=OF_MESSAGES if "/v1/messages" in name else EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def send(case: Any, own: bool) -> None:
        if own and "episode_id" in (case.path_parameters or {}):
            case.path_parameters["episode_id"] = held["episode_id"]
        if own and "model" in (case.path_parameters or {}):
            case.path_parameters["model"] = "solver"
        if own and "/v1/" in name and isinstance(case.body, dict):
            case.body["model"] = "solver"
        headers = {"authorization": f"Bearer {held['api_key']}"} if "/v1/" in name else {}
        answer = case.call(base_url=server.url, session=session, headers=headers, timeout=20)
        assert answer.status_code != 500, answer.text
        case.validate_response(answer, checks=CHECKS)

    send()


def test_no_generated_request_breaks_the_server(server: ScriptedServer, operations: dict[str, Any]) -> None:
    failures: list[str] = []
    with requests.Session() as session:
        session.trust_env = False
        for name, operation in operations.items():
            try:
                attack(operation, name=name, server=server, session=session)
            except BaseExceptionGroup as group:
                failures.append(f"{name}: {group.exceptions[0]}")
            except Exception as error:  # noqa: BLE001 (all operations are tried, then all that broke are told)
                failures.append(f"{name}: {error}")
    log = Path(server.run_dir / "control.log").read_text()
    assert not failures, "\n\n".join([*failures, log[-4000:]])
    with OPENER.open(f"{server.url}/healthz", timeout=10) as answer:
        assert json.load(answer)["status"] == "ok"
    assert "unexpected" not in log, log[-4000:]
