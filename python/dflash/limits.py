"""The largest things that are read from files and other people's answers. Anything above is refused by name."""

from __future__ import annotations

__all__ = ["MAX_JSON_DEPTH"]

# Levels of brackets in JSON. Python's own reader needs stack for each; tool schemas in chat data have about twenty.
MAX_JSON_DEPTH = 100
