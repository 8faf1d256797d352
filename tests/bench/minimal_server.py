"""The SDK's smallest server on stdio: one tool, nothing else.  What ours is held against."""

from __future__ import annotations

from typing import Any

import anyio
import mcp.types as t
from mcp.server import Server, ServerRequestContext
from mcp.server.stdio import stdio_server


async def list_tools(
    ctx: ServerRequestContext[Any, Any], params: t.PaginatedRequestParams | None
) -> t.ListToolsResult:
    """One tool."""
    schema = {"type": "object", "properties": {}}
    return t.ListToolsResult(tools=[t.Tool(name="nothing", input_schema=schema)])


async def main() -> None:
    """Serve."""
    server: Server[Any] = Server("minimal", version="0", on_list_tools=list_tools)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


anyio.run(main)
