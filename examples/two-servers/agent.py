"""The solver and the verifier of `examples/two-policies`, each on a server of its own.

The solver earns 1 for a right answer that the verifier lets pass; the verifier 1 for each right verdict, on the
solver's answer and on a decoy. Both servers count the episode, or none does.
"""

from typing import Any

from openai import AsyncOpenAI, DefaultAioHttpClient

import wingbeat

CONNECTIONS = AsyncOpenAI(base_url="http://unset", api_key="unset", http_client=DefaultAioHttpClient(), max_retries=14)


async def ask(part: wingbeat.Episode, text: str, *, agent: str = "") -> str:
    client = CONNECTIONS.with_options(base_url=part.base_url, api_key=part.api_key)
    messages: Any = [{"role": "user", "content": text}]
    reply = await client.chat.completions.create(model=part.model_for(agent=agent), messages=messages, max_tokens=4)
    return (reply.choices[0].message.content or "").strip()


@wingbeat.agent
async def solve(episode: wingbeat.TeamEpisode) -> dict[str, Any]:
    task = episode.task.payload
    answer = await ask(episode["solver"], task["question"])
    is_right = answer == task["answer"]
    verdict = await ask(episode["verifier"], f"{task['numbers']}:{answer}", agent="answers")
    on_decoy = await ask(episode["verifier"], f"{task['numbers']}:{task['decoy']}", agent="decoys")
    return {
        "solver": float(is_right and verdict == "yes"),
        "verifier": {
            "verifier:answers": float(verdict == ("yes" if is_right else "no")),
            "verifier:decoys": float(on_decoy == "no"),
        },
    }
