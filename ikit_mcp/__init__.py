"""ikit-mcp: honest measurement of inference engines, for AI agents.

The package is the machinery: a registry of operations, their arguments, the
evidence records that they leave behind, the processes that they start, and the
two ways in (an MCP server and a command line).  What an agent can ask for lives
in the ``ikit_ops`` package, which plugs in through the ``ikit_mcp.operations``
entry point like any third-party plug-in.
"""

__version__ = "0.1.0"
