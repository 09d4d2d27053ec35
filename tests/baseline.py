"""One-token decoding with only transformers: its own cache and attention, one row, one token at a time; and prompts."""

from collections.abc import Callable

import torch

from dflash.ops import reference


@torch.no_grad()
def greedy(target, prompt: torch.Tensor, new: int, stop: tuple[int, ...] = ()) -> torch.Tensor:
    """Return the new tokens of ``target.generate(do_sample=False)`` for a prompt ``[length]``."""
    eos = list(stop) or None
    out = target.generate(
        prompt[None], attention_mask=torch.ones_like(prompt)[None], do_sample=False, max_new_tokens=new,
        eos_token_id=eos, pad_token_id=0, use_cache=True,
    )  # fmt: skip
    return out[0, len(prompt) :]


@torch.no_grad()
def sampled(
    target, prompt: torch.Tensor, new: int, seed: int, temperature: float, top_k: int = 0, top_p: float = 1.0,
    min_p: float = 0.0, stop: tuple[int, ...] = (), process=lambda tokens, logits: logits,
) -> torch.Tensor:  # fmt: skip
    """Return new tokens by the oracle's sampling rule: keyed noise on the target's logits.

    ``process(tokens, logits [1, 1, vocab])`` sees the new tokens so far, and changes the logits of the next.
    """

    def one(value, dtype=torch.float32):
        return torch.tensor([value], dtype=dtype)

    tokens, cache, ids = [], None, prompt[None]
    for index in range(new):
        start = 0 if index == 0 else len(prompt) + index - 1  # as in `generate`: bamba's cache does not know it
        positions = torch.arange(start, start + ids.shape[1])[None]
        output = target(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        position = torch.tensor([[len(prompt) + index]])
        ids = reference.select_tokens(
            process(tokens, output.logits[:, -1:]), position, one(seed, torch.int64), one(temperature),
            one(top_k, torch.int64), one(top_p), one(min_p), one(1.0),
        )  # fmt: skip
        tokens.append(int(ids))
        if tokens[-1] in stop:
            break
    return torch.tensor(tokens)


def prompt(length: int, seed: int = 0, vocab: int = 97) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(2, vocab, (length,), generator=generator)


def left_padded(prompts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``ids`` and ``attention_mask`` of a ragged batch, padded as in transformers."""
    longest = max(map(len, prompts))
    ids = torch.stack([torch.cat([p.new_zeros(longest - len(p)), p]) for p in prompts])
    mask = torch.stack([torch.arange(longest) >= longest - len(p) for p in prompts]).long()
    return ids, mask


def check_answers(output: torch.Tensor, width: int, expected: list[torch.Tensor]) -> None:
    """Assert that each row of ``output [batch, length]`` holds its answer after ``width`` tokens, then zeros only."""
    for row, answer in zip(output, expected, strict=True):
        assert row[width : width + len(answer)].tolist() == answer.tolist()
        assert row[width + len(answer) :].eq(0).all()


def check_batch(generate: Callable, prompts: list[torch.Tensor], expected: list[torch.Tensor], **call):
    """Assert that a call answers a ragged batch of prompts as expected; return its ``GenerateOutput``."""
    ids, mask = left_padded(prompts)
    output = generate(ids, attention_mask=mask, return_dict_in_generate=True, **call)
    check_answers(output.sequences, ids.shape[1], expected)
    return output


def written(events: list, row: int = 0) -> list[int]:
    """Return the tokens that a stream's events hold for a row."""
    return [token for event in events for token in event.ids[row]]
