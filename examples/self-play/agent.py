"""One game of matches: the policy `player` against `rival`, which is an older copy of it, or against chance.

`rival` is a policy that the server keeps (`snapshot_of` in config.toml). To the agent it is a model like any other.
"""

import random

from openai import AsyncOpenAI, DefaultAioHttpClient

import wingbeat

MOVES = (1, 2, 3)
CONNECTIONS = AsyncOpenAI(base_url="http://unset", api_key="unset", http_client=DefaultAioHttpClient(), max_retries=14)
"""One connection pool for all episodes of this process; its retries bridge a restart of the server of a minute."""


@wingbeat.agent
async def play(episode: wingbeat.Episode) -> dict[str, float]:
    game = episode.task.payload
    client = CONNECTIONS.with_options(base_url=episode.base_url, api_key=episode.api_key)

    async def ask(model: str, pile: int) -> int:
        """The matches that a model takes; 0 where it makes no legal move."""
        reply = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": f"{pile} left"}], max_tokens=3
        )
        move = (reply.choices[0].message.content or "").strip()
        return int(move) if move in ("1", "2", "3") and int(move) <= pile else 0

    pile, players_turn = game["pile"], game["begins"]
    while True:
        if players_turn or game["opponent"] == "rival":
            move = await ask(episode.model_for("player" if players_turn else "rival"), pile)
        else:
            move = random.choice([move for move in MOVES if move <= pile])
        if move == 0:  # whoever breaks the rules has lost
            return {"player": float(not players_turn)}
        pile -= move
        if pile == 0:
            return {"player": float(players_turn)}
        players_turn = not players_turn
