"""How steps run: state, one step, the prompt, and what launches them."""

from .runner import Direct, Replay, graph_status

__all__ = ["Direct", "Replay", "graph_status"]
