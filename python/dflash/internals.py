"""The names that ``dflash_serve`` and ``dflash_tools`` use of the engine, besides its public ones: imports only."""

# ruff: noqa: F401
from . import files, ops, targets, terminal
from .answers import Store, StoredAnswer
from .api import PairOptions
from .call import Call
from .cli import options, running
from .drafter import MASK_EMBEDDING_FILE, CandidateSelector, GroupedConv, find_draft, read_draft_config, scale_logits
from .drafter import config as drafter_config
from .drafter.drafter import MarkovHead, target_ids
from .engine import context_bucket
from .engine.graphs import captured
from .engine.prefill import Prefill
from .engine.self_check import OVERLAPPING, check_gpu
from .loading import (
    PAIR,
    WRITTEN,
    Pretrained,
    check_encoding,
    check_template,
    check_text,
    gguf,
    gguf_draft,
    prompt_ids,
    render_chat,
    render_prompt,
    text_ids,
    written_calls,
)
from .loading.pair import check_folder
from .loading.prompts import as_messages
from .options import check_block_size, check_config
from .outputs import FinishedAnswer, mean_acceptance
from .proposers import ChainProposer
from .receipts import RecordedSettings, lines_of
from .receipts.receipt import RecordedAnswer, picture_digests
from .receipts.verification import Verifier
from .sampling import Sampling, fold
from .session import Session
from .settings import SETTINGS, GenerateArguments, checked, resolve
from .state import RUNNING
from .streaming import TextDecoder, Tokenizer, open_suffix
