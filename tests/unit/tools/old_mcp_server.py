"""An MCP server of the revision 2025-06-18 without any library, as there are many."""

from __future__ import annotations

import json
import sys
from typing import Any

TOOL = {
    "name": "echo",
    "description": "Say it again.",
    "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
}


def answer(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    if method == "initialize":
        info = {"name": "old", "version": "1"}
        return {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        text = params["arguments"]["text"]
        blocks = [{"type": "text", "text": text}, {"type": "image", "data": "AA==", "mimeType": "image/png"}]
        return {"content": blocks, "isError": text == "bad"}
    return None


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request:
            continue
        result = answer(request["method"], request.get("params", {}))
        reply: dict[str, Any] = {"jsonrpc": "2.0", "id": request["id"]}
        if result is not None:
            reply["result"] = result
        else:
            reply["error"] = {"code": -32601, "message": f"no method {request['method']}"}
        print(json.dumps(reply), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
