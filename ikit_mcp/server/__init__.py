"""The MCP server over the registry: nothing but this package imports ``mcp``."""
