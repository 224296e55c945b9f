"""Endpoints: which address is asked, what is tried again, what it costs, and what a caller may not ask for."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import conformance
import pytest
import trustme
from aiohttp import web

from wingbeat.core.errors import ConfigError, RequestError
from wingbeat.resources import Budgets, EndpointSpec, Needs, ResourceFailed, Resources, ResourceWait
from wingbeat.resources.backends import endpoint_http
from wingbeat.resources.backends.endpoint import Endpoint, EndpointBackend
from wingbeat.resources.backends.endpoint_usage import Usage, usage_of

KEY = "sk-very-secret"


def completion(text: str = "yes", *, prompt: int = 10, said: int = 5) -> dict[str, Any]:
    return {
        "model": "judge-7b",
        "choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": said},
    }


class Judge:
    """A server whose answers a test decides; by default it says yes."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, dict[str, str], Any]] = []
        self.answers: list[web.Response | Callable[[], Awaitable[web.Response]]] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.requests.append((request.method, request.path, headers, json.loads(body) if body else None))
        answer = self.answers.pop(0) if self.answers else web.json_response(completion())
        return answer if isinstance(answer, web.Response) else await answer()


@asynccontextmanager
async def serving(count: int = 1, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[list[Judge]]:
    judges, runners = [], []
    for _ in range(count):
        judge = Judge()
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", judge.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        judge.url = f"http{'' if tls is None else 's'}://127.0.0.1:{runner.addresses[0][1]}/v1"
        judges.append(judge)
        runners.append(runner)
    try:
        yield judges
    finally:
        for runner in runners:
            await runner.cleanup()


@asynccontextmanager
async def leasing(spec: EndpointSpec, budgets: Budgets | None = None) -> AsyncIterator[Endpoint]:
    backends = {"endpoint": EndpointBackend(rng=random.Random(1))}
    async with Resources(budgets or Budgets(), backends=backends) as pool, pool.lease(spec) as lease:
        yield lease.value


def spec_of(*judges: Judge, **more: Any) -> EndpointSpec:
    return EndpointSpec(urls=tuple(judge.url for judge in judges), model="judge", **more)


def dead_url() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}/v1"


async def test_chat_asks_the_model_with_the_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    async with serving() as [judge], leasing(spec_of(judge, api_key_env="JUDGE_KEY")) as endpoint:
        reply = await endpoint.chat("is 2 even?", temperature=0)
        assert (str(reply), reply.finish_reason, reply.model) == ("yes", "stop", "judge-7b")
        assert reply.usage.total_tokens == 15
        [(method, path, headers, body)] = judge.requests
    assert (method, path) == ("POST", "/v1/chat/completions")
    assert headers["authorization"] == f"Bearer {KEY}"
    assert body == {"model": "judge", "messages": [{"role": "user", "content": "is 2 even?"}], "temperature": 0}


async def test_a_request_gets_the_answer_whatever_its_status() -> None:
    async with serving() as [search], leasing(spec_of(search)) as endpoint:
        search.answers = [web.json_response({"hits": [1]}, status=404)]
        reply = await endpoint.request("get", "/search?q=a%2Fb", headers={"x-trace": "1"})
        assert (reply.status, reply.ok, reply.json()) == (404, False, {"hits": [1]})
        assert search.requests[0][:2] == ("GET", "/v1/search") and search.requests[0][2]["x-trace"] == "1"


async def test_a_request_goes_to_the_address_with_the_fewest_in_flight() -> None:
    async with serving(2) as [slow, quick], leasing(spec_of(slow, quick)) as endpoint:
        arrived, done = asyncio.Event(), asyncio.Event()

        async def wait() -> web.Response:
            arrived.set()
            await done.wait()
            return web.json_response(completion())

        slow.answers, quick.answers = [wait], [wait]
        first = asyncio.create_task(endpoint.chat("1"))
        await arrived.wait()
        busy, free = (slow, quick) if slow.requests else (quick, slow)
        free.answers = []
        for _ in range(4):
            await endpoint.chat("2")
        assert (len(busy.requests), len(free.requests)) == (1, 4)
        done.set()
        await first


async def test_with_all_places_taken_requests_wait_their_turn_and_one_that_leaves_gives_way() -> None:
    async with serving() as [judge], leasing(spec_of(judge, max_concurrent=1)) as endpoint:
        arrived, done = asyncio.Event(), asyncio.Event()

        async def wait() -> web.Response:
            arrived.set()
            await done.wait()
            return web.json_response(completion())

        judge.answers = [wait]
        tasks = [asyncio.create_task(endpoint.chat("0"))]
        await arrived.wait()
        for number in "123":
            tasks.append(asyncio.create_task(endpoint.chat(number)))
            await asyncio.sleep(0)
        tasks[1].cancel()
        done.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [body["messages"][0]["content"] for *_, body in judge.requests] == ["0", "2", "3"]


async def test_a_cancelled_request_frees_its_place() -> None:
    async with serving() as [judge], leasing(spec_of(judge, max_concurrent=1)) as endpoint:
        arrived = asyncio.Event()

        async def hang() -> web.Response:
            arrived.set()
            await asyncio.sleep(30)
            raise AssertionError

        judge.answers = [hang]
        hanging = asyncio.create_task(endpoint.chat("0"))
        await arrived.wait()
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)
        assert str(await endpoint.chat("1")) == "yes"


async def test_an_address_that_asks_to_be_left_alone_is_and_another_is_asked_at_once() -> None:
    refusal = web.json_response({}, status=429, headers={"Retry-After": "3600"})
    async with serving(2) as [one, other], leasing(spec_of(one, other)) as endpoint:
        one.answers = [refusal]
        for _ in range(3):
            await endpoint.chat("x")
        assert (len(one.requests), len(other.requests)) == (1, 3)


async def test_a_refusal_is_waited_for_where_there_is_time_and_else_told_at_once() -> None:
    async with serving() as [judge]:
        async with leasing(spec_of(judge)) as endpoint:
            judge.answers = [web.Response(status=429, headers={"Retry-After": "0.01"})]
            await endpoint.chat("x")
            assert len(judge.requests) == 2
        async with leasing(spec_of(judge, retry_budget_s=5)) as endpoint:
            judge.answers = [web.Response(status=429, text="come later", headers={"Retry-After": "60"})]
            with pytest.raises(ResourceFailed, match="no address may be tried for the next"):
                await endpoint.chat("x")


async def test_an_address_that_may_be_asked_again_at_once_is_not_asked_without_a_pause() -> None:
    async with serving() as [judge], leasing(spec_of(judge, retry_budget_s=0.3)) as endpoint:
        judge.answers = [web.Response(status=429, headers={"Retry-After": "0"}) for _ in range(500)]
        with pytest.raises(ResourceFailed):
            await endpoint.chat("x")
        assert len(judge.requests) < 20


async def test_a_refusal_that_time_does_not_change_is_told_at_once() -> None:
    spent = web.json_response({"error": {"code": "insufficient_quota", "message": "pay first"}}, status=429)
    async with serving() as [judge], leasing(spec_of(judge)) as endpoint:
        judge.answers = [spent]
        with pytest.raises(ResourceFailed, match="pay first"):
            await endpoint.chat("x")
        assert str(await endpoint.chat("x")) == "yes" and len(judge.requests) == 2


@pytest.mark.parametrize("status", [500, 502, 503, 504])
async def test_a_fault_of_the_server_is_tried_again(status: int) -> None:
    async with serving() as [judge], leasing(spec_of(judge)) as endpoint:
        judge.answers = [web.Response(status=status)]
        assert str(await endpoint.chat("x")) == "yes"
        assert len(judge.requests) == 2


async def test_what_may_have_been_acted_on_is_not_sent_again() -> None:
    async with serving() as [judge], leasing(spec_of(judge, request_timeout_s=0.05)) as endpoint:

        async def hang() -> web.Response:
            await asyncio.sleep(0.2)
            raise AssertionError

        for answer in (web.Response(status=500, text="boom"), hang):
            judge.answers = [answer]
            with pytest.raises(ResourceFailed, match="not sent again"):
                await endpoint.request("POST", "/orders", json={"n": 1})
        assert len(judge.requests) == 2
        judge.answers = [web.Response(status=503)]  # as proxies say whose server broke off, having acted or not
        with pytest.raises(ResourceFailed, match="not sent again"):
            await endpoint.request("POST", "/orders", json={})
        judge.answers = [web.Response(status=503, headers={"Retry-After": "0"})]
        assert (await endpoint.request("POST", "/orders", json={})).ok  # it said that it did not act
        judge.answers = [web.Response(status=500)]
        assert (await endpoint.request("POST", "/orders", json={}, repeatable=True)).ok


async def test_tries_end_with_their_time_and_say_what_they_saw() -> None:
    async with leasing(EndpointSpec(urls=(dead_url(),), retry_budget_s=0.3, breaker_failures=100)) as endpoint:
        with pytest.raises(ResourceFailed, match=r"POST /chat/completions: no answer after .*127\.0\.0\.1"):
            await endpoint.chat("x")


async def test_a_dead_address_is_left_alone_and_comes_back_by_one_request() -> None:
    now = 0.0
    backend = EndpointBackend(clock=lambda: now)
    async with serving(2) as [ill, well]:
        spec = spec_of(ill, well, breaker_failures=2, breaker_s=30, retry_budget_s=0)
        instance = await backend.start(spec, started=lambda handle: None)
        endpoint = instance.value
        ill.answers = [web.Response(status=500) for _ in range(3)]
        outcomes = await asyncio.gather(*(endpoint.chat("x") for _ in range(4)), return_exceptions=True)
        assert sum(isinstance(outcome, ResourceFailed) for outcome in outcomes) == 2
        for _ in range(4):
            await endpoint.chat("x")
        assert len(ill.requests) == 2
        now = 31.0
        outcomes = await asyncio.gather(*(endpoint.chat("x") for _ in range(3)), return_exceptions=True)
        assert len(ill.requests) == 3 and sum(isinstance(outcome, ResourceFailed) for outcome in outcomes) == 1
        now = 62.0
        for _ in range(4):
            await endpoint.chat("x")
        assert len(ill.requests) > 4
        await instance.close()


async def test_where_all_addresses_are_left_alone_nobody_waits() -> None:
    async with serving() as [judge]:
        spec = spec_of(judge, breaker_failures=1, breaker_s=1000, retry_budget_s=5)
        async with leasing(spec) as endpoint:
            judge.answers = [web.Response(status=500)]
            with pytest.raises(ResourceFailed, match=r"\(open\)"):
                await endpoint.chat("x")
            with pytest.raises(ResourceFailed, match=r"\(open\)"):
                await endpoint.chat("x")
            assert len(judge.requests) == 1


async def test_certificates_are_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    async with serving(tls=context) as [judge]:
        async with leasing(spec_of(judge)) as endpoint:
            with pytest.raises(ResourceFailed, match="WINGBEAT_CA_FILE"):
                await endpoint.chat("x")
        monkeypatch.setenv("WINGBEAT_CA_FILE", str(tmp_path / "ca.pem"))
        async with leasing(spec_of(judge)) as endpoint:
            assert str(await endpoint.chat("x")) == "yes"


async def test_redirects_are_not_followed() -> None:
    async with serving(2) as [judge, inner], leasing(spec_of(judge)) as endpoint:
        judge.answers = [web.Response(status=307, headers={"Location": inner.url})]
        with pytest.raises(ResourceFailed, match="redirects are not followed"):
            await endpoint.chat("x")
        assert inner.requests == []


@pytest.mark.parametrize(
    "path",
    [
        "chat",
        "//evil/x",
        "/../admin",
        "/a/%2e%2e/b",
        "/a/..\\b",
        "/a b",
        "/a\r\nHost: x",
        "/a#b",
        "@evil",
        "",
        "/a/..;/b",
    ],
)
async def test_a_path_cannot_leave_the_address(path: str) -> None:
    async with serving() as [judge], leasing(spec_of(judge)) as endpoint:
        with pytest.raises(RequestError):
            await endpoint.request("GET", path)
        assert judge.requests == []


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer mine"},
        {"host": "evil"},
        {"x": "a\r\nHost: b"},
        {"Host:x": "b"},
        {" host": "b"},
        {"": "b"},
    ],
)
async def test_headers_that_are_not_the_caller_s_are_refused(headers: dict[str, str]) -> None:
    async with leasing(EndpointSpec(urls=("http://127.0.0.1:1/v1",))) as endpoint:
        with pytest.raises(RequestError, match="headers"):
            await endpoint.request("GET", "/x", headers=headers)


async def test_a_key_is_in_no_message_even_if_the_server_quotes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    async with serving() as [judge]:
        spec = spec_of(judge, api_key_env="JUDGE_KEY", retry_budget_s=0)
        async with leasing(spec) as endpoint:
            for status, kind in ((401, ResourceFailed), (400, RequestError), (500, ResourceFailed)):
                judge.answers = [web.Response(status=status, text=f"bad key {KEY}")]
                with pytest.raises(kind, match=r"bad key \*\*\*") as caught:
                    await endpoint.chat("x")
                assert KEY not in str(caught.value)
            judge.answers = [web.Response(status=401, text=f"{'x' * 292} {KEY}")]  # the quotation ends within it
            with pytest.raises(ResourceFailed) as caught:
                await endpoint.chat("x")
            assert KEY[:5] not in str(caught.value)
            judge.answers = [web.Response(status=403, text=f"bad key {KEY}")]
            with pytest.raises(ResourceFailed, match=r"expected JSON, got 'bad key \*\*\*'"):
                (await endpoint.request("GET", "/x")).json()
        assert KEY not in repr(spec)


async def test_a_missing_key_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ConfigError, match="environment variable JUDGE_KEY, found nothing"):
        async with leasing(EndpointSpec(urls=("http://127.0.0.1:1",), api_key_env="JUDGE_KEY")):
            raise AssertionError


@pytest.mark.parametrize(
    "url",
    ["ftp://x/", "https://user:pass@host/v1", "http://", "http://h/v1?key=1", "http://h:99999", "x", "http://h/ v"],
)
def test_urls_are_addresses_without_secrets(url: str) -> None:
    with pytest.raises(ConfigError, match="urls: expected"):
        EndpointSpec(urls=(url,))


@pytest.mark.parametrize("answer", ["", "[]", '{"choices": []}', '{"choices": [{"message": {"content": [1]}}]}'])
async def test_what_is_no_completion_is_a_failure_of_infrastructure(answer: str) -> None:
    async with serving() as [judge], leasing(spec_of(judge)) as endpoint:
        judge.answers = [web.Response(text=answer)]
        with pytest.raises(ResourceFailed, match="expected"):
            await endpoint.chat("x")
    with pytest.raises(RequestError):
        await endpoint.chat("x", n=2)


async def test_an_answer_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_http, "MAX_REPLY_BYTES", 1000)
    async with serving() as [judge], leasing(spec_of(judge)) as endpoint:
        judge.answers = [web.Response(text="x" * 100_000)]
        with pytest.raises(ResourceFailed, match="at most 1000 bytes"):
            await endpoint.request("GET", "/x")
        assert (await endpoint.chat("x")).text == "yes"


async def test_costs_are_what_the_replies_say_they_used_and_a_spent_budget_is_a_failure() -> None:
    budgets = Budgets(cost={"judging": 0.05})
    async with serving() as [judge]:
        spec = spec_of(judge, prompt_price=1.0, completion_price=2.0, budget="judging")
        async with leasing(spec, budgets) as endpoint:
            reply = await endpoint.chat("x")
            assert reply.cost == pytest.approx(0.02)  # 10 tokens at 1 a thousand, 5 at 2
            judge.answers = [web.json_response(completion(prompt=10, said=15))]
            await endpoint.chat("x")
            with pytest.raises(ResourceFailed, match="judging"):
                await endpoint.chat("x")
            assert len(judge.requests) == 2


async def test_the_pool_tells_what_an_endpoint_cost() -> None:
    async with serving() as [judge], Resources(Budgets()) as pool:
        async with pool.lease(spec_of(judge, prompt_price=1.0)) as lease:
            await lease.value.chat("x")
        assert sum(stats.cost for stats in pool.snapshot()) == pytest.approx(0.01)


async def test_tokens_a_minute_are_those_that_were_used() -> None:
    now = 0.0
    backend = EndpointBackend(clock=lambda: now)
    async with serving() as [judge]:
        spec = spec_of(judge, tokens_per_minute=600, queue_s=0.05, retry_budget_s=0)
        instance = await backend.start(spec, started=lambda handle: None)
        judge.answers = [web.json_response(completion(prompt=10, said=5))]
        await instance.value.chat("x", max_tokens=10_000)  # allowed, and not used: given back
        judge.answers = [web.json_response(completion(prompt=10, said=900))]
        await instance.value.chat("x")
        with pytest.raises(ResourceWait, match="raise queue_s or a limit"):
            await instance.value.chat("x")
        now = 60.0
        await instance.value.chat("x")
        await instance.close()


def test_counts_that_no_model_can_have_are_not_owed() -> None:
    for told in ({"prompt_tokens": 10**15}, {"completion_tokens": -1}, {"prompt_tokens": True}, {"prompt_tokens": 1e3}):
        assert usage_of({"usage": told}) is None
    assert usage_of({"usage": {"input_tokens": 3, "output_tokens": None}}) == Usage(3, 0)


async def test_requests_a_minute_are_of_all_leases_together_and_outlast_an_idle_instance() -> None:
    backend = EndpointBackend(clock=lambda: 0.0)
    async with serving() as [judge]:
        spec = spec_of(judge, requests_per_minute=2, queue_s=0.05)
        for _ in range(2):
            instance = await backend.start(spec, started=lambda handle: None)
            await instance.value.chat("x")
            await instance.close()
        instance = await backend.start(spec, started=lambda handle: None)
        with pytest.raises(ResourceWait):
            await instance.value.chat("x")
        await instance.close()


async def test_who_waits_at_an_endpoint_that_closes_is_told() -> None:
    async with serving() as [judge]:
        instance = await EndpointBackend().start(spec_of(judge, max_concurrent=1), started=lambda handle: None)
        arrived = asyncio.Event()

        async def hang() -> web.Response:
            arrived.set()
            await asyncio.sleep(0.2)
            return web.json_response(completion())

        judge.answers = [hang]
        tasks = [asyncio.create_task(instance.value.chat(n)) for n in "01"]
        await arrived.wait()
        await instance.close()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, ResourceFailed) for end in ends), ends


async def test_a_budget_that_the_pool_lacks_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="judging"):
        async with leasing(EndpointSpec(urls=("http://127.0.0.1:1",), budget="judging")):
            raise AssertionError


@pytest.mark.parametrize("check", conformance.ALL, ids=conformance.name_of)
async def test_endpoints_conform(check: conformance.Check) -> None:
    async def use(value: Endpoint) -> None:
        assert str(await value.chat("x")) == "yes"

    async with serving() as [judge]:
        case = conformance.Case(
            backend=EndpointBackend,
            spec=spec_of(judge),
            num_alive=lambda: 0,
            refused=spec_of(judge, needs=Needs(gpus=1)),
            refused_field="needs.gpus",
            use=use,
        )
        await check(case)
