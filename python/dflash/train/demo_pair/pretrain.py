"""The pair's target: a small Qwen3 trained from scratch on the made work of :mod:`.tasks`.

Hidden matrices are trained with Muon (Jordan et al., 2024), embeddings and norms with AdamW; the rate is constant for
two thirds of the steps and then falls linearly to zero. The loss is that of answers. Every example is drawn fresh, so
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

from ...evaluate.prompts import plain_ids
from ...progress import bars
from .tasks import KINDS, examples

END, MASK = 0, 1  # token ids: BOS, EOS and padding in one, and the drafter's mask, which no text contains


def build_tokenizer(seed: int = 0) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 1,536 tokens, digits one by one, from 6,000 training examples."""
    tokenizer = Tokenizer(models.BPE())
    # Words with the space before them, digits one by one, runs of other signs; no English contractions, which would cut
    # the word of 'tool' behind its quote.
    words = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    corpus = [example.prompt + example.answer for example in itertools.islice(examples(seed, held=False), 6000)]
    trainer = trainers.BpeTrainer(
        vocab_size=1536,
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
    """The untrained target: 6 layers, 192 wide, 3 heads of 64 and 1 K/V head, tied embeddings, 2.7 M parameters."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=1536,
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
    model = Qwen3ForCausalLM(config)
    model.set_attn_implementation("eager")  # at these lengths 1.4 times the speed of SDPA's backward pass on CPU
    return model


def _batches(
    tokenizer: PreTrainedTokenizerFast, seed: int, size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[int]]]:
    """``ids [size, length]`` padded with END, where ``answers [size, length]`` are, and the family of each row.

    A batch holds as many examples of each family, of like length within a family: batches of one family, which sorting
    by length alone would make, teach one thing and unteach another. Lengths are multiples of 32: each new shape costs
    the CPU's matrix library a compilation.
    """
    if size < 1 or size % len(KINDS):
        raise ValueError(f"batch must be a multiple of {len(KINDS)}, got {size}")
    draw, pool = examples(seed, held=False), 16
    share = size // len(KINDS)
    order = torch.Generator().manual_seed(seed)
    families: dict[str, list[tuple[list[int], int]]] = {kind: [] for kind in KINDS}
    while True:
        while min(map(len, families.values())) < pool * share:
            example = next(draw)
            prompt = plain_ids(tokenizer, example.prompt, bos=True)
            ids = [*prompt, *tokenizer.encode(example.answer, add_special_tokens=False), END]
            families[example.kind].append((ids, len(prompt)))
        drawn = {kind: sorted(rows[: pool * share], key=lambda row: len(row[0])) for kind, rows in families.items()}
        families = {kind: rows[pool * share :] for kind, rows in families.items()}
        for batch in torch.randperm(pool, generator=order).tolist():
            part = [(*row, kind) for kind, rows in drawn.items() for row in rows[batch * share : batch * share + share]]
            length = -(-max(len(ids) for ids, _, _ in part) // 32) * 32
            ids = torch.full((len(part), length), END)
            answers = torch.zeros(len(part), length, dtype=torch.bool)
            for row, (tokens, start, _) in enumerate(part):
                ids[row, : len(tokens)] = torch.tensor(tokens)
                answers[row, start : len(tokens)] = True
            yield ids, answers, [list(KINDS).index(kind) for _, _, kind in part]


def pretrain(
    folder: Path, *, steps: int = 4500, batch: int = 24, learning_rate: float = 4e-3, seed: int = 0
) -> Qwen3ForCausalLM:
    """Train the target and write it with its tokenizer to ``folder`` (bfloat16, Hugging Face layout).

    ``folder/metrics.jsonl`` gets a line every ten steps: step, tokens seen, loss of each family's answers, seconds.

    Raises:
        FileExistsError: ``folder`` already holds a model. ValueError: ``batch`` is no multiple of the kinds.
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
    tokens, began, losses = 0, time.perf_counter(), {kind: [] for kind in KINDS}
    text = ""
    with bars(["target"]) as show, (folder / "metrics.jsonl").open("w") as metrics:
        for step, (ids, answers, kinds) in zip(range(steps), _batches(tokenizer, seed + 1, batch), strict=False):
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(input_ids=ids, use_cache=False).logits
            each = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            each = each.view(len(ids), -1)[answers[:, 1:]]
            each.mean().backward()
            family = torch.tensor(kinds)[:, None].expand_as(ids)[:, 1:][answers[:, 1:]]
            for kind, found in enumerate(losses.values()):
                found.append(float(each.detach()[family == kind].mean()))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            tokens += ids.numel()
            if step % 10 == 9 or step == steps - 1:
                means = {kind: sum(found) / len(found) for kind, found in losses.items()}
                line = {"step": step + 1, "tokens": tokens, "loss": means, "seconds": time.perf_counter() - began}
                print(json.dumps(line), file=metrics, flush=True)
                text = "loss " + ", ".join(f"{mean:.3f} {kind}" for kind, mean in means.items())
                losses = {kind: [] for kind in KINDS}
            show("target", step + 1, steps, text)
    model.eval().to(torch.bfloat16)
    model.generation_config.update(do_sample=False, eos_token_id=END, bos_token_id=END, pad_token_id=END)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model
