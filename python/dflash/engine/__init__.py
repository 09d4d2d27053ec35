"""How a call runs: one step, the prompt, and what launches steps and reads them."""

from .budget import context_bucket
from .graphs import Replay
from .prefill import Prefill
from .run import Direct
from .step import Engine, step
