"""How a call runs: its state, one step, the prompt, and what launches steps and reads them."""

from ..state import RUNNING, State
from .budget import context_bucket
from .host_step import host_step
from .prefill import Prefill, cached_prefix
from .progress import Answer, Measurement, event_of, output_of, raise_errors
from .run import Launch, Run, step_of
from .runner import Direct, Replay, compiled_per_kind, graph_status
from .step import Engine, step

__all__ = [
    "RUNNING",
    "Answer",
    "Direct",
    "Engine",
    "Launch",
    "Measurement",
    "Prefill",
    "Replay",
    "Run",
    "State",
    "cached_prefix",
    "compiled_per_kind",
    "context_bucket",
    "event_of",
    "graph_status",
    "host_step",
    "output_of",
    "raise_errors",
    "step",
    "step_of",
]
