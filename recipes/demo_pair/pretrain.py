"""The pair's target: a small Qwen3, trained from scratch on the synthetic tasks in `.tasks`.

Muon (Jordan et al., 2024) trains the hidden matrices, AdamW the embeddings and norms. The learning rate is constant for
two thirds of the steps, then falls linearly to zero. Only answers count in the loss. Every example is drawn fresh, so a
prompt repeats only by chance.
"""

from __future__ import annotations

import functools
import itertools
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from dflash.files import read_torch_file, write_atomically
from dflash.loading import text_ids
from dflash_tools.measure.progress import bars
from dflash_tools.train.files import atomic_folder
from dflash_tools.train.trainer import MetricsFile, make_muon

from .tasks import KINDS, examples

END, MASK = 0, 1  # END is BOS, EOS and padding; MASK is the drafter's mask, which no text contains
# One prompt and its answer are all that the pair was trained to read. Of a conversation the template therefore writes
# the last question only, which then gets the answer that it would get on its own.
_CHAT_TEMPLATE = """\
{%- set last = namespace(question=none, answer=none) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}
    {%- set last.question = message.content | trim -%}
    {%- set last.answer = none -%}
  {%- elif message.role == 'assistant' -%}
    {%- set last.answer = message.content -%}
  {%- else -%}
    {{- raise_exception('this model was trained without messages of the role ' + message.role) -}}
  {%- endif -%}
{%- endfor -%}
{%- if last.question is none -%}
  {{- raise_exception('there is no message of the user to answer') -}}
{%- endif -%}
{{- bos_token + last.question -}}
{{- '\\n' if last.question.endswith('\\n=>') else '\\n=>\\n' -}}
{%- if last.answer is not none -%}
  {{- last.answer + eos_token -}}
{%- endif -%}
"""


def build_tokenizer(seed: int = 0) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of 1,536 tokens with single digits on 6,000 examples, and add the chat template."""
    # 1. Split text into words
    tokenizer = Tokenizer(models.BPE())
    # Words with the space before them, single digits, runs of other signs. No English contractions: they would split
    # 'tool' in quotes after "'t".
    words = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    # 2. Train
    corpus = [example.prompt + example.answer for example in itertools.islice(examples(seed, held=False), 6000)]
    trainer = trainers.BpeTrainer(
        vocab_size=1536,
        special_tokens=["<|end|>", "<|mask|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    # 3. Put BOS before every text
    bos = "<|end|>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, END)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token="<|end|>",
        pad_token="<|end|>",
        mask_token="<|mask|>",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
        chat_template=_CHAT_TEMPLATE,
    )


def build_target(seed: int = 0) -> Qwen3ForCausalLM:
    """Build the untrained target: 6 layers, 192 wide, 3 heads of 64, 1 K/V head, tied embeddings, 2.7 M parameters."""
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
    model.set_attn_implementation("eager")  # 1.4 times as fast as SDPA's backward pass at these lengths on CPU
    return model


def batches(
    tokenizer: PreTrainedTokenizerFast, seed: int, size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[int]]]:
    """Yield ``ids [size, length]`` padded with END, a mask of the answers of the same shape, and each row's family.

    A batch holds equally many examples of each family, of similar length within a family. Sorting all examples by
    length would give batches of one family, and the model would forget the others. Lengths are multiples of 32, because
    the CPU's matrix library compiles code for each new shape.
    """
    # 1. Draw examples until there are enough of every family
    if size < 1 or size % len(KINDS):
        raise ValueError(f"batch must be a multiple of {len(KINDS)}, got {size}")
    draw, pool = examples(seed, held=False), 16
    share = size // len(KINDS)
    order = torch.Generator().manual_seed(seed)
    families: dict[str, list[tuple[list[int], int]]] = {kind: [] for kind in KINDS}
    while True:
        while min(map(len, families.values())) < pool * share:
            example = next(draw)
            prompt = text_ids(tokenizer, example.prompt, bos=True)
            ids = [*prompt, *tokenizer.encode(example.answer, add_special_tokens=False), END]
            families[example.kind].append((ids, len(prompt)))
        # 2. Sort each family by length, and take batches in random order
        drawn = {kind: sorted(rows[: pool * share], key=lambda row: len(row[0])) for kind, rows in families.items()}
        families = {kind: rows[pool * share :] for kind, rows in families.items()}
        for batch in torch.randperm(pool, generator=order, device="cpu").tolist():
            part = [(*row, kind) for kind, rows in drawn.items() for row in rows[batch * share : batch * share + share]]
            ids, answers = _padded([(tokens, start) for tokens, start, _ in part])
            yield ids, answers, [list(KINDS).index(kind) for _, _, kind in part]


def _padded(rows: list[tuple[list[int], int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows of (ids, start of the answer) to a multiple of 32 tokens; return ids and a mask of the answers."""
    length = -(-max(len(tokens) for tokens, _ in rows) // 32) * 32
    ids = torch.full((len(rows), length), END, dtype=torch.int64, device="cpu")
    answers = torch.zeros(len(rows), length, dtype=torch.bool, device="cpu")
    for row, (tokens, start) in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64, device="cpu")
        answers[row, start : len(tokens)] = True
    return ids, answers


def pretrain(
    folder: Path,
    *,
    steps: int = 4500,
    batch: int = 24,
    learning_rate: float = 4e-3,
    seed: int = 0,
    save_every: int = 200,
) -> Qwen3ForCausalLM:
    """Train the target and write it with its tokenizer to ``folder`` (bfloat16, Hugging Face layout).

    ``folder/metrics.jsonl`` gets a line every ten steps: step, tokens seen, loss of each family's answers, seconds. A
    stopped run leaves ``folder/training.pt`` and continues from there, bit for bit.

    Args:
        folder: output folder, created if missing.
        steps: training steps.
        batch: examples per step, a multiple of the number of families.
        learning_rate: peak learning rate.
        seed: seed of the tokenizer's corpus, the weights and the examples.
        save_every: steps between checkpoints.

    Returns:
        The trained target.

    Raises:
        FileExistsError: ``folder`` already holds a model.
        ValueError: ``batch`` is not a multiple of the number of families, or the stopped run had other arguments.
    """
    # 1. Build the tokenizer, the model and its optimizers, or continue a stopped run
    if (folder / "config.json").exists():
        raise FileExistsError(f"{folder} already holds a model")
    tokenizer, model = build_tokenizer(seed), build_target(seed).train()
    settings = {"steps": steps, "batch": batch, "learning_rate": learning_rate, "seed": seed}
    folder.mkdir(parents=True, exist_ok=True)
    run = _Run(model, settings, folder / "training.pt")
    run.resume()
    metrics = MetricsFile(folder)
    metrics.drop_after(run.step)
    # 2. Train
    drawn = itertools.islice(batches(tokenizer, seed + 1, batch), run.step, steps)
    with bars(["target"]) as show:
        for ids, answers, families in drawn:
            run.losses.add(*backward(model, ids, answers, families), ids.numel())
            run.update()
            if run.step % 10 == 0 or run.step == steps:
                metrics.append(run.losses.means(run.step))
            if run.step % save_every == 0:
                run.save()
            show("target", run.step, steps, run.losses.text)
    # 3. Write it
    model.eval().to(torch.bfloat16)
    model.generation_config.update(do_sample=False, eos_token_id=END, bos_token_id=END, pad_token_id=END)
    with atomic_folder(folder) as finished:
        model.save_pretrained(finished)
        tokenizer.save_pretrained(finished)
        shutil.copy(metrics.path, finished)
    return model


class _Run:
    """The state of a training run, and its checkpoint."""

    def __init__(self, model: Qwen3ForCausalLM, settings: dict[str, Any], path: Path) -> None:
        self.model, self.settings, self.path = model, settings, path
        self.optimizers = _optimizers(model, settings["learning_rate"])
        self.step, self.losses = 0, _FamilyLosses()

    def update(self) -> None:
        """Make a step with the gradients. The rate rises for 40 steps, and falls over the last third."""
        rate = min((self.step + 1) / 40, 1.0, (1 - self.step / self.settings["steps"]) / 0.35)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.settings["learning_rate"] * rate
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1

    def save(self) -> None:
        """Write the checkpoint, in place of the one before."""
        state = {"settings": self.settings, "step": self.step, "losses": self.losses.state()}
        state |= {"model": self.model.state_dict(), "optimizers": [one.state_dict() for one in self.optimizers]}
        write_atomically(self.path, functools.partial(torch.save, state))

    def resume(self) -> None:
        """Load the checkpoint if there is one."""
        if not self.path.exists():
            return
        state = read_torch_file(self.path)
        if state["settings"] != self.settings:
            raise ValueError(f"{self.path} is of a run with {state['settings']}, not {self.settings}: remove it")
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]
        self.losses.load(state["losses"])


def _optimizers(model: Qwen3ForCausalLM, rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the hidden matrices and AdamW for embeddings and norms."""
    hidden = [p for name, p in model.named_parameters() if p.dim() == 2 and not re.search("embed|lm_head", name)]
    chosen = set(map(id, hidden))
    others = [p for p in model.parameters() if id(p) not in chosen]
    return make_muon(hidden, others, rate, fused=None)


def backward(
    model: Qwen3ForCausalLM, ids: torch.Tensor, answers: torch.Tensor, families: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a forward and a backward pass; return the loss and the family of each answer token."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits
    loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    loss = loss.view(len(ids), -1)[answers[:, 1:]]
    loss.mean().backward()
    kinds = torch.tensor(families, dtype=torch.int64, device="cpu")
    return loss.detach(), kinds[:, None].expand_as(ids)[:, 1:][answers[:, 1:]]


class _FamilyLosses:
    """Mean loss of each family of tasks between two lines of metrics."""

    def __init__(self) -> None:
        self.began, self.tokens, self.text = time.perf_counter(), 0, ""
        self.steps: dict[str, list[float]] = {kind: [] for kind in KINDS}

    def add(self, loss: torch.Tensor, family: torch.Tensor, tokens: int) -> None:
        """Count one step."""
        self.tokens += tokens
        for number, steps in enumerate(self.steps.values()):
            steps.append(float(loss[family == number].mean()))

    def means(self, step: int) -> dict[str, Any]:
        """Return a line of metrics, and start the next one."""
        means = {kind: sum(steps) / len(steps) for kind, steps in self.steps.items()}
        self.text = "loss " + ", ".join(f"{mean:.3f} {kind}" for kind, mean in means.items())
        self.steps = {kind: [] for kind in KINDS}
        return {"step": step, "tokens": self.tokens, "loss": means, "seconds": time.perf_counter() - self.began}

    def state(self) -> dict[str, Any]:
        """Return what `load` continues from."""
        return {"tokens": self.tokens, "steps": self.steps, "seconds": time.perf_counter() - self.began}

    def load(self, state: dict[str, Any]) -> None:
        """Continue after an earlier run's `state`."""
        self.tokens, self.steps, self.began = state["tokens"], state["steps"], time.perf_counter() - state["seconds"]
