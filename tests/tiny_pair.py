"""A tiny random target and drafter as folders on disk, in the layout of a published pair."""

import json
from pathlib import Path

import torch
from families import draft_config, make_draft, make_target
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ {'user': 'w91', 'assistant': 'w92'}[m.role] }} {{ m.content }} "
    "{% endfor %}{{ 'w92' if enable_thinking is not defined or enable_thinking else 'w93' }}"
)


def word_tokenizer(**changes) -> PreTrainedTokenizerFast:
    """``w5 w6`` is ``[5, 6]``; w0 is BOS and EOS, w96 is the unknown token."""
    tokenizer = Tokenizer(models.WordLevel({f"w{index}": index for index in range(97)}, unk_token="w96"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w96", bos_token="w0", eos_token="w0", **changes
    )


def save_pair(folder: Path, dtype: torch.dtype = torch.float32, **tokenizer) -> Path:
    """``folder`` with ``target/`` (its tokenizer too) and ``draft/``."""
    target = make_target("qwen3", bos_token_id=0, eos_token_id=0)
    draft = make_draft(target)
    target.to(dtype).save_pretrained(folder / "target")
    word_tokenizer(**tokenizer).save_pretrained(folder / "target")
    (folder / "draft").mkdir()
    (folder / "draft" / "config.json").write_text(json.dumps(draft_config(target)))
    weights = {name: tensor.to(dtype).contiguous() for name, tensor in draft.state_dict().items()}
    save_file(weights, folder / "draft" / "model.safetensors")
    return folder
