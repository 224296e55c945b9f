"""``mini-swe-agent``: its default agent in a local shell."""

from __future__ import annotations

from example import MAX_TOKENS, QUESTION, Setting, tell
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

setting = Setting()
model = LitellmModel(
    model_name=f"openai/{setting.model}",
    cost_tracking="ignore_errors",
    model_kwargs={"api_base": setting.base_url, "api_key": setting.api_key, "max_tokens": MAX_TOKENS},
)
agent = DefaultAgent(
    model,
    LocalEnvironment(timeout=10),
    system_template="You work in a shell.",
    instance_template="{{ task }}",
    step_limit=4,
)
ended = agent.run(QUESTION)
tell(f"{ended['exit_status']}: {ended['submission'].strip()}")
