"""Tools: what a model may call, with schemas, time limits, state for each episode, and resources.

    from wingbeat.tools import Toolbox, tool

    @tool
    def add(a: int, b: int) -> int:
        "Add two whole numbers."
        return a + b

    toolbox = Toolbox([add])

Importing this package loads no torch, no openai and no mcp.
"""

from wingbeat.tools.boxes import file_tools, python_tool, shell_tool
from wingbeat.tools.calculator import calculator
from wingbeat.tools.corpus import Corpus, Document, Hit, corpus_read, corpus_search, read_documents
from wingbeat.tools.judging import Judge, JudgeFailed, Verdict, judge, judge_tool
from wingbeat.tools.loop import Stopped, ToolRun, run_tools
from wingbeat.tools.mcp_servers import mcp_tools
from wingbeat.tools.results import Fault, ToolError, ToolRefused, ToolResult, ToolUnavailable
from wingbeat.tools.tool import Tool, ToolOptions, tool
from wingbeat.tools.toolbox import EpisodeTools, Toolbox

__all__ = [
    "Corpus",
    "Document",
    "EpisodeTools",
    "Fault",
    "Hit",
    "Judge",
    "JudgeFailed",
    "Stopped",
    "Tool",
    "ToolError",
    "ToolOptions",
    "ToolRefused",
    "ToolResult",
    "ToolRun",
    "ToolUnavailable",
    "Toolbox",
    "Verdict",
    "calculator",
    "corpus_read",
    "corpus_search",
    "file_tools",
    "judge",
    "judge_tool",
    "mcp_tools",
    "python_tool",
    "read_documents",
    "run_tools",
    "shell_tool",
    "tool",
]
