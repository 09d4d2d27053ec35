"""What the pair is worth on held-out prompts: acceptance, right answers, repetition, and prompt lookup beside."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import dflash

from ...evaluate.benchmark import distinct_ngrams
from ...evaluate.demo import encode
from .pretrain import END
from .tasks import Example, examples, is_right

HELD_OUT_SEED = 1_000_003


def held_out_examples(count: int) -> list[Example]:
    """The first ``count`` held-out examples; no training step sees any of their prompts."""
    return list(itertools.islice(examples(HELD_OUT_SEED, held=True), count))


def prompt_lookup_length(prompt: list[int], answer: list[int], block_size: int = 16) -> list[int]:
    """Tokens a step of prompt lookup (n-grams of up to 3) had it written ``answer`` to ``prompt``: accepted tokens plus
    one, a list over its steps. As for DFlash, the first token of the answer belongs to no step."""
    lookup = PromptLookupCandidateGenerator(
        num_output_tokens=block_size - 1, max_matching_ngram_size=3, max_length=len(prompt) + len(answer) + block_size
    )
    text, done, steps = torch.tensor([[*prompt, *answer]]), len(prompt) + 1, []
    while done < text.shape[1]:
        proposed = lookup.get_candidates(text[:, :done])[0][0, done:]
        rest = text[0, done : done + len(proposed)]
        accepted = int((proposed[: len(rest)] == rest).long().cumprod(0).sum())
        steps.append(min(accepted + 1, text.shape[1] - done))
        done += steps[-1]
    return steps


def distinct_share(answer: list[int]) -> float:
    """Share of the 8-grams of an answer that are different from one another; 1 where there are none."""
    different, count = distinct_ngrams(answer)
    return different / count if count else 1.0


@torch.inference_mode()
def evaluate(
    folder: Path,
    *,
    prompts: int = 192,
    temperature: float = 0.0,
    draft_sharpness: float | Literal["auto"] = "auto",
    batch: int = 32,
    seed: int = 1,
) -> dict[str, Any]:
    """Run a pair (``folder/target``, ``folder/draft``) in float32 on ``prompts`` held-out prompts.

    Returns:
        A dict with ``acceptance_length`` (mean tokens a step, bonus counted), ``prompt_lookup`` (the same of prompt
        lookup on the same outputs), ``right`` (share of right answers), ``right_one_answer`` (of those prompts that
        have one), ``distinct_8_grams``, ``answer_tokens`` (mean), ``finished`` (share that stopped by itself) and
        ``by_kind`` (acceptance length, share right and answer tokens of each family).
    """
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    draft = dflash.load_draft(folder / "draft", dtype=torch.float32) if (folder / "draft").exists() else None
    rows: list[dict[str, Any]] = []
    held = sorted(held_out_examples(prompts), key=lambda example: len(example.prompt))
    generator = dflash.Generator(target, draft, max_length=640, batch_size=batch, reuse_prefix=False)
    for start in range(0, len(held), batch):
        part = held[start : start + batch]
        ids = [encode(tokenizer, example.prompt)[0].tolist() for example in part]
        width = max(map(len, ids))
        ids += [ids[-1]] * (batch - len(ids))  # fill up the last batch
        padded = torch.tensor([[END] * (width - len(row)) + row for row in ids])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
        out = generator.generate(
            padded,
            attention_mask=mask,
            max_new_tokens=256,
            temperature=temperature,
            draft_sharpness=draft_sharpness,
            seed=seed + start,
            return_dict_in_generate=True,
        )
        for row, example in enumerate(part):
            answer = out.sequences[row, width : width + out.statistics.num_new_tokens[row]].tolist()
            finished = answer[-1] == END
            text = tokenizer.decode(answer[:-1] if finished else answer)
            rows.append(
                {
                    "kind": example.kind,
                    "right": finished and is_right(example, text),
                    "finished": finished,
                    "tokens": len(answer),
                    "distinct": distinct_share(answer),
                    "steps": out.statistics.acceptance_lengths[row],
                    "lookup": prompt_lookup_length(ids[row], answer),
                }
            )

    def length(rows: list[dict[str, Any]], key: str) -> float:
        return statistics.fmean(step for row in rows for step in row[key])

    def mean(rows: list[dict[str, Any]], key: str) -> float:
        return statistics.fmean(row[key] for row in rows)

    one = [row for row in rows if row["kind"] != "letters"]
    kinds = sorted({row["kind"] for row in rows})
    return {
        "prompts": len(rows),
        "temperature": temperature,
        "draft_sharpness": draft_sharpness,
        "acceptance_length": length(rows, "steps"),
        "prompt_lookup": length(rows, "lookup"),
        "right": mean(rows, "right"),
        "right_one_answer": mean(one, "right"),
        "distinct_8_grams": mean(rows, "distinct"),
        "answer_tokens": mean(rows, "tokens"),
        "finished": mean(rows, "finished"),
        "by_kind": {
            kind: {
                "acceptance_length": length(part, "steps"),
                "right": mean(part, "right"),
                "answer_tokens": mean(part, "tokens"),
            }
            for kind in kinds
            for part in [[row for row in rows if row["kind"] == kind]]
        },
    }
