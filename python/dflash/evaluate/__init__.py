"""Measuring a pair: prompts, answers compared with one-token decoding, reports."""

from .benchmark import distinct_ngrams
from .compare import Answer, Comparison, Decoding, GeneratorRunner, Total, TransformersRunner, answer_all, pair_runners
from .journal import Journal
from .pair import (
    ARROW,
    CHAT_TEMPLATE,
    FIRST_GENERATION,
    PAIR,
    demo_pair,
    demo_prompts,
    draft_folder,
    encode,
    load_target,
)
from .pretrained import Pretrained
from .prompts import (
    as_messages,
    check_text,
    import_datasets,
    parse_messages,
    parse_prompt,
    prompt_ids,
    read_records,
    render_chat,
    text_ids,
)

__all__ = [
    "ARROW",
    "CHAT_TEMPLATE",
    "FIRST_GENERATION",
    "PAIR",
    "Answer",
    "Comparison",
    "Decoding",
    "GeneratorRunner",
    "Journal",
    "Pretrained",
    "Total",
    "TransformersRunner",
    "answer_all",
    "as_messages",
    "check_text",
    "demo_pair",
    "demo_prompts",
    "distinct_ngrams",
    "draft_folder",
    "encode",
    "import_datasets",
    "load_target",
    "pair_runners",
    "parse_messages",
    "parse_prompt",
    "prompt_ids",
    "read_records",
    "render_chat",
    "text_ids",
]
