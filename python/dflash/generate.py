"""Lossless generation: state in fixed-address tensors, one pure step, and a thin host loop around it.

The invariant between steps, per row (``s = length``): ``tokens[: s + 1]`` are emitted and ``tokens[s]`` is the
anchor, the first token of the next block. The target's cache holds positions ``0 .. s - 1``; the drafter's holds
``0 .. s - num_context - 1``, and ``context`` holds the target's features of the ``num_context`` positions after
that. Slots beyond are stale and never read. Trimming a cache is therefore nothing but this counter.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from . import ops
from .cache import LazyKVCache
from .drafter import Drafter, load_draft
from .sampling import Sampling, integer
from .target import (
    Target,
    UnsupportedTargetError,
    WeightsFingerprint,
    generation_defaults,
    refusal,
    structural_twin,
    text_config,
    unwrap,
)

_RUNNING, _STOPPED, _LENGTH, _INVALID = range(4)
_FINISH_REASONS = {_STOPPED: "stop", _LENGTH: "length"}
_NO_TOKEN = -2  # pads the stop list: no token and no marker has this id
_STOP_SLOTS = 8
_CAPACITY_STEP = 256


@dataclass(frozen=True)
class Statistics:
    """What one call of ``generate`` measured.

    Attributes:
        acceptance_lengths: per row, the tokens that each step emitted, bonus token counted (1 .. block_size).
            The first new token of a row comes from the prompt's forward pass and belongs to no step.
        block_size: rows that each step verified.
        num_new_tokens: per row, tokens emitted.
        time_to_first_token: seconds from the call to the first token of every row.
        seconds: seconds from the call to the last token.
    """

    acceptance_lengths: list[list[int]]
    block_size: int
    num_new_tokens: list[int]
    time_to_first_token: float
    seconds: float

    @property
    def acceptance_length(self) -> float:
        """Mean tokens a step, bonus token counted; NaN when no step ran."""
        steps = [length for row in self.acceptance_lengths for length in row]
        return sum(steps) / len(steps) if steps else float("nan")

    @property
    def histogram(self) -> list[int]:
        """``histogram[m]`` steps emitted ``m`` tokens, ``m = 0 .. block_size``."""
        counts = [0] * (self.block_size + 1)
        for row in self.acceptance_lengths:
            for length in row:
                counts[length] += 1
        return counts

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of the steps whose drafted token ``j + 1`` was kept, ``j = 0 .. block_size - 2``."""
        steps = [length for row in self.acceptance_lengths for length in row]
        return [sum(length > j + 1 for length in steps) / max(len(steps), 1) for j in range(self.block_size - 1)]

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows over ``seconds``, the prompt's forward pass included."""
        return sum(self.num_new_tokens) / self.seconds


@dataclass(frozen=True)
class GenerateOutput:
    """What ``return_dict_in_generate=True`` returns.

    Attributes:
        sequences: ``[batch, prompt + longest answer]`` int64, the prompt as given, right-padded with the pad id.
        finish_reasons: per row ``"stop"`` (a stop token was emitted) or ``"length"``.
        statistics: see :class:`Statistics`.
    """

    sequences: Tensor
    finish_reasons: list[str]
    statistics: Statistics


def check_fit(target: nn.Module, draft: Drafter) -> None:
    """Raise ``ValueError`` unless ``draft`` was made for a target like ``target``; names both sides, runs nothing."""
    config, theirs = draft.config, text_config(target)
    embedding = target.get_input_embeddings().weight

    def expect(what: str, ours: object, want: object) -> None:
        if ours != want:
            raise ValueError(f"the drafter does not fit the target: its {what} is {ours}, the target's is {want}")

    expect("hidden_size", config.hidden_size, theirs.hidden_size)
    if config.num_target_layers is not None:
        expect("num_target_layers", config.num_target_layers, theirs.num_hidden_layers)
    if config.vocab_size is not None:
        expect("vocab_size", config.vocab_size, theirs.vocab_size)
    if max(config.target_layer_ids) >= theirs.num_hidden_layers:
        raise ValueError(
            f"the drafter does not fit the target: it taps layers {list(config.target_layer_ids)}, "
            f"the target has layers 0 .. {theirs.num_hidden_layers - 1}"
        )
    if not 0 <= config.mask_token_id < embedding.shape[0]:
        raise ValueError(
            f"the drafter does not fit the target: its mask_token_id is {config.mask_token_id}, "
            f"the target embeds ids 0 .. {embedding.shape[0] - 1}"
        )
    expect("device", draft.device, embedding.device)
    expect("dtype", draft.dtype, embedding.dtype)


def _check_ids(ids: Tensor, attention_mask: Tensor | None, vocab: int, device: torch.device) -> Tensor:
    """The mask as bool ``[batch, length]``; raises on any prompt that cannot be run."""
    if not isinstance(ids, Tensor):
        raise TypeError(f"ids must be a tensor [batch, length] of token ids, got {type(ids).__name__}")
    if ids.dim() != 2:
        raise ValueError(f"ids must be [batch, length], got {ids.dim()} dimensions")
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"ids must be int64 or int32, got {ids.dtype}")
    if ids.device != device:
        raise ValueError(f"ids must be on the target's device, {device}, got {ids.device}")
    if ids.numel() == 0:
        raise ValueError(f"ids must hold at least one token in each row, got shape {list(ids.shape)}")
    if attention_mask is None:
        mask = torch.ones_like(ids, dtype=torch.bool)
    else:
        if not isinstance(attention_mask, Tensor) or attention_mask.shape != ids.shape:
            got = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
            raise ValueError(f"attention_mask must have the shape of ids, {list(ids.shape)}, got {got}")
        if attention_mask.device != device:
            raise ValueError(f"attention_mask must be on the target's device, {device}, got {attention_mask.device}")
        if not attention_mask.eq(0).logical_or(attention_mask.eq(1)).all():
            raise ValueError("attention_mask must hold zeros and ones only")
        mask = attention_mask.bool()
        edges = mask[:, 1:].ne(mask[:, :-1]).sum(1) + mask[:, 0] + mask[:, -1]
        if not mask.any(1).all():
            raise ValueError("attention_mask hides a whole row: every row needs at least one token")
        if edges.gt(2).any():
            raise ValueError("attention_mask has holes: a row's ones must be contiguous (pad left or right)")
    live = ids[mask]
    low, high = int(live.min()), int(live.max())
    if low < 0 or high >= vocab:
        raise ValueError(f"ids must lie in 0 .. {vocab - 1} (the target's vocabulary), got {low if low < 0 else high}")
    return mask


def _whole(name: str, value: object, low: int) -> int:
    whole = integer(name, value)
    if whole < low:
        raise ValueError(f"{name} must be an integer of at least {low}, got {whole}")
    return whole


def _check_pair(target: nn.Module, draft: Drafter | None, block_size: int | None) -> int:
    """The block size of a generator for the two; raises unless they can run together."""
    if reason := refusal(target):
        raise UnsupportedTargetError(f"this target is not supported: {reason}")
    if draft is not None:
        check_fit(target, draft)
    trained = None if draft is None else draft.config.block_size
    rows = _whole("block_size", (trained or 1) if block_size is None else block_size, 1)
    if trained is not None and rows > trained:
        raise ValueError(f"block_size must be at most the drafter's own, {trained}, got {rows}")
    return rows


@dataclass
class _Progress:
    """The host's view of a running batch, read one step late on CUDA so that the host never waits for the step."""

    length: list[int]
    done: list[int]
    acceptance_lengths: list[list[int]] = field(default_factory=list)

    def record(self, length: list[int], done: list[int]) -> None:
        for row, (old, new) in enumerate(zip(self.length, length, strict=True)):
            if new > old:
                self.acceptance_lengths[row].append(new - old)
        self.length, self.done = length, done

    @property
    def finished(self) -> bool:
        return all(self.done)


def _check_finite(progress: _Progress, ahead: int) -> None:
    """Raise if a row ended on NaN logits, met ``ahead`` positions behind its last length."""
    if _INVALID in progress.done:
        row = progress.done.index(_INVALID)
        raise ValueError(f"the target's logits are NaN in row {row} for position {progress.length[row] + ahead}")


class Generator:
    """Generates for one target and drafter, keeping caches and state between calls.

    The target is taken as it is now: hooks, adapters and a generation_config that change later are not seen, and
    tensors that are replaced later are an error. Calls from several threads run one after another.

    Args:
        target: the Hugging Face causal language model; it is never modified (see :mod:`dflash.target`).
        draft: a :class:`Drafter`, or any module that :func:`load_draft` takes. None decodes one token a step through
            the same code and, with ``block_size``, the same padded shapes: the baseline that bf16 output equals
            bit for bit.
        max_length: prompt and new tokens of a row together may not exceed this.
        batch_size: rows at most.
        block_size: rows that a step verifies, 1 to the drafter's own block size (the default); 1 without a drafter.
        compile: run the step through ``torch.compile(fullgraph=True)``; the first call then takes long.
        prefill_chunk: prompt tokens in one forward pass.

    Raises:
        ValueError: target and drafter do not fit, the target is not supported, or a number is out of range.
    """

    @torch.inference_mode(False)  # what is made here is written outside of it too
    def __init__(
        self,
        target: nn.Module,
        draft: nn.Module | None = None,
        *,
        max_length: int,
        batch_size: int = 1,
        block_size: int | None = None,
        compile: bool = False,
        prefill_chunk: int = 512,
    ) -> None:
        target = unwrap(target)
        self.max_length = _whole("max_length", max_length, 2)
        self.batch_size = batch = _whole("batch_size", batch_size, 1)
        self.prefill_chunk = _whole("prefill_chunk", prefill_chunk, 1)
        draft = None if draft is None else load_draft(draft)
        self.block_size = rows = _check_pair(target, draft, block_size)
        positions = getattr(text_config(target), "max_position_embeddings", None)
        if positions is not None and max_length > positions:
            raise ValueError(f"max_length {max_length} is past the target's max_position_embeddings, {positions}")
        self.draft = draft if rows > 1 else None
        self._take(target)
        self._lock = threading.RLock()
        device, dtype = self.target.device, self.target.dtype
        self.vocab_size = self.target.embedding_weight.shape[0]

        def index(*shape: int, fill: int = 0) -> Tensor:
            return torch.full(shape, fill, dtype=torch.int64, device=device)

        capacity = max_length + rows  # the last block may look past the end
        self.tokens = index(batch, capacity)
        self.length = index(batch)
        self.num_context = index(batch)
        self.done = index(batch, fill=_LENGTH)
        self.limits = index(batch)
        self.stop_token_ids = index(_STOP_SLOTS, fill=_NO_TOKEN)
        self.sampling = Sampling.create(batch, device)
        self._ones = torch.ones(batch, dtype=torch.float32, device=device)
        self._offsets = torch.arange(rows, device=device)
        self.target_cache = LazyKVCache(batch, capacity)
        self.draft_cache = None
        if self.draft is not None:
            config = self.draft.config
            taps = len(config.target_layer_ids)
            self.context = torch.zeros(batch, rows, taps * config.hidden_size, dtype=dtype, device=device)
            self.draft_cache = self.draft.new_cache(batch, capacity)
        if compile:
            self.step = torch.compile(self.step, fullgraph=True, dynamic=False)

    def _take(self, target: nn.Module) -> None:
        """Twin the target as it is now; the caches and the state stay."""
        self.target = Target(target, self.draft.config.target_layer_ids if self.draft is not None else ())
        self._defaults = generation_defaults(target)
        self._weights = WeightsFingerprint(target)

    # ------------------------------------------------------------------------------------------ the step

    def _propose(self, anchor: Tensor) -> Tensor:
        """Draft tokens ``[batch, block_size - 1]`` behind ``anchor [batch, 1]``; -1 without a drafter."""
        rows = self.block_size
        if self.draft is None:
            return anchor.new_full((anchor.shape[0], rows - 1), -1)
        features = self.draft.fuse(self.context, self.num_context)
        masks = anchor.new_full((anchor.shape[0], rows - 1), self.draft.config.mask_token_id)
        embeds = nn.functional.embedding(torch.cat([anchor, masks], 1), self.target.embedding_weight)
        hidden = self.draft(
            features, self.num_context, self.draft.scale_embeddings(embeds), self.length, self.draft_cache
        )
        logits = self.draft.logits(hidden[:, 1:], self.target.head)
        return self._select(logits, self.length[:, None] + self._offsets[1:], self.sampling.sharpness)

    def _select(self, logits: Tensor, positions: Tensor, sharpness: Tensor) -> Tensor:
        s = self.sampling
        return ops.select_tokens(logits, positions, s.seeds, s.temperature, s.top_k, s.top_p, s.min_p, sharpness)

    @torch.no_grad()
    def step(self) -> None:
        """Draft one block, verify it, keep the longest matching prefix and one more token; all on the device.

        Reads and writes the state tensors only: fixed shapes, no host synchronisation, nothing depends on data but
        values. A row that is done stays as it is. After the paper's section 4 (arXiv 2602.06036).
        """
        length = self.length
        anchor = self.tokens.gather(1, length[:, None])
        block = torch.cat([anchor, self._propose(anchor)], 1)
        logits, taps = self.target.forward(block.clamp(min=0), length, self.target_cache)
        posterior = self._select(logits, length[:, None] + self._offsets + 1, self._ones)
        if self.draft is not None:
            self.context.copy_(torch.cat(taps, -1))
        ops.accept_prefix_(
            block, posterior, self.stop_token_ids, self.limits, self.tokens, length, self.num_context, self.done
        )

    # ------------------------------------------------------------------------------------------ the prompt

    @torch.no_grad()
    def _prefill(self, prompts: list[Tensor], limits: list[int]) -> None:
        """Fill both caches with the prompts and choose each row's first token from its last prompt row."""
        device, chunk = self.target.device, self.prefill_chunk
        lengths = [len(prompt) for prompt in prompts]
        longest = max(lengths)
        ids = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
        self.tokens.zero_()
        self.tokens[:, :longest] = ids
        self.length.copy_(torch.tensor(lengths))
        self.limits.copy_(torch.tensor(limits))
        self.num_context.zero_()
        last_logits: list[Tensor | None] = [None] * len(prompts)
        for start in range(0, longest, chunk):
            rows = ids[:, start : start + chunk]
            past = torch.full_like(self.length, start)
            ending = {row: n - 1 - start for row, n in enumerate(lengths) if start < n <= start + chunk}
            keep = sorted(set(ending.values())) or [0]
            logits, taps = self.target.forward(rows, past, self.target_cache, torch.tensor(keep, device=device))
            for row, index in ending.items():
                last_logits[row] = logits[row, keep.index(index)]
            if self.draft is not None:
                live = (self.length - start).clamp(0, rows.shape[1])
                positions = start + torch.arange(rows.shape[1], device=device)
                positions = torch.where(positions < self.length[:, None], positions, -1)
                self.draft.inject_(self.draft.fuse(torch.cat(taps, -1), live), positions, self.draft_cache)
        first = self._select(torch.stack(last_logits)[:, None], self.length[:, None], self._ones)
        self.tokens.scatter_(1, self.length[:, None], first.clamp(min=0))
        stopped = torch.isin(first[:, 0], self.stop_token_ids)
        full = self.length + 1 >= self.limits
        self.done.copy_(torch.where(stopped, _STOPPED, torch.where(full, _LENGTH, _RUNNING)))
        self.done.masked_fill_(first[:, 0] < 0, _INVALID)

    # ------------------------------------------------------------------------------------------ the host loop

    def generate(
        self,
        ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | Sequence[int] | None = None,
        draft_sharpness: float = 1.0,
        stop_token_ids: Sequence[int] | int | None = None,
        return_dict_in_generate: bool = False,
    ) -> Tensor | GenerateOutput:
        """What :func:`dflash.generate` does, with this generator's caches; see there for the arguments.

        Raises:
            ValueError: also when the batch is larger than ``batch_size`` or a row would pass ``max_length``.
        """
        mask = _check_ids(ids, attention_mask, self.vocab_size, self.target.device)
        settings = resolve_settings(
            self._defaults, ids, max_new_tokens, temperature, top_k, top_p, min_p, stop_token_ids, self.vocab_size
        )
        if self._weights.replaced():
            raise ValueError("the target's tensors were replaced since this generator was made: make a new one")
        return self._generate(ids, mask, settings, seed, draft_sharpness, return_dict_in_generate)

    @torch.inference_mode(False)
    def _generate(
        self,
        ids: Tensor,
        mask: Tensor,
        settings: Settings,
        seed: int | Sequence[int] | None,
        draft_sharpness: float,
        return_dict_in_generate: bool,
    ) -> Tensor | GenerateOutput:
        """The call behind both doors, on checked ids; one at a time, whatever thread it comes from."""
        with self._lock, torch.autocast(ids.device.type, enabled=False):
            return self._generate_locked(ids, mask, settings, seed, draft_sharpness, return_dict_in_generate)

    def _generate_locked(
        self,
        ids: Tensor,
        mask: Tensor,
        settings: Settings,
        seed: int | Sequence[int] | None,
        draft_sharpness: float,
        return_dict_in_generate: bool,
    ) -> Tensor | GenerateOutput:
        began = time.perf_counter()
        batch = ids.shape[0]
        if batch > self.batch_size:
            raise ValueError(f"ids has {batch} rows, this generator was made for {self.batch_size}")
        prompts = [row[live].long() for row, live in zip(ids, mask, strict=True)]
        new = settings.max_new_tokens
        longest = max(len(prompt) for prompt in prompts)
        if longest + new > self.max_length:
            raise ValueError(
                f"a prompt of {longest} tokens and {new} new tokens do not fit this generator's max_length, "
                f"{self.max_length}"
            )
        self.sampling.set_(
            batch,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            seed=seed,
            draft_sharpness=draft_sharpness,
        )
        self._set_stop_token_ids(settings.stop_token_ids)
        # Rows that this call does not use hold one token and are done before they start.
        spare = self.batch_size - batch
        limits = [len(prompt) + new for prompt in prompts] + [2] * spare
        self._prefill(prompts + [ids.new_zeros(1, dtype=torch.int64)] * spare, limits)
        self.done[batch:] = _LENGTH
        progress = _Progress(self.length.tolist(), self.done.tolist(), [[] for _ in range(self.batch_size)])
        _check_finite(progress, 0)
        first = time.perf_counter() - began
        self._run(progress)
        seconds = time.perf_counter() - began
        _check_finite(progress, 1)
        counts = [progress.length[row] + 1 - len(prompts[row]) for row in range(batch)]
        sequences = ids.new_full((batch, ids.shape[1] + max(counts)), settings.pad_token_id, dtype=torch.int64)
        sequences[:, : ids.shape[1]] = ids
        for row, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
            answer = self.tokens[row, len(prompt) : len(prompt) + count]
            sequences[row, ids.shape[1] : ids.shape[1] + count] = answer
        if not return_dict_in_generate:
            return sequences
        statistics = Statistics(progress.acceptance_lengths[:batch], self.block_size, counts, first, seconds)
        return GenerateOutput(sequences, [_FINISH_REASONS[code] for code in progress.done[:batch]], statistics)

    def _run(self, progress: _Progress) -> None:
        """Replay the step until every row is done."""
        if self.tokens.device.type != "cuda":
            while not progress.finished:
                self.step()
                progress.record(self.length.tolist(), self.done.tolist())
            return
        # Two pinned snapshots in turn: while one is read, the next step is already queued. The step after the last
        # finds every row done and changes nothing.
        snapshots = [torch.empty(2, self.batch_size, dtype=torch.int64, pin_memory=True) for _ in range(2)]
        events = [torch.cuda.Event() for _ in range(2)]
        step = 0
        while not progress.finished:
            self.step()
            snapshots[step % 2].copy_(torch.stack([self.length, self.done]), non_blocking=True)
            events[step % 2].record()
            if step:
                events[(step - 1) % 2].synchronize()
                progress.record(*snapshots[(step - 1) % 2].tolist())
            step += 1

    def _set_stop_token_ids(self, ids: list[int]) -> None:
        if len(ids) > len(self.stop_token_ids):
            slots = -(-len(ids) // _STOP_SLOTS) * _STOP_SLOTS
            self.stop_token_ids = self.stop_token_ids.new_full((slots,), _NO_TOKEN)
        self.stop_token_ids.fill_(_NO_TOKEN)
        if ids:
            self.stop_token_ids[: len(ids)] = torch.tensor(ids, device=self.stop_token_ids.device)


@dataclass(frozen=True)
class Settings:
    """The arguments of one call, with the target's generation_config filled in."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    stop_token_ids: list[int]
    pad_token_id: int


def resolve_settings(
    defaults: dict,
    ids: Tensor,
    max_new_tokens: int | None,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    stop_token_ids: Sequence[int] | int | None,
    vocab: int,
) -> Settings:
    """Fill what is None from ``defaults`` (see :func:`dflash.target.generation_defaults`); a number given wins."""
    if unsupported := defaults["unsupported"]:
        listed = ", ".join(f"{name}={value!r}" for name, value in unsupported.items())
        raise ValueError(
            f"the target's generation_config asks for {listed}, which dflash does not apply; set it to None there"
        )
    if max_new_tokens is None:
        max_new_tokens = defaults["max_new_tokens"]
        if max_new_tokens is None:
            total = defaults["max_length"]
            max_new_tokens = 20 if total is None else total - ids.shape[1]
            if max_new_tokens < 1:
                raise ValueError(f"the prompt has {ids.shape[1]} tokens, generation_config.max_length is {total}")
    max_new_tokens = _whole("max_new_tokens", max_new_tokens, 1)
    sampled = defaults["do_sample"]

    def pick(given, name: str, off):
        if given is not None:
            return given
        value = defaults[name] if sampled or temperature else None
        return off if value is None else value

    if temperature is None:
        temperature = (1.0 if defaults["temperature"] is None else defaults["temperature"]) if sampled else 0.0
    if stop_token_ids is None:
        stop_token_ids = defaults["eos_token_id"]
    if hasattr(stop_token_ids, "tolist"):  # a tensor, an array or one of its scalars
        stop_token_ids = stop_token_ids.tolist()
    stop = list(stop_token_ids) if isinstance(stop_token_ids, Iterable) else [stop_token_ids]
    stop = [integer("stop_token_ids", token) for token in stop]
    for token in stop:
        if not 0 <= token < vocab:
            raise ValueError(f"stop_token_ids must lie in 0 .. {vocab - 1}, got {token}")
    pad = defaults["pad_token_id"]
    if pad is None:
        pad = stop[0] if stop else 0
    return Settings(
        max_new_tokens,
        temperature,
        pick(top_k, "top_k", 0),
        pick(top_p, "top_p", 1.0),
        pick(min_p, "min_p", 0.0),
        stop,
        pad,
    )


# ---------------------------------------------------------------------------------------------- one-shot


class _Kept:
    """The generator of the last (target, draft) of one-shot calls. It holds neither of the user's modules."""

    def __init__(
        self, target: nn.Module, draft: nn.Module | None, block_size: int | None, generator: Generator
    ) -> None:
        self.generator = generator
        self.block_size = block_size
        modules = [module for module in (target, draft) if module is not None]
        self.weights = [WeightsFingerprint(module) for module in modules]
        self.finalizers = [weakref.finalize(module, release) for module in modules]

    def serves(
        self, target: nn.Module, draft: nn.Module | None, block_size: int | None, batch: int, length: int
    ) -> bool:
        modules = [module for module in (target, draft) if module is not None]
        return (
            self.generator.batch_size == batch
            and self.generator.max_length >= length
            and self.block_size == block_size
            and len(self.weights) == len(modules)
            and all(weights.matches(module) for weights, module in zip(self.weights, modules, strict=True))
        )


_kept: _Kept | None = None
_one_shot = threading.RLock()


def release() -> None:
    """Free what one-shot :func:`generate` keeps between calls: both caches and the step's state."""
    global _kept
    if _kept is not None:
        for finalizer in _kept.finalizers:
            finalizer.detach()
    _kept = None


def generate(
    target: nn.Module,
    draft: nn.Module | None,
    ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | Sequence[int] | None = None,
    draft_sharpness: float = 1.0,
    stop_token_ids: Sequence[int] | int | None = None,
    block_size: int | None = None,
    return_dict_in_generate: bool = False,
) -> Tensor | GenerateOutput:
    """Generate exactly what ``target`` alone would write, drafting blocks with ``draft``.

    An argument left None follows the target's ``generation_config``; what is unset there too is off (transformers'
    own ``generate`` would then sample with top_k = 50).

    At temperature 0 the output is that of ``target.generate(do_sample=False)``. At a positive temperature each token
    is ``argmax(filtered(logits / temperature) + gumbel(seed, position, token))``: a function of the seed, the position
    and the prefix alone, so that the text is the same for every drafter, block size and batch (drafter-invariant
    speculative decoding; Daliri et al., "Coupling without communication and drafter-invariant speculative decoding").

    The caches of the last (target, draft) are kept for the next call (:func:`release` frees them); the target itself is
    looked at anew each time, which takes about a millisecond a layer. Calls from several threads run one after another.

    Args:
        target: a causal language model of transformers; never modified.
        draft: a drafter from :func:`load_draft`, or a module it takes. None decodes one token a step.
        ids: ``[batch, length]`` int64 or int32 prompts, on the target's device.
        attention_mask: ``[batch, length]`` of zeros and ones, the ones of a row contiguous (padding left or right).
        max_new_tokens: at least 1; 20 when the generation_config sets neither this nor max_length.
        temperature: 0 is greedy.
        top_k: keep the ``top_k`` best tokens; 0 is off.
        top_p: in (0, 1]; keep the most probable tokens up to this mass; 1 is off.
        min_p: in [0, 1]; drop tokens less probable than ``min_p`` times the best; 0 is off.
        seed: an integer, or one per row; row r of a batch with one seed uses ``sampling.fold(seed, r)``. None draws
            one from torch's default generator.
        draft_sharpness: the drafter proposes ``argmax(draft_sharpness * logits / temperature + gumbel)``; from 0 up,
            ``inf`` is its plain argmax. Changes the speed, never the text.
        stop_token_ids: ids that end a row, emitted as its last token; an empty list for none.
        block_size: 1 to the drafter's own. Changes the speed, never the text.
        return_dict_in_generate: return a :class:`GenerateOutput` with statistics.

    Returns:
        ``[batch, length + longest answer]`` int64: the prompt as given, then the new tokens, right-padded with the
        pad id; or a :class:`GenerateOutput`.

    Raises:
        ValueError: an argument is out of range, target and drafter do not fit, the target is not supported, the row
            would pass the target's ``max_position_embeddings``, or the target's logits are NaN.
        TypeError: an argument has the wrong type.
    """
    global _kept
    target = unwrap(target)
    if reason := refusal(target):
        raise UnsupportedTargetError(f"this target is not supported: {reason}")
    embedding = target.get_input_embeddings().weight
    mask = _check_ids(ids, attention_mask, embedding.shape[0], embedding.device)
    settings = resolve_settings(
        generation_defaults(target),
        ids,
        max_new_tokens,
        temperature,
        top_k,
        top_p,
        min_p,
        stop_token_ids,
        embedding.shape[0],
    )
    needed = int(mask.sum(1).max()) + settings.max_new_tokens
    positions = getattr(text_config(target), "max_position_embeddings", None)
    if positions is not None and needed > positions:
        raise ValueError(
            f"a prompt of {needed - settings.max_new_tokens} tokens and {settings.max_new_tokens} new tokens pass the "
            f"target's max_position_embeddings, {positions}"
        )
    # Checked again by the generator, but here before anything is made or dropped.
    Sampling.create(ids.shape[0]).set_(
        ids.shape[0],
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
        seed=0 if seed is None else seed,
        draft_sharpness=draft_sharpness,
    )
    with _one_shot:
        if _kept is not None and _kept.serves(target, draft, block_size, ids.shape[0], needed):
            _kept.generator._take(target)  # hooks, adapters and attributes may have changed; the caches stay
        else:
            drafter = None if draft is None else load_draft(draft)
            _check_pair(target, drafter, block_size)
            release()
            capacity = -(-needed // _CAPACITY_STEP) * _CAPACITY_STEP
            if positions is not None:
                capacity = min(capacity, positions)
            if drafter is draft and draft is not None:
                drafter = structural_twin(draft)
            generator = Generator(target, drafter, max_length=capacity, batch_size=ids.shape[0], block_size=block_size)
            _kept = _Kept(target, draft, block_size, generator)
        return _kept.generator._generate(ids, mask, settings, seed, draft_sharpness, return_dict_in_generate)
