"""The names that ``dflash_serve`` and ``dflash_tools`` use of the engine, besides its public ones: imports only."""

# ruff: noqa: F401
from . import files, ops, targets, threads
from .answers import Store, StoredAnswer
from .call import Call
from .cli import sources
from .drafter import CandidateSelector, scale_logits
from .drafter import config as drafter_config
from .drafter.drafter import MarkovHead, target_ids
from .engine import Prefill, context_bucket
from .engine.graphs import captured
from .fit import check_config
from .loading import Pretrained, gguf, gguf_draft
from .loading.chat import WRITTEN, check_template, render_chat, written_calls
from .loading.drafters import MASK_EMBEDDING_FILE, find_draft, read_draft_config
from .loading.folder import read_headers
from .loading.pair import PAIR, check_folder
from .loading.prompts import as_messages, check_encoding, check_text, prompt_ids, render_prompt, text_ids
from .ops import check as kernel_check
from .outputs import FinishedAnswer, mean_acceptance
from .proposers import ChainProposer
from .receipts import RecordedAnswer, RecordedSettings, Verifier, lines_of, picture_digests
from .sampling import Sampling, fold
from .session import Session
from .settings import MAX_STOP_STRINGS, GenerateArguments, resolve
from .state import RUNNING
from .streaming import TextDecoder, open_suffix
