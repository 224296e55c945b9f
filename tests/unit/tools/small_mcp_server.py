"""A real MCP server for the tests: ``small_mcp_server.py [http]``; over HTTP it prints its port first."""

from __future__ import annotations

import asyncio
import os
import socket
import sys

import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("small", log_level="CRITICAL")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def pid() -> int:
    """Tell the process id."""
    return os.getpid()


@server.tool()
async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()
def stumble() -> str:
    """Fail."""
    raise ToolError("stumbled: bad day")


@server.tool(name="files.read")
def files_read() -> str:
    """Have a name that OpenAI's API does not take."""
    return "read"


if os.environ.get("SMALL_CLASH"):

    @server.tool(name="files_read")
    def other_files_read() -> str:
        """Have a name that becomes that of the other one."""
        return "read"


def main() -> None:
    if sys.argv[1:] == ["http"]:
        listening = socket.create_server(("127.0.0.1", 0))
        print(listening.getsockname()[1], flush=True)  # noqa: T201
        config = uvicorn.Config(server.streamable_http_app(), log_level="critical")
        uvicorn.Server(config).run(sockets=[listening])
    else:
        print("small is there", file=sys.stderr, flush=True)  # noqa: T201
        server.run("stdio")


if __name__ == "__main__":
    main()
