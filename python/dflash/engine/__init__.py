"""How a call runs: its state, one step, the prompt, and what launches steps and reads them."""

from .budget import context_bucket
from .host_step import host_step
from .prefill import Prefill, cached_prefix
from .progress import FINISH_REASONS, Answer, all_logprobs, event_of, raise_errors, sequences, statistics
from .run import Launch, Run
from .runner import Direct, Replay, compiled_per_kind, graph_status
from .state import RUNNING, State
from .step import Engine, step

__all__ = [
    "FINISH_REASONS",
    "RUNNING",
    "Answer",
    "Direct",
    "Engine",
    "Launch",
    "Prefill",
    "Replay",
    "Run",
    "State",
    "all_logprobs",
    "cached_prefix",
    "compiled_per_kind",
    "context_bucket",
    "event_of",
    "graph_status",
    "host_step",
    "raise_errors",
    "sequences",
    "statistics",
    "step",
]
