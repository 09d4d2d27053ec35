"""How a call runs: one step, the prompt, and what launches steps and reads them."""

from .budget import context_bucket
from .prefill import Prefill
from .runner import Direct, Replay
from .step import Engine, step

__all__ = ["Direct", "Engine", "Prefill", "Replay", "context_bucket", "step"]
