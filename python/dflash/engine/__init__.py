"""How a call runs: its state, one step, the prompt, and what launches steps and reads them."""

from .budget import context_bucket
from .host_step import host_step
from .prefill import fill_caches
from .progress import FINISH_REASONS, Launch, Progress, Run
from .runner import Direct, Replay, compiled_per_kind, graph_status
from .state import State
from .step import Engine, step

__all__ = [
    "FINISH_REASONS",
    "Direct",
    "Engine",
    "Launch",
    "Progress",
    "Replay",
    "Run",
    "State",
    "compiled_per_kind",
    "context_bucket",
    "fill_caches",
    "graph_status",
    "host_step",
    "step",
]
