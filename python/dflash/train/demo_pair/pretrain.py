"""The pair's target: a small Qwen3 trained from scratch on the made work of :mod:`.tasks`.

Hidden matrices are trained with Muon (Jordan et al., 2024), embeddings and norms with AdamW; the rate is constant for
two thirds of the steps and then falls linearly to zero. Prompts count a quarter. Every example is drawn fresh, so
no prompt is seen twice but by chance.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from ...progress import bars
from ...prompts import plain_ids
from .tasks import examples

PROMPT_WEIGHT = 0.25  # of a prompt's token in the loss: prompts repeat names too, and copying is what is hardest here
END, MASK = 0, 1  # token ids: BOS, EOS and padding in one, and the drafter's mask, which no text contains


def build_tokenizer(seed: int = 0) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 1,024 tokens, digits one by one, from 6,000 training examples."""
    tokenizer = Tokenizer(models.BPE())
    # Words with the space before them, digits one by one, runs of other signs; no English contractions, which would cut
    # the word of 'tool' behind its quote.
    words = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    # The invented words of records would use up the vocabulary: their texts count once, the others three times.
    corpus = [
        text
        for example in itertools.islice(examples(seed, held=False), 6000)
        for text in ([example.prompt] if example.kind == "records" else [example.answer] * 3)
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=["<|end|>", "<|mask|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|end|>",
        eos_token="<|end|>",
        pad_token="<|end|>",
        mask_token="<|mask|>",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def build_target(seed: int = 0) -> Qwen3ForCausalLM:
    """The untrained target: 6 layers, 192 wide, 3 heads of 64 and 1 K/V head, tied embeddings, 2.4 M parameters."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=END,
        use_cache=True,
    )
    return Qwen3ForCausalLM(config)


def _batches(tokenizer: PreTrainedTokenizerFast, seed: int, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """``ids [rows, length]`` padded with END and ``weights [rows, length]``; about ``size`` rows.

    A batch holds all families in the shares of the draw, each by examples of like length: batches of one family, which
    sorting by length alone would make, teach one thing and unteach another.
    """
    draw, pool = examples(seed, held=False), 16
    order = torch.Generator().manual_seed(seed)
    while True:
        families: dict[str, list[tuple[list[int], int]]] = {}
        for example in itertools.islice(draw, pool * size):
            prompt = plain_ids(tokenizer, example.prompt, bos=True)
            ids = [*prompt, *tokenizer.encode(example.answer, add_special_tokens=False), END]
            families.setdefault(example.kind, []).append((ids, len(prompt)))
        for rows in families.values():
            rows.sort(key=lambda row: len(row[0]))
        for batch in torch.randperm(pool, generator=order).tolist():
            part = [
                row for rows in families.values() for row in rows[batch * len(rows) // pool :][: -(-len(rows) // pool)]
            ]
            length = max(len(ids) for ids, _ in part)
            ids = torch.full((len(part), length), END)
            weights = torch.zeros(len(part), length)
            for row, (tokens, start) in enumerate(part):
                ids[row, : len(tokens)] = torch.tensor(tokens)
                weights[row, 1:start] = PROMPT_WEIGHT
                weights[row, start : len(tokens)] = 1.0
            yield ids, weights


def pretrain(
    folder: Path, *, steps: int = 2000, batch: int = 24, learning_rate: float = 4e-3, seed: int = 0
) -> Qwen3ForCausalLM:
    """Train the target and write it with its tokenizer to ``folder`` (bfloat16, Hugging Face layout).

    ``folder/metrics.jsonl`` gets a line every ten steps: step, tokens seen, loss of answers, seconds.

    Raises:
        FileExistsError: ``folder`` already holds a model.
    """
    if (folder / "config.json").exists():
        raise FileExistsError(f"{folder} already holds a model")
    tokenizer, model = build_tokenizer(seed), build_target(seed).train()
    hidden = [
        p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name and "lm_head" not in name
    ]
    chosen = set(map(id, hidden))
    rest = [p for p in model.parameters() if id(p) not in chosen]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(hidden, lr=learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]

    def rate(step: int) -> float:
        return min((step + 1) / 40, 1.0, (1 - step / steps) / 0.35)

    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in optimizers]
    folder.mkdir(parents=True, exist_ok=True)
    tokens, began, losses = 0, time.perf_counter(), []
    text = ""
    with bars(["target"]) as show, (folder / "metrics.jsonl").open("w") as metrics:
        for step, (ids, weights) in zip(range(steps), _batches(tokenizer, seed + 1, batch), strict=False):
            counted = weights[:, 1:] > 0
            with torch.autocast("cpu", torch.bfloat16):
                states = model.model(input_ids=ids, use_cache=False).last_hidden_state
                logits = model.lm_head(states[:, :-1][counted])
            each = F.cross_entropy(logits.float(), ids[:, 1:][counted], reduction="none")
            weight = weights[:, 1:][counted]
            (torch.dot(each, weight) / weight.sum()).backward()
            answer = weight == 1
            losses.append(float(each.detach()[answer].mean()))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            tokens += ids.numel()
            if len(losses) == 10 or step == steps - 1:
                mean = sum(losses) / len(losses)
                line = {"step": step + 1, "tokens": tokens, "loss": mean, "seconds": time.perf_counter() - began}
                print(json.dumps(line), file=metrics, flush=True)
                text = f"loss {mean:.3f}"
                losses.clear()
            show("target", step + 1, steps, text)
    model.eval().to(torch.bfloat16)
    model.generation_config.update(do_sample=False, eos_token_id=END, bos_token_id=END, pad_token_id=END)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model
