"""The public names of the package, in one place; ``dflash`` imports this when it is first asked for one."""

from .api import generate, release, stream
from .drafter import DraftConfig, Drafter
from .generator import Generator
from .grammar import Grammar
from .hf import as_assistant, custom_generate
from .loading.drafters import load_draft
from .loading.pair import demo_pair
from .loading.pretrained import load_target
from .outputs import GenerateOutput, Statistics, StreamEvent, TokenLogprobs
from .receipts import Receipt, Recorder, Verification, verify
from .targets import UnsupportedTargetError

__all__ = ["DraftConfig", "Drafter", "GenerateOutput", "Generator", "Grammar", "Receipt", "Recorder", "Statistics"]
__all__ += ["StreamEvent", "TokenLogprobs", "UnsupportedTargetError", "Verification", "as_assistant", "custom_generate"]
__all__ += ["demo_pair", "generate", "load_draft", "load_target", "release", "stream", "verify"]
