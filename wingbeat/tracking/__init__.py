"""Token truth: messages to tokens, the token graph of an episode, and its timelines as training samples.

The server owns token ids; text only selects a lineage. Loads neither torch nor transformers.
"""

from wingbeat.tracking.graph import EpisodeGraph
from wingbeat.tracking.messages import Message, ToolCall, parse_message, parse_messages
from wingbeat.tracking.parsing import Reply, parse_reply
from wingbeat.tracking.serialize import dump_graph, dump_turn, load_graph, load_turns
from wingbeat.tracking.template import ChatTemplate, ToolFormat
from wingbeat.tracking.timelines import build_samples, count_untrainable, timelines
from wingbeat.tracking.tools import digest_tools
from wingbeat.tracking.turns import PromptPlan, Turn, TurnKind

__all__ = [
    "ChatTemplate",
    "EpisodeGraph",
    "Message",
    "PromptPlan",
    "Reply",
    "ToolCall",
    "ToolFormat",
    "Turn",
    "TurnKind",
    "build_samples",
    "count_untrainable",
    "digest_tools",
    "dump_graph",
    "dump_turn",
    "load_graph",
    "load_turns",
    "parse_message",
    "parse_messages",
    "parse_reply",
    "timelines",
]
