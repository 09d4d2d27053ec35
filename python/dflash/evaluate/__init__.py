"""Measuring a pair: prompts, answers compared with one-token decoding, reports."""

from .chat import WRITTEN, check_template, render_chat, written_calls
from .compare import Decoding, GeneratorRunner, add_up, mean_acceptance
from .pair import ARROW, FIRST_GENERATION, PAIR, demo_pair, demo_prompts, draft_folder, encode, load_target
from .pretrained import Pretrained
from .prompts import check_encoding, check_text, prompt_ids, render_prompt, text_ids
