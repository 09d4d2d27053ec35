"""What a call needs first: targets, drafters, tokenizers, GGUF files, chat templates, prompts, the package's pair."""

from .chat import WRITTEN, check_template, render_chat, written_calls
from .drafters import MASK_EMBEDDING_FILE, find_draft, load_draft, read_draft_config
from .mtp import has_mtp, load_mtp
from .pair import FIRST_GENERATION, PAIR, demo_pair, draft_folder, load_target_of
from .pretrained import Pretrained, load_target
from .prompts import check_encoding, check_text, prompt_ids, render_prompt, text_ids
from .published import find_known_draft, require_known_draft
