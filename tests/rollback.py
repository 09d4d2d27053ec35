"""Run blocks of which a part is accepted, on a target's own passes, and keep every bit of what they give."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.cache import RecurrentCache
from dflash.targets import Target

BLOCK = 16


@dataclass
class Played:
    """What a run wrote."""

    tokens: list[list[int]]  # per row, the new tokens
    logits: list[Tensor]  # per row, [new, vocab], those that chose them
    cache: RecurrentCache  # the target's, after the last step
    steps: int  # blocks that were run


@torch.no_grad()
def play(
    target: Target, prompts: list[Tensor], new: int, seed: int | None = None, truth=None, chunk: int = 16
) -> Played:
    """Decode greedily in blocks of fixed shape, prompts in chunks: one token per block if there is no seed.

    ``seed`` draws how many of a block's drafts are right, which ``truth`` then holds per row, and what the others are.
    """
    rng, vocab = random.Random(seed), target.embedding_weight.shape[0]
    ends = torch.tensor([len(p) for p in prompts])
    cache = target.new_cache(len(prompts), int(ends.max()) + new + BLOCK, BLOCK)
    logits = [[row] for row in run_prompts(target, cache, prompts, chunk)]
    tokens, lengths, steps = [[int(row[0].argmax())] for row in logits], ends.clone(), 0
    while running := [row for row, ids in enumerate(tokens) if len(ids) < new]:
        block = torch.randint(
            2, vocab, (len(prompts), BLOCK), generator=torch.Generator().manual_seed(rng.randrange(99))
        )
        for row in range(len(prompts)):
            right = [] if truth is None else truth[row][len(tokens[row]) :][: rng.choice([0, 0, 1, 2, 3, 5, 8, 11, 15])]
            block[row, : 1 + len(right)] = torch.tensor([tokens[row][-1], *right])
        out, _ = target.forward(block, lengths, cache)
        counts = torch.zeros_like(lengths)
        for row in running:
            drafts, choices = block[row, 1:].tolist(), out[row].argmax(-1).tolist()
            matches = [a == b for a, b in zip(drafts, choices[:-1], strict=True)]
            count = min(1 + (*matches, False).index(False), new - len(tokens[row])) if truth is not None else 1
            tokens[row] += choices[:count]
            logits[row] += out[row, :count]
            counts[row] = count
        lengths = lengths + counts
        cache.commit_(lengths, counts)
        steps += 1
    return Played(tokens, [torch.stack(row) for row in logits], cache, steps)


@torch.no_grad()
def run_prompts(target: Target, cache: RecurrentCache, prompts: list[Tensor], chunk: int) -> list[Tensor]:
    """Run prompts in chunks of one shape; return the logits ``[vocab]`` of each one's last row."""
    ends, width = torch.tensor([len(p) for p in prompts]), max(map(len, prompts))
    ids = torch.stack([torch.cat([p, p.new_ones(-(-width // chunk) * chunk - len(p))]) for p in prompts])
    last: dict[int, Tensor] = {}
    for start in range(0, width, chunk):
        past = ends.clamp(max=start)
        out, _ = target.forward(ids[:, start : start + chunk], past, cache, keep=(ends - past).clamp(max=chunk))
        last |= {
            row: out[row, end - start - 1] for row, end in enumerate(ends.tolist()) if start < end <= start + chunk
        }
    return [last[row] for row in range(len(prompts))]


def standing(cache: RecurrentCache) -> list[Tensor]:
    """Return copies of the states and of the inputs in front of them, of all layers."""
    return [tensor.clone() for _, layer in sorted(cache.recurrent.items()) for tensor in layer.held_values]
