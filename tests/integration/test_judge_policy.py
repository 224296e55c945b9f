"""A policy of a real server, leased as a judge: its calls are an episode that measures only."""

from __future__ import annotations

from harness import Api

from wingbeat.resources import Budgets, ModelSpec, ResourceFailed, Resources


async def test_a_leased_policy_answers_and_nothing_of_it_trains(api: Api) -> None:
    before = (await api.get("/api/status"))["open_episodes"]
    async with Resources(Budgets()) as pool:
        async with pool.lease(ModelSpec(url=api.url, policy="babbler", label="scoring")) as lease:
            reply = await lease.value.chat("is 2 even?", temperature=0, max_tokens=4)
            assert 1 <= reply.usage.completion_tokens <= 4 and reply.usage.prompt_tokens > 0
            assert str(await lease.value.chat("is 2 even?", temperature=0, max_tokens=4)) == str(reply)
            instance_episode = (await lease.value.request("GET", "/models")).json()["data"]
            assert [model["id"] for model in instance_episode] == ["babbler"]
        async with pool.lease(ModelSpec(url=api.url, policy="solver")) as lease:  # a policy that trains, live
            assert (await lease.value.chat("2 + 2 =", max_tokens=4)).usage.completion_tokens >= 1
        try:
            async with pool.lease(ModelSpec(url=api.url, policy="babbler", version=99, retry_budget_s=0)):
                raise AssertionError("no evaluation holds this version")
        except ResourceFailed as error:
            assert "'babbler@99' is not held" in error.message
    after = await api.get("/api/status")
    assert after["open_episodes"] == before and after["train_steps"] == 0
