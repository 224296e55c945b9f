"""``mini-swe-agent``: a shell agent over litellm, without streaming."""

from __future__ import annotations

from kit import Clients

REPLIES = (
    '<think>\nI should add.\n</think>\n\nLet me add.\n\n<tool_call>\n{"name": "bash", "arguments":'
    ' {"command":  "echo $((2 + 3))"}}\n</tool_call>',
    '<tool_call>\n{"name": "bash", "arguments": {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo 5"}}'
    "\n</tool_call>",
)


def test_a_command_is_run_and_its_output_continues_the_tokens(clients: Clients) -> None:
    episode = clients.check_continued("mini_swe_agent", "chat", replies=REPLIES, answer="Submitted: 5")
    assert "<output>\n5\n</output>" in episode.calls[1].prompt
