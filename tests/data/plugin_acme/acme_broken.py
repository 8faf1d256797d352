"""A plug-in that fails at import, and prints while it does."""

print("a plug-in prints at import")
raise RuntimeError("acme_broken cannot load")
