"""README and docs say what is there: links, configuration examples, and the names that the reference pages list."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from wingbeat.cli.main import app
from wingbeat.core import errors
from wingbeat.core.config.load import validate_config
from wingbeat.core.types import Cause
from wingbeat.dataflow.records import DropReason
from wingbeat.server.calls.routes import ROUTES
from wingbeat.server.collect.routes import collect_routes
from wingbeat.server.http.routes_deployment import deployment_routes
from wingbeat.server.http.routes_episodes import episode_routes
from wingbeat.server.http.routes_run import run_routes
from wingbeat.server.http.routes_tasks import task_routes
from wingbeat.server.keys.routes import key_routes
from wingbeat.server.metrics import ControlMetrics
from wingbeat.server.resources.report_routes import resource_report_routes
from wingbeat.server.teams.routes import team_routes
from wingbeat.server.variants.routes import variant_routes
from wingbeat.server.weights.routes import weight_routes
from wingbeat.server.workers.routes import worker_routes

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")])
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", _text(page)), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(FENCE.sub("", _text(page))):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{_name(page)} links to {target}, and there is no {path}"
        if anchor:
            assert anchor in _anchors(linked), f"{_name(page)} links to {target}; headings: {sorted(_anchors(linked))}"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_configuration_examples_validate(page: Path) -> None:
    for language, block in FENCE.findall(_text(page)):
        if language != "toml":
            continue
        data: dict[str, Any] = tomllib.loads(block)
        data.setdefault("policies", {"solver": {}})
        for policy in data["policies"].values():
            policy.setdefault("model", "builtin:calculator")
        validate_config(data)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_python_examples_compile(page: Path) -> None:
    for language, block in FENCE.findall(_text(page)):
        if language == "python" and not block.rstrip().endswith(")\n    ..."):
            compile(block, _name(page), "exec")


def test_every_command_and_option_is_in_the_reference() -> None:
    page = _text(DOCS / "reference" / "cli.md")
    group: Any = get_command(app)
    for name, command in group.commands.items():
        assert f"`{name}`" in page, f"docs/reference/cli.md lacks the command {name}"
        parts = [command, *getattr(command, "commands", {}).values()]
        parameters = [parameter for part in parts for parameter in part.params]
        options = {option for parameter in parameters for option in parameter.opts if option.startswith("--")}
        section = re.split(r"^## ", page.partition(f"\n## wingbeat {name}")[2], flags=re.MULTILINE)[0]
        missing = sorted(option for option in options - {"--help"} if f"`{option}" not in section)
        assert not missing, f"docs/reference/cli.md, {name}, lacks {', '.join(missing)}"


def test_every_cause_is_in_the_reference() -> None:
    page = _text(DOCS / "reference" / "http-api.md")
    ends = page[page.index("#### How attempts end") :]
    assert [cause for cause in Cause if f"`{cause}`" not in ends] == []


def test_every_route_is_in_the_reference() -> None:
    page = _text(DOCS / "reference" / "http-api.md")
    lines = [f"`{route.method} {route.path}`" for route in ROUTES]
    unused: Any = None  # the routes are only listed here, never called
    makers = (
        deployment_routes,
        episode_routes,
        task_routes,
        run_routes,
        team_routes,
        variant_routes,
        collect_routes,
        worker_routes,
        weight_routes,
        resource_report_routes,
    )
    bound = [make(unused, unused) for make in makers]
    for router in (*bound, key_routes(unused)):
        for route in router.routes:
            lines += [f"`{method} {getattr(route, 'path_format', '')}`" for method in getattr(route, "methods", ())]
    missing = [line for line in lines if line not in page]
    assert not missing, f"docs/reference/http-api.md lacks {', '.join(missing)}"


def test_every_error_code_of_a_request_is_in_the_reference() -> None:
    page = _text(DOCS / "reference" / "http-api.md")
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, errors.WingbeatError)]
    codes = {kind.code for kind in kinds if not issubclass(kind, errors.SetupError)}
    missing = sorted(code for code in codes if f"`{code}`" not in page)
    assert not missing, f"docs/reference/http-api.md lacks {', '.join(missing)}"


def test_every_prometheus_metric_of_the_reference_exists() -> None:
    families = ControlMetrics().registry.collect()
    names = {f"{family.name}_total" if family.type == "counter" else family.name for family in families}
    documented = set(re.findall(r"`(wingbeat_\w+)`", _text(DOCS / "reference" / "metrics.md")))
    assert documented, "docs/reference/metrics.md lists no metric"
    assert documented <= names, f"docs/reference/metrics.md lists {', '.join(sorted(documented - names))}"


def test_every_reason_for_a_discard_is_in_the_reference() -> None:
    page = _text(DOCS / "reference" / "metrics.md")
    assert all(f"`discarded/{reason}`" in page for reason in DropReason), [*DropReason]
