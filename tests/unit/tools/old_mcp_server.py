"""An MCP server of the revision 2025-06-18 without any library, as there are many; starts in a moment."""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any


def tool(name: str, /, **properties: str) -> dict[str, Any]:
    kinds = {each: {"type": kind} for each, kind in properties.items()}
    schema = {"type": "object", "properties": kinds, "required": list(kinds)}
    return {"name": name, "description": f"Do {name}.", "inputSchema": schema}


TOOLS = [
    tool("echo", text="string"),
    tool("pid"),
    tool("wait", seconds="number"),
    tool("flood"),
    tool("greet", name="string", self="string"),
    tool("babble"),
    tool("variables"),
    tool("nonsense"),
]
BABBLE = b'Loading: 100%\n[1, 2]\n{}\nnull\n\ncaf\xe9\n{"jsonrpc": "2.0", "id": "of nobody", "result": {}}\n'
"""Standard output is the protocol's, and many a library prints to it."""


def called(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    if name == "wait":
        threading.Event().wait(arguments["seconds"])
    if name == "flood":
        print("x" * 1_000_000, file=sys.stderr)  # noqa: T201
    if name == "babble":
        sys.stdout.buffer.write(BABBLE)
    if name == "nonsense":
        return {"content": "no list"}
    texts = {"echo": arguments.get("text"), "pid": str(os.getpid()), "flood": "y" * 1_000_000}
    texts["variables"] = " ".join(os.environ)
    text = texts.get(name) or f"done {json.dumps(arguments)}"
    blocks = [{"type": "text", "text": text}]
    if name == "echo":
        blocks.append({"type": "image", "data": "AA==", "mimeType": "image/png"})
    return {"content": blocks, "isError": text == "bad"}


def answer(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    if method == "initialize":
        info = {"name": "old", "version": "1"}
        return {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":
        return {"tools": TOOLS}
    if method == "tools/call":
        return called(params["name"], params["arguments"])
    return None


def reply(request: dict[str, Any]) -> None:
    said: dict[str, Any] = {"jsonrpc": "2.0", "id": request["id"]}
    result = answer(request["method"], request.get("params", {}))
    if result is not None:
        said["result"] = result
    else:
        said["error"] = {"code": -32601, "message": f"no method {request['method']}"}
    sys.stdout.write(f"{json.dumps(said)}\n")
    sys.stdout.flush()


def main() -> None:
    print("old is there", file=sys.stderr, flush=True)  # noqa: T201
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request:
            threading.Thread(target=reply, args=(request,), daemon=True).start()


if __name__ == "__main__":
    main()
