"""A plug-in that declares an operation which is there already."""

from ikit_mcp.registry import READS, operation


@operation("list_evidence", ("acme", "list"), "A second operation of a name that is taken.", [], effects=READS)
def list_evidence(call):
    """Never called."""
    return {}
