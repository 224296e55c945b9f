"""A solver names the largest of three digits; a verifier lets its answer pass, or does not.

The solver earns 1 for a right answer that the verifier lets pass. The verifier earns 1 for each right
verdict. It judges the solver's answer and, apart from it, a decoy: a wrong answer of our own. Else, once the solver
is good, a verifier that always says yes would be right. The two kinds of judging are two agents of one policy, each
with a baseline of its own.
"""

from openai import AsyncOpenAI, DefaultAioHttpClient

import wingbeat

CONNECTIONS = AsyncOpenAI(base_url="http://unset", api_key="unset", http_client=DefaultAioHttpClient(), max_retries=14)
"""One connection pool for all episodes of this process; its retries bridge a restart of the server of a minute."""


@wingbeat.agent
async def solve(episode: wingbeat.Episode) -> dict[str, float]:
    task = episode.task.payload
    client = CONNECTIONS.with_options(base_url=episode.base_url, api_key=episode.api_key)

    async def ask(model: str, text: str) -> str:
        reply = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": text}], max_tokens=4
        )
        return (reply.choices[0].message.content or "").strip()

    answer = await ask(episode.model_for("solver"), task["question"])
    is_right = answer == task["answer"]
    verdict = await ask(episode.model_for("verifier", agent="answers"), f"{task['numbers']}:{answer}")
    on_decoy = await ask(episode.model_for("verifier", agent="decoys"), f"{task['numbers']}:{task['decoy']}")
    return {
        "solver": float(is_right and verdict == "yes"),
        "verifier:answers": float(verdict == ("yes" if is_right else "no")),
        "verifier:decoys": float(on_decoy == "no"),
    }
