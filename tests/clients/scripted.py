"""A model that does what it is told, behind the real server: what it writes is a function of its prompt's text.

All else is real: the routes, the chat template, the forms of tool calls, grammars, the scheduler and its rows. The
model is a tiny Llama with random weights, whose logits are replaced.
"""

import functools
import json
import re
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import dflash
from dflash.sampling import LogitRules
from dflash_serve.prompts import PromptReader
from dflash_serve.scheduler import Scheduler
from dflash_serve.service import Service

PLAIN = "Nothing was asked of me."
_CONTEXT = 2**16  # tokens; the agents' prompts have about 20,000
_TOLD = re.compile(r"call (\w+) (\{.*?\})(?= now)|write \[\[(.*?)\]\]", re.DOTALL)
_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)


def answer(prompt: str) -> str:
    """Return what the model writes after a prompt.

    ``call NAME {...} now`` in the last message of the user is a call of that tool, and ``write [[...]]`` a text. A
    tool's result is repeated.
    """
    turns = prompt.split("<|im_start|>")
    asked = next((turn for turn in reversed(turns) if turn.startswith("user")), "")
    if found := _RESULT.findall(asked):
        return f"The tool said: {found[-1]}"
    if not (told := [*_TOLD.finditer(asked)]):
        return PLAIN
    name, arguments, text = told[-1].groups()
    if name is None:
        return text
    if f'"name": "{name}"' not in turns[1]:
        return PLAIN  # a request without tools, for a title and the like
    call = {"name": name, "arguments": json.loads(arguments)}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with ChatML's turns, trained on the documentation."""
    root, marks = Path(__file__).parents[2], ("<|im_start|>", "<|im_end|>")
    texts = [path.read_text() for path in sorted((root / "docs").rglob("*.md"))]
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    tokens.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=2048, initial_alphabet=letters, show_progress=False)
    )
    tokens.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    found = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token=marks[1], pad_token=marks[1])
    found.chat_template = Path(__file__).with_name("chatml.jinja").read_text()
    return found


class Script:
    """The logits of a model that writes `answer`; takes the place of `LogitRules.apply` for one service."""

    def __init__(self, service: Service) -> None:
        self._apply, self._tokens = LogitRules.apply, service.scheduler.generator.state.tokens
        self._ids = functools.cache(self._encoded)

    def _encoded(self, prompt: tuple[int, ...]) -> list[int]:
        told = tokenizer()
        return [*told.encode(answer(told.decode(prompt))), told.eos_token_id]

    def apply(self, rules, logits, block, state):
        """Return the logits of the next token of each row's text. Its rows have no drafts."""
        if state.tokens is not self._tokens:
            return self._apply(rules, logits, block, state)
        logits = torch.zeros_like(logits)
        for row, (length, prompt) in enumerate(zip(state.length.tolist(), state.prompt_length.tolist(), strict=True)):
            if not prompt or length + 1 < prompt:
                continue  # idle, or not all of its prompt has been run
            *ids, written = state.tokens[row, :prompt].tolist(), state.tokens[row, prompt : length + 1].tolist()
            text = self._ids(tuple(ids[0]))
            assert written == text[: len(written)], f"the grammar does not allow {tokenizer().decode(text)}"
            logits[row, 0, text[min(len(written), len(text) - 1)]] = 100.0
        return self._apply(rules, logits, block, state)


def service() -> Service:
    """Return a service of the model."""
    known = tokenizer()
    config = LlamaConfig(
        vocab_size=len(known), hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=_CONTEXT, bos_token_id=None,
        eos_token_id=known.eos_token_id,
    )  # fmt: skip
    target = LlamaForCausalLM(config).eval()
    generator = dflash.Generator(target, None, max_length=_CONTEXT, batch_size=4, prefill_chunk=512)
    return Service(
        scheduler=Scheduler(generator), reader=PromptReader(known), name="scripted", version="0", takes_any_name=True
    )
