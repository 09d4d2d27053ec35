"""Lossless generation: state in fixed-address tensors, one pure step, and a thin host loop around it.

The invariant between steps, per row (``s = length``): ``tokens[: s + 1]`` are emitted and ``tokens[s]`` is the
anchor, the first token of the next block. The target's cache holds positions ``0 .. s - 1``; the drafter's holds
``0 .. s - num_context - 1``, and ``context`` holds the target's features of the ``num_context`` positions after
that. Slots beyond are stale and never read. Trimming a cache is therefore nothing but this counter.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from . import ops
from .drafter import DraftConfig, Drafter, load_draft
from .engine.runner import Direct, Replay
from .proposers import AutoSharpness, denoise
from .sampling import HostRules, LogitRules, RuleArguments, RuleSettings, Sampling, integer, rejection
from .streaming import TextDecoder, check_streamer, first_stop
from .target import (
    Target,
    UnsupportedTargetError,
    WeightsFingerprint,
    first_hook,
    generation_defaults,
    refusal,
    snapshot,
    stop_string_criterion,
    structural_twin,
    text_config,
    unwrap,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

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
        seconds: seconds from the call to the last token; in a running call, to now.
        num_prefilled_tokens: per row, prompt tokens that were run; the others were still in the caches of the call
            before (see :class:`Generator`).
    """

    acceptance_lengths: list[list[int]]
    block_size: int
    num_new_tokens: list[int]
    time_to_first_token: float
    seconds: float
    num_prefilled_tokens: list[int] = field(default_factory=list)

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
        finish_reasons: per row ``"stop"`` (a stop token was emitted, or a stop string completed) or ``"length"``.
        statistics: see :class:`Statistics`.
    """

    sequences: Tensor
    finish_reasons: list[str]
    statistics: Statistics


@dataclass(frozen=True)
class StreamEvent:
    """What one step of a call added; the first event is the prompt's, with each row's first token.

    Attributes:
        ids: per row, the new token ids; none for a row that has finished.
        accepted: per row, how many of them, counted from the first, were drafted and accepted. The one after them, if
            there is one, is the bonus token, which the target chose itself.
        text: per row, the text that became final; None without a tokenizer. It never ends inside a character or inside
            what may become a stop string, and comes complete with the row's last event: joined, it is
            ``tokenizer.decode(answer)``.
        finish_reasons: per row, ``"stop"`` or ``"length"`` from the event of its last token on; None while it runs.
        statistics: the call so far.
    """

    ids: list[list[int]]
    accepted: list[int]
    text: list[str] | None
    finish_reasons: list[str | None]
    statistics: Statistics


def check_fit(target: nn.Module, draft: Drafter) -> None:
    """Raise ``ValueError`` unless ``draft`` was made for a target like ``target``; names both sides, runs nothing."""
    check_config(target, draft.config)
    embedding = target.get_input_embeddings().weight
    _expect("device", draft.device, embedding.device)
    _expect("dtype", draft.dtype, embedding.dtype)


def _expect(what: str, ours: object, want: object) -> None:
    if ours != want:
        raise ValueError(f"the drafter does not fit the target: its {what} is {ours}, the target's is {want}")


def check_config(target: nn.Module, config: DraftConfig) -> None:
    """:func:`check_fit` of a drafter's config alone; ``target`` may be on the meta device."""
    theirs, embedding = text_config(target), target.get_input_embeddings().weight
    _expect("hidden_size", config.hidden_size, theirs.hidden_size)
    if config.num_target_layers is not None:
        _expect("num_target_layers", config.num_target_layers, theirs.num_hidden_layers)
    if config.vocab_size is not None:
        _expect("vocab_size", config.vocab_size, theirs.vocab_size)
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


def _check_acceptance(acceptance: str, denoise_steps: int, draft_sharpness: float | Literal["auto"]) -> None:
    """Raise unless ``acceptance`` is known and can work with these settings."""
    if acceptance not in ("keyed", "rejection"):
        raise ValueError(f'acceptance must be "keyed" or "rejection", got {acceptance!r}')
    if acceptance == "keyed":
        return
    if denoise_steps > 1:
        raise ValueError(
            f'acceptance="rejection" needs denoise_steps=1, got {denoise_steps}: the tokens would be biased'
        )
    if draft_sharpness not in ("auto", 1):
        raise ValueError(
            'acceptance="rejection" draws drafts from the drafter\'s own distribution: draft_sharpness must be 1 or '
            f'"auto" there, got {draft_sharpness!r}'
        )


def _check_drafts(call: Call, drafts: bool) -> None:
    """Raise if ``call`` needs drafts and there are none."""
    if call.acceptance == "rejection" and not drafts:
        raise ValueError('acceptance="rejection" needs drafts to reject, got draft=None or block_size=1')


@dataclass
class _Progress:
    """The host's view of a running batch, read one step late on CUDA so that the host never waits for the step.

    ``new_ids`` and ``accepted`` describe the last record, and are kept only where the call reads ids. ``closed`` rows
    were ended by the host; what the device says of them was written before it knew.
    """

    length: list[int]
    done: list[int]
    acceptance_lengths: list[list[int]]
    prefilled: list[int] = field(default_factory=list)
    time_to_first_token: float = 0.0
    new_ids: list[list[int]] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    closed: set[int] = field(default_factory=set)

    def record(self, report: list[list[int]], reads_ids: bool) -> None:
        """Take over one report of :meth:`Generator.step`.

        Raises:
            RuntimeError: a row that was running neither moved nor ended, so that the loop would not either.
        """
        self.new_ids, self.accepted = [], []
        for row, (length, done, *ids) in enumerate(report):
            emitted = 0
            if row not in self.closed:
                emitted = length - self.length[row]
                if emitted:
                    self.acceptance_lengths[row].append(emitted)
                elif self.done[row] == done == _RUNNING:
                    raise RuntimeError(f"a step did nothing for row {row}, which is running: was it launched at all?")
                self.length[row], self.done[row] = length, done
            if reads_ids:
                rows = len(ids) // 2
                new, drafts = ids[:emitted], ids[rows + 1 :]
                matches = [token == draft for token, draft in zip(new, drafts, strict=False)]
                self.new_ids.append(new)
                self.accepted.append((*matches, False).index(False))

    def close(self, row: int, kept: int) -> None:
        """End ``row`` behind the first ``kept`` of its new ids."""
        dropped = len(self.new_ids[row]) - kept
        self.new_ids[row] = self.new_ids[row][:kept]
        self.accepted[row] = min(self.accepted[row], kept)
        if dropped:
            self.length[row] -= dropped
            self.acceptance_lengths[row][-1] -= dropped
        self.done[row] = _STOPPED
        self.closed.add(row)

    @property
    def finished(self) -> bool:
        return all(self.done)


def _check_finite(progress: _Progress, ahead: int) -> None:
    """Raise if a row ended on NaN logits, met ``ahead`` positions behind its last length."""
    if _INVALID in progress.done:
        row = progress.done.index(_INVALID)
        raise ValueError(f"the target's logits are NaN in row {row} for position {progress.length[row] + ahead}")


def _own(function: Callable) -> Callable:
    """``function`` in a code object of its own, by which torch finds and counts compiled graphs."""

    def call(*arguments: Any) -> Any:
        return function(*arguments)

    call.__code__ = call.__code__.replace()
    return call


def _compiled(step: Callable[[], None], kind: Callable[[], Hashable]) -> Callable[[], None]:
    """``step`` as one graph for each value of ``kind()``, which says everything that its branches depend on.

    torch would guard a graph by some 400 tests of modules and tensors, a tenth of the time of a small step, and check
    the shape of every input again; none of them can change while :class:`Generator` holds what it was made with.
    """
    graphs: dict[Hashable, Callable[[], None]] = {}

    def run() -> None:
        key = kind()
        if key not in graphs:
            # Without guards torch would take another generator's graph.
            options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe, "size_asserts": False}
            graphs[key] = torch.compile(_own(step), fullgraph=True, dynamic=False, options=options)
        graphs[key]()

    return run


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
        denoise_steps: passes of the drafter over each block, see :func:`generate`.
        compile: run the step through ``torch.compile(fullgraph=True)``, one graph for each combination of rules and
            ways to accept, whose first step then takes long. Hooks put on the drafter later are not seen. On a GPU it
            is the target's part of the step that is compiled, inside the CUDA graph.
        graph: on a GPU, replay the step as one CUDA graph: ``"auto"`` where that is possible (:attr:`graph_reason`
            tells why not), True to refuse a call where it is not, False for one kernel at a time. Changes the speed,
            never the text.
        fused: run the layers of a Llama, Mistral, Qwen2 or Qwen3 that is exactly transformers' own on this package's
            ops instead of its modules: ``"auto"`` on CPU, and not on a GPU, where the two have not been compared yet;
            True to refuse any other target, False for the modules. On a GPU a pass of more than 256 rows (batch x
            block, or a prompt's chunk) keeps the modules all the same. The same sums rounded at other places: in fp32
            the text stays the same, in bf16 a near-tie may fall differently.
        prefill_chunk: prompt tokens in one forward pass.
        reuse_prefix: run only what is new of a prompt whose first tokens are, row by row, those that the call before
            left in the caches: a conversation then costs its last turn. The keys of an answer were computed in blocks
            and not in a prompt, which is the same sum in another order: in fp32 the text stays the same, in bf16 a
            near-tie may fall differently than in a generator that starts afresh. Weights that were moved, replaced
            or changed in place are noticed; after a change through ``tensor.data`` call :meth:`reset`.

    A call that starts while a stream of the same generator is not at its end takes over; the stream then raises
    ``RuntimeError``.

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
        denoise_steps: int = 1,
        compile: bool = False,
        graph: bool | Literal["auto"] = "auto",
        fused: bool | Literal["auto"] = "auto",
        prefill_chunk: int = 512,
        reuse_prefix: bool = True,
    ) -> None:
        target = unwrap(target)
        self.max_length = _whole("max_length", max_length, 2)
        self.batch_size = batch = _whole("batch_size", batch_size, 1)
        self.denoise_steps = _whole("denoise_steps", denoise_steps, 1)
        self.prefill_chunk = _whole("prefill_chunk", prefill_chunk, 1)
        draft = None if draft is None else load_draft(draft)
        self.block_size = rows = _check_pair(target, draft, block_size)
        positions = getattr(text_config(target), "max_position_embeddings", None)
        if positions is not None and max_length > positions:
            raise ValueError(f"max_length {max_length} is past the target's max_position_embeddings, {positions}")
        if graph not in (True, False, "auto"):
            raise ValueError(f'graph must be True, False or "auto", got {graph!r}')
        device = target.get_input_embeddings().weight.device
        if graph is True and device.type != "cuda":
            raise ValueError(f"graph=True needs a target on a GPU, this one is on {device}")
        if fused not in (True, False, "auto"):
            raise ValueError(f'fused must be True, False or "auto", got {fused!r}')
        self.graph, self.fused = graph, fused
        self.draft = draft if rows > 1 else None
        self._runner: Direct | Replay | None = None
        self._take(target)
        dtype = self.target.dtype
        self.vocab_size = self.target.embedding_weight.shape[0]

        def index(*shape: int, fill: int = 0) -> Tensor:
            return torch.full(shape, fill, dtype=torch.int64, device=device)

        capacity = max_length + rows  # the last block may look past the end
        self.tokens = index(batch, capacity)
        self.length = index(batch)
        self.num_context = index(batch)
        self.done = index(batch, fill=_LENGTH)
        self.block = index(batch, rows)  # the anchor and the proposals of the last step
        self.report = index(batch, 2 + 2 * rows)  # what the host reads of a step: length, done, posterior, block
        self.limits = index(batch)
        self.prompt_length = index(batch)
        self.stop_token_ids = index(_STOP_SLOTS, fill=_NO_TOKEN)
        self.sampling = Sampling.create(batch, device)
        self.rules: LogitRules | None = None
        self.host_rules: HostRules | None = None
        self._known_rules: dict[tuple, LogitRules] = {}
        self._ones = torch.ones(batch, dtype=torch.float32, device=device)
        self._offsets = torch.arange(rows, device=device)
        self.target_cache = self.target.new_cache(batch, capacity)
        self.draft_cache = None
        if self.draft is not None:
            config = self.draft.config
            taps = len(config.target_layer_ids)
            self.context = torch.zeros(batch, rows, taps * config.hidden_size, dtype=dtype, device=device)
            self.draft_cache = self.draft.new_cache(batch, capacity)
            self.auto = AutoSharpness(batch, rows - 1, device)
        # How the call drafts and accepts: values of Python, fixed while it runs, so that a step branches on no tensor.
        self._adapts = self._rejects = False
        self._schedule: tuple[int, ...] = ()
        self.reuse_prefix = reuse_prefix
        self._lock = threading.RLock()
        self._current: Call | None = None  # the call that the state belongs to
        self._whole = False  # between two steps: the caches hold what `length` and `num_context` say
        self._ran: list[WeightsFingerprint] = []  # the weights that the caches were computed with
        self._runner = Replay(self.report) if device.type == "cuda" else Direct(self.report)
        # The step after the last may still run; the memory that it writes to must not be another's by then.
        weakref.finalize(self, self._runner.drain).atexit = False
        self._captured: list[WeightsFingerprint] = []  # whose addresses the graphs hold
        if compile and device.type == "cuda":
            self._run_target = torch.compile(_own(self._run_target), dynamic=False)
        elif compile:
            self.step = _compiled(self.step, self._kind)

    def _kind(self) -> Hashable:
        """What the branches of :meth:`step`, and the shapes and addresses of its tensors, depend on.

        Rules are never freed, and the stop list is replaced only by a longer one.
        """
        return self._adapts, self._rejects, self._schedule, id(self.rules), len(self.stop_token_ids)

    def _take(self, target: nn.Module) -> None:
        """Twin the target as it is now; the caches and the state stay."""
        taps = self.draft.config.target_layer_ids if self.draft is not None else ()
        self.target = Target(target, taps, self.fused)
        self._defaults = generation_defaults(target)
        self._weights = WeightsFingerprint(target)
        self._structure = snapshot(target)
        self._hook = first_hook(target)
        if self._runner is not None:
            self._runner.clear()

    @property
    def graph_reason(self) -> str:
        """Why the last step ran kernel by kernel; empty when it was replayed as a CUDA graph, or will be soon."""
        return self._runner.reason

    def _obstacle(self, host_rules: bool) -> str:
        """Why the steps of a call must not be captured; empty when they may."""
        if self.graph is False:
            return "graph=False was asked for"
        if host_rules:
            return "logits_processor and stopping_criteria run on the host"
        if self._hook:
            return f"a graph would not call the target's hook on {self._hook}"
        if self.draft is not None and (hook := first_hook(self.draft)):
            return f"a graph would not call the drafter's hook on {hook}"
        return ""

    # ------------------------------------------------------------------------------------------ the step

    def _draft_logits(self, block: Tensor, features: Tensor) -> Tensor:
        """One draft pass over ``block [batch, block_size]``: the logits ``[batch, block_size - 1, vocab]``."""
        embeds = nn.functional.embedding(block, self.target.embedding_weight)
        hidden = self.draft(
            features, self.num_context, self.draft.scale_embeddings(embeds), self.length, self.draft_cache
        )
        # One matrix: of rows that are not dense torch makes a product for each sequence, and each reads the whole head.
        logits = self.draft.logits(hidden[:, 1:].flatten(0, 1), self.target.draft_head).unflatten(0, (len(block), -1))
        return logits if self.rules is None else self.rules.apply_to_drafts(logits, self.length)

    def _propose(self, anchor: Tensor) -> Tensor:
        """Draft tokens ``[batch, block_size - 1]`` behind ``anchor [batch, 1]``; -1 without a drafter."""
        drafts = anchor.new_full((anchor.shape[0], self.block_size - 1), -1)
        if self.draft is None:
            return drafts
        mask, positions = self.draft.config.mask_token_id, self.length[:, None] + self._offsets[1:]
        features = self.draft.fuse(self.context, self.num_context)
        block = torch.full_like(drafts, mask)
        if self._rejects:
            logits = self._draft_logits(torch.cat([anchor, block], 1), features)
            self.draft_probabilities.copy_(rejection.probabilities(logits, self.sampling))
            return rejection.propose(self.draft_probabilities, positions, self.sampling.seeds)
        known = candidates = None
        for keep in (*self._schedule, None):
            logits = self._draft_logits(torch.cat([anchor, block], 1), features)
            fresh = self._candidates(logits, positions)
            candidates = fresh if known is None else torch.where(known[:, None], candidates, fresh)
            drafts = self.auto.pick(candidates) if self._adapts else candidates[:, 0]
            if keep is not None:
                known = denoise.most_confident(logits, drafts, known, keep)
                block = torch.where(known, drafts.clamp(min=0), mask)
                features = features[:, :0]  # the context is in the draft cache now
        if self._adapts:
            self.auto.candidates.copy_(candidates)
        return drafts

    def _candidates(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Proposals ``[batch, n, block_size - 1]``: of each level of "auto", or of the sharpness asked for."""
        if not self._adapts:
            return self._select(logits, positions, self.sampling.sharpness)[:, None]
        return torch.stack([self._select(logits, positions, level) for level in self.auto.levels.unbind()], 1)

    def _select(self, logits: Tensor, positions: Tensor, sharpness: Tensor) -> Tensor:
        s = self.sampling
        return ops.select_tokens(logits, positions, s.seeds, s.temperature, s.top_k, s.top_p, s.min_p, sharpness)

    def _verify(self) -> tuple[Tensor, Tensor]:
        """A drafted block ``[batch, block_size]`` and the target's logits of its rows, under the rules asked for."""
        length = self.length
        anchor = self.tokens.gather(1, length[:, None])
        block = torch.cat([anchor, self._propose(anchor)], 1, out=self.block)
        logits, taps = self._run_target(block.clamp(min=0))
        if self.draft is not None:
            torch.cat(taps, -1, out=self.context)
        if self.rules is not None:
            logits = self.rules.apply(logits, self.tokens, length, block.clamp(min=0))
        return block, logits

    def _run_target(self, block: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The target's pass over ``block [batch, block_size]``: logits and taps."""
        return self.target.forward(block, self.length, self.target_cache)

    @torch.no_grad()
    def step(self) -> None:
        """Draft one block, verify it, keep the longest matching prefix and one more token; all on the device.

        Reads and writes the state tensors only: fixed shapes, no host synchronisation, nothing depends on data but
        values. A row that is done stays as it is. ``report`` tells the host. After the paper's section 4
        (arXiv 2602.06036).
        """
        block, logits = self._verify()
        length = self.length
        positions = length[:, None] + self._offsets + 1
        if self._rejects:
            p = rejection.probabilities(logits, self.sampling)
            posterior = rejection.verify(block[:, 1:], self.draft_probabilities, p, positions, self.sampling.seeds)
        else:
            posterior = self._select(logits, positions, self._ones)
        self._accept(block, posterior, self.limits)

    def _accept(self, block: Tensor, posterior: Tensor, limits: Tensor, stopped: Sequence[int] = ()) -> None:
        """Emit what was accepted and advance every row; rows in ``stopped`` end. Then tell the host."""
        ops.accept_prefix_(
            block, posterior, self.stop_token_ids, limits, self.tokens, self.length, self.num_context, self.done
        )
        for row in stopped:
            self.done[row] = _STOPPED
        if self._adapts:
            self.auto.observe_(posterior, self.num_context, self.done)
        torch.cat([self.length[:, None], self.done[:, None], posterior, block], 1, out=self.report)

    @torch.no_grad()
    def _step_with_processors(self) -> None:
        """The step for Python processors and criteria: one block verified, then its rows walked on the host."""
        block, logits = self._verify()
        self._accept(block, *self._walk(block, logits, self.length, self.done.tolist()))

    def _walk(self, block: Tensor, logits: Tensor, length: Tensor, done: list[int]) -> tuple[Tensor, Tensor, list[int]]:
        """Choose a block's tokens in order, calling processors and criteria as one-token decoding would.

        Args:
            block: ``[batch, rows]``, the last emitted token and drafts; logits: ``[batch, rows, vocab]``; length:
                ``[batch]``, the index of the last emitted token; done: per row, nonzero to leave it out.

        Returns:
            The tokens chosen ``[batch, rows]`` up to each row's first that is no draft, the limits ``[batch]``, lower
            where a criterion ended the row, and the rows that one ended.
        """
        rules, positions = self.host_rules, length[:, None] + self._offsets[: block.shape[1]] + 1
        posterior, limits = torch.zeros_like(block), self.limits.clone()
        tokens = self.tokens.clone()
        drafts, ends, stop = block.tolist(), self.limits.tolist(), set(self.stop_token_ids.tolist())
        first = (length + 1).tolist()
        walking = [row for row in range(rules.rows) if done[row] == _RUNNING]
        stopped = []
        for j in range(block.shape[1]):
            scores = logits[:, j : j + 1].to(torch.float32, copy=True)
            for row in walking:
                scores[row] = rules.process(tokens[row : row + 1, : first[row] + j], scores[row].clone())
            posterior[:, j : j + 1] = chosen = self._select(scores, positions[:, j : j + 1], self._ones)
            tokens.scatter_(1, positions[:, j : j + 1], chosen.clamp(min=0))
            matching = []
            for row, token in ((row, int(chosen[row])) for row in walking):
                past = first[row] + j + 1
                if token >= 0 and rules.stops(tokens[row : row + 1, :past]):
                    limits[row] = past
                    stopped.append(row)
                elif token not in stop and past < ends[row] and j + 1 < block.shape[1] and token == drafts[row][j + 1]:
                    matching.append(row)
            walking = matching
            if not walking:
                break
        return posterior, limits, stopped

    # ------------------------------------------------------------------------------------------ the prompt

    def reset(self) -> None:
        """Forget what the caches hold, so that the next call runs its whole prompt. An unfinished stream is ended."""
        with self._lock:
            self._current, self._whole = None, False

    @torch.no_grad()
    def _prefix(self, ids: Tensor, lengths: list[int]) -> list[int]:
        """How many leading tokens of each prompt need not be run, because both caches hold them.

        At least a prompt's last token is run: its logits choose the first new one.
        """
        shared = ids.eq(self.tokens[:, : ids.shape[1]])
        shared &= torch.arange(ids.shape[1], device=ids.device) < self.length[:, None]
        shared = shared.long().cumprod(1).sum(1)
        shared, drafted = torch.stack([shared, self.length - self.num_context]).tolist()
        kept = [min(have, length - 1) for have, length in zip(shared, lengths, strict=True)]
        # Every row runs as many positions as the one with the most; they must fit behind what it keeps.
        most = max(length - have for length, have in zip(lengths, kept, strict=True))
        kept = [min(have, self.tokens.shape[1] - most) for have in kept]
        if self.draft is not None and any(have > held for have, held in zip(kept, drafted, strict=True)):
            # The features of the last step's tokens wait in `context` for a step that will not come.
            index = torch.arange(self.context.shape[1], device=ids.device)
            positions = (self.length - self.num_context)[:, None] + index
            positions = torch.where(index < self.num_context[:, None], positions, -1)
            self.draft.inject_(self.draft.fuse(self.context, self.num_context), positions, self.draft_cache)
        return kept

    @torch.no_grad()
    def _prefill(self, prompts: list[Tensor], limits: list[int], reuse: bool) -> list[int]:
        """Fill both caches with the prompts and choose each row's first token from its last prompt row.

        Returns:
            Per row, how many tokens of its prompt were run.
        """
        device, chunk = self.target.device, self.prefill_chunk
        lengths = [len(prompt) for prompt in prompts]
        pad = torch.nn.utils.rnn.pad_sequence
        ids = pad(prompts, batch_first=True)
        kept = self._prefix(ids, lengths) if reuse else [0] * len(prompts)
        self.tokens.zero_()
        self.tokens[:, : ids.shape[1]] = ids
        self.length.copy_(torch.tensor(lengths))
        self.prompt_length.copy_(self.length)
        self.limits.copy_(torch.tensor(limits))
        self.num_context.zero_()
        ids = pad([prompt[have:] for prompt, have in zip(prompts, kept, strict=True)], batch_first=True)
        counts = [length - have for length, have in zip(lengths, kept, strict=True)]
        held = torch.tensor(kept, device=device)
        last_logits: list[Tensor | None] = [None] * len(prompts)
        starts = range(0, ids.shape[1], chunk)
        # Which rows of a chunk end a prompt; put on the device at once, since each transfer waits for what is queued.
        ends = [sorted({n - 1 - start for n in counts if start < n <= start + chunk}) for start in starts]
        keeps = torch.tensor([index for keep in ends for index in keep], device=device).split([len(k) for k in ends])
        for start, keep, keep_on_device in zip(starts, ends, keeps, strict=True):
            rows = ids[:, start : start + chunk]
            past = held + start
            logits, taps = self.target.forward(rows, past, self.target_cache, keep_on_device)
            for row, n in enumerate(counts):
                if n - 1 - start in keep:
                    last_logits[row] = logits[row, keep.index(n - 1 - start)]
            if self.draft is not None:
                live = (self.length - past).clamp(0, rows.shape[1])
                positions = past[:, None] + torch.arange(rows.shape[1], device=device)
                positions = torch.where(positions < self.length[:, None], positions, -1)
                self.draft.inject_(self.draft.fuse(torch.cat(taps, -1), live), positions, self.draft_cache)
        logits, ended = torch.stack(last_logits)[:, None], []
        last = self.length - 1
        anchor = self.tokens.gather(1, last[:, None])
        if self.rules is not None:
            logits = self.rules.apply(logits, self.tokens, last, anchor)
        if self.host_rules is None:
            first = self._select(logits, self.length[:, None], self._ones)
        else:
            first, _, ended = self._walk(anchor, logits, last, [_RUNNING] * len(prompts))
        self.tokens.scatter_(1, self.length[:, None], first.clamp(min=0))
        stopped = torch.isin(first[:, 0], self.stop_token_ids)
        full = self.length + 1 >= self.limits
        self.done.copy_(torch.where(stopped, _STOPPED, torch.where(full, _LENGTH, _RUNNING)))
        self.done.masked_fill_(first[:, 0] < 0, _INVALID)
        if ended:
            self.done[ended] = _STOPPED
        return counts

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
        draft_sharpness: float | Literal["auto"] = "auto",
        acceptance: Literal["keyed", "rejection"] = "keyed",
        stop_token_ids: Sequence[int] | int | None = None,
        stop_strings: Sequence[str] | str | None = None,
        tokenizer: Any = None,
        streamer: Any = None,
        num_return_sequences: int | None = None,
        return_dict_in_generate: bool = False,
        **rules: Unpack[RuleArguments],
    ) -> Tensor | GenerateOutput:
        """What :func:`dflash.generate` does, with this generator's caches; see there for the arguments.

        Raises:
            ValueError: also when the batch is larger than ``batch_size`` or a row would pass ``max_length``.
        """
        call = self._plan(
            ids,
            attention_mask=attention_mask,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            draft_sharpness=draft_sharpness,
            acceptance=acceptance,
            stop_token_ids=stop_token_ids,
            stop_strings=stop_strings,
            tokenizer=tokenizer,
            streamer=streamer,
            num_return_sequences=num_return_sequences,
            **rules,
        )
        return self._generate(call, return_dict_in_generate)

    def stream(
        self, ids: Tensor, *, tokenizer: Any = None, skip_special_tokens: bool = False, **arguments: Any
    ) -> Iterator[StreamEvent]:
        """What :func:`dflash.stream` does, with this generator's caches; see there.

        Closing the iterator, or an interrupt, leaves the generator ready for the next call.

        Raises:
            ValueError: also when the batch is larger than ``batch_size`` or a row would pass ``max_length``.
        """
        call = self._plan(ids, tokenizer=tokenizer, **_streaming(arguments))
        return self._stream(call, skip_special_tokens)

    def _plan(self, ids: Tensor, **arguments: Any) -> Call:
        kept = {"reuse_prefix": self.reuse_prefix, "denoise_steps": self.denoise_steps}
        call = plan(self._defaults, self.vocab_size, self.target.device, ids, **kept, **arguments)
        _check_drafts(call, self.draft is not None)
        batch, longest = len(call.prompts), max(map(len, call.prompts))
        if batch > self.batch_size:
            raise ValueError(f"ids has {batch} rows, this generator was made for {self.batch_size}")
        if longest + call.settings.max_new_tokens > self.max_length:
            raise ValueError(
                f"a prompt of {longest} tokens and {call.settings.max_new_tokens} new tokens do not fit this "
                f"generator's max_length, {self.max_length}"
            )
        if self._weights.replaced():
            raise ValueError("the target's tensors were replaced since this generator was made: make a new one")
        rules = call.settings.rules
        if self.graph is True and (reason := self._obstacle(bool(rules.logits_processor or rules.stopping_criteria))):
            raise ValueError(f"graph=True cannot be followed: {reason}")
        return call

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One call at a time, whatever thread it comes from, and with none of the modes of its surroundings."""
        device = self.tokens.device
        current = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
        with self._lock, current, torch.inference_mode(False), torch.autocast(device.type, enabled=False):
            yield

    def _generate(self, call: Call, return_dict_in_generate: bool, prompt_was_put: bool = False) -> Any:
        """Run ``call`` to its end."""
        streamer, progress = call.streamer, None
        began = time.perf_counter()
        with self._exclusive():
            try:
                if streamer is not None and not prompt_was_put:
                    streamer.put(call.ids.cpu())
                for progress in self._play(call, reads_ids=streamer is not None):
                    if streamer is not None and progress.new_ids[0]:
                        streamer.put(torch.tensor(progress.new_ids[0]))
            finally:
                if streamer is not None:
                    streamer.end()
            seconds = time.perf_counter() - began
            sequences = self._sequences(call, progress)
        if not return_dict_in_generate:
            return sequences
        reasons = [_FINISH_REASONS[code] for code in progress.done[: len(call.prompts)]]
        return GenerateOutput(sequences, reasons, self._statistics(call, progress, seconds))

    def _stream(self, call: Call, skip_special_tokens: bool) -> Iterator[StreamEvent]:
        """The events of ``call``; checked now, run as they are asked for."""
        decoders = None
        if call.tokenizer is not None:
            decoders = [TextDecoder(call.tokenizer, call.stop_strings, skip_special_tokens) for _ in call.prompts]

        def events() -> Iterator[StreamEvent]:
            began = time.perf_counter()
            playing = self._play(call, reads_ids=True)
            ended: set[int] = set()
            try:
                while True:
                    with self._exclusive():
                        progress = next(playing, None)
                    if progress is None:
                        return
                    reasons = [_FINISH_REASONS.get(code) for code in progress.done[: len(call.prompts)]]
                    ids = progress.new_ids[: len(reasons)]
                    text = None
                    if decoders is not None:
                        text = [decoder.push(new) if new else "" for decoder, new in zip(decoders, ids, strict=True)]
                        for row, reason in enumerate(reasons):
                            if reason is not None and row not in ended:
                                text[row] += decoders[row].finish()
                                ended.add(row)
                    statistics = self._statistics(call, progress, time.perf_counter() - began)
                    yield StreamEvent(ids, progress.accepted[: len(reasons)], text, reasons, statistics)
            finally:
                playing.close()

        return events()

    def _play(self, call: Call, reads_ids: bool) -> Iterator[_Progress]:
        """The one loop: set the state, run the prompt, step until every row is done.

        Yields the same object after the prompt and after every step. Between two of them the state is whole, and the
        loop may be left for good.
        """
        began = time.perf_counter()
        settings, batch, prompts = call.settings, len(call.prompts), call.prompts
        modules = [module for module in (self.target.model, self.draft) if module is not None]
        reuse = self._whole and call.reuse_prefix
        reuse = reuse and all(seen.matches(module) for seen, module in zip(self._ran, modules, strict=True))
        self._current, self._whole = call, False
        self._ran = [WeightsFingerprint(module, values=True) for module in modules]
        self._runner.start()
        self.target.refresh(self.target_cache)
        if self.draft is not None:
            self.draft.refresh()
        if self._runner.ahead and not (
            self._captured and all(map(WeightsFingerprint.matches, self._captured, modules))
        ):
            self._captured = [WeightsFingerprint(module) for module in modules]
            self._runner.clear()
        self.sampling.set_(batch, seed=call.seed, **call.sampling)
        self._set_acceptance(call)
        self._set_stop_token_ids(settings.stop_token_ids)
        self._set_rules(settings.rules, batch)
        # Rows that this call does not use hold one token and are done before they start.
        spare = self.batch_size - batch
        limits = [len(prompt) + settings.max_new_tokens for prompt in prompts] + [2] * spare
        prefilled = self._prefill([*prompts, *[call.ids.new_zeros(1, dtype=torch.int64)] * spare], limits, reuse)
        self.done[batch:] = _LENGTH
        progress = _Progress(
            self.length.tolist(), self.done.tolist(), [[] for _ in range(self.batch_size)], prefilled[:batch]
        )
        _check_finite(progress, 0)
        histories = [prompt.tolist() for prompt in prompts] if call.stop else []
        reads_ids = reads_ids or bool(call.stop)
        if reads_ids:
            first = self.tokens.gather(1, self.length[:, None]).tolist()
            progress.new_ids, progress.accepted = first, [0] * self.batch_size
            self._close_rows(call, progress, histories)
        progress.time_to_first_token = time.perf_counter() - began
        self._whole = True
        yield progress
        for _ in self._steps(call, progress, reads_ids):
            self._close_rows(call, progress, histories)
            _check_finite(progress, 1)
            self._whole = True
            yield progress

    def _steps(self, call: Call, progress: _Progress, reads_ids: bool) -> Iterator[None]:
        """Launch steps until every row is done; comes back when one has been read into ``progress``.

        Where the host reads late, the step after the last is launched too: it finds every row done and changes nothing.
        """
        runner, obstacle = self._runner, self._obstacle(self.host_rules is not None)
        # Python rules wait for the step anyway, and must not be asked about one that will not count.
        step, ahead = (self.step, runner.ahead) if self.host_rules is None else (self._step_with_processors, 0)
        kind, unread = self._kind(), 0
        while not progress.finished:
            if self._current is not call:
                raise RuntimeError("this stream has ended: its generator was reset, or has started another call")
            self._whole = False
            runner.launch(step, kind, obstacle)
            if self.graph is True and runner.reason:
                raise RuntimeError(f"graph=True cannot be followed: {runner.reason}")
            unread += 1
            if unread > ahead:
                report = runner.read()
                try:
                    progress.record(report, reads_ids)
                except RuntimeError:
                    runner.clear()  # a graph that does nothing would do so again
                    raise
                unread -= 1
                yield

    def _close_rows(self, call: Call, progress: _Progress, histories: list[list[int]]) -> None:
        """End every row whose new ids complete a stop string, behind the token that did."""
        for row, history in enumerate(histories):
            new = len(progress.new_ids[row])
            if not new or row in progress.closed:
                continue
            history += progress.new_ids[row]
            kept = first_stop(call.stop, history, new)
            if kept is None:
                continue
            progress.close(row, kept)
            # The features of dropped tokens go, those that the draft cache has not taken over yet stay.
            drafted = self.length[row] - self.num_context[row]
            self.length[row] = progress.length[row]
            self.num_context[row] = (progress.length[row] - drafted).clamp(min=0)
            self.done[row] = _STOPPED

    def _sequences(self, call: Call, progress: _Progress) -> Tensor:
        """The prompts as given, then the answers, right-padded."""
        (batch, width), starts = call.ids.shape, [len(prompt) for prompt in call.prompts]
        counts = [progress.length[row] + 1 - starts[row] for row in range(batch)]
        pad = call.settings.pad_token_id
        sequences = call.ids.new_full((batch, width + max(counts)), pad, dtype=torch.int64)
        sequences[:, :width] = call.ids
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            sequences[row, width : width + count] = self.tokens[row, start : start + count]
        return sequences

    def _statistics(self, call: Call, progress: _Progress, seconds: float) -> Statistics:
        steps = [list(row) for row in progress.acceptance_lengths[: len(call.prompts)]]
        counts = [progress.length[row] + 1 - len(prompt) for row, prompt in enumerate(call.prompts)]
        first = progress.time_to_first_token
        return Statistics(steps, self.block_size, counts, first, seconds, progress.prefilled)

    def _set_rules(self, settings: RuleSettings, rows: int) -> None:
        """Put the rules of a call in place: tensors of the same structure are written anew, never moved."""
        self.rules = self.host_rules = None
        if structure := LogitRules.structure(settings):
            if structure not in self._known_rules:
                made = LogitRules.create(settings, self.prompt_length, self.limits, self.vocab_size)
                self._known_rules[structure] = made
            self.rules = self._known_rules[structure]
            self.rules.set_(settings)
        if settings.logits_processor or settings.stopping_criteria:
            self.host_rules = HostRules(settings.logits_processor, settings.stopping_criteria, rows)

    def _set_acceptance(self, call: Call) -> None:
        """Choose the step's branches for ``call``; at temperature 0 every way to accept is the greedy one."""
        sampled = self.draft is not None and call.settings.temperature > 0
        self._rejects = sampled and call.acceptance == "rejection"
        self._adapts = sampled and call.acceptance == "keyed" and call.sampling["draft_sharpness"] == "auto"
        self._schedule = denoise.schedule(self.block_size - 1, call.denoise_steps)
        if self._adapts:
            self.auto.reset_()
        if self._rejects and not hasattr(self, "draft_probabilities"):
            shape = (self.batch_size, self.block_size - 1, self.vocab_size)
            self.draft_probabilities = torch.zeros(shape, dtype=torch.float32, device=self.target.device)

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
    rules: RuleSettings = field(default_factory=RuleSettings)


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
    rules: RuleArguments | None = None,
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
        RuleSettings.resolve(rules or {}, defaults["rules"], stop, vocab),
    )


@dataclass(frozen=True, eq=False)
class Call:
    """One call, checked: all that the loop needs to know.

    Attributes:
        ids: ``[batch, length]``, each prompt as often as sequences are returned of it.
        prompts: per row, the tokens that the mask leaves, int64.
        sampling: what :meth:`dflash.sampling.Sampling.set_` takes, less the seed.
        stop: transformers' stop-string criteria; more tokens than these let through are dropped.
        reuse_prefix: run only what is new of the prompts.
        acceptance, denoise_steps: as for :func:`generate`.
    """

    ids: Tensor
    prompts: list[Tensor]
    settings: Settings
    sampling: dict[str, Any]
    seed: int | Sequence[int] | None
    stop: tuple[Callable, ...]
    stop_strings: tuple[str, ...]
    tokenizer: Any
    streamer: Any
    reuse_prefix: bool
    acceptance: str
    denoise_steps: int


def plan(
    defaults: dict,
    vocab: int,
    device: torch.device,
    ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | Sequence[int] | None = None,
    draft_sharpness: float | Literal["auto"] = "auto",
    acceptance: Literal["keyed", "rejection"] = "keyed",
    stop_token_ids: Sequence[int] | int | None = None,
    stop_strings: Sequence[str] | str | None = None,
    tokenizer: Any = None,
    streamer: Any = None,
    num_return_sequences: int | None = None,
    reuse_prefix: bool = False,
    denoise_steps: int = 1,
    **rules: Unpack[RuleArguments],
) -> Call:
    """Check every argument of :func:`generate` that can be checked without a drafter; nothing is run."""
    mask = _check_ids(ids, attention_mask, vocab, device)
    settings = resolve_settings(
        defaults, ids, max_new_tokens, temperature, top_k, top_p, min_p, stop_token_ids, vocab, rules
    )
    repeats = defaults["num_return_sequences"] if num_return_sequences is None else num_return_sequences
    repeats = _whole("num_return_sequences", 1 if repeats is None else repeats, 1)
    if repeats > 1 and not settings.temperature:
        raise ValueError(f"at temperature 0 every answer is the same: num_return_sequences must be 1, got {repeats}")
    if repeats > 1:
        ids, mask = ids.repeat_interleave(repeats, 0), mask.repeat_interleave(repeats, 0)
    rows = ids.shape[0]
    sampling = {name: getattr(settings, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    sampling["draft_sharpness"] = draft_sharpness
    Sampling.create(rows).set_(rows, seed=0 if seed is None else seed, **sampling)  # raises on what is wrong
    denoise_steps = _whole("denoise_steps", denoise_steps, 1)
    _check_acceptance(acceptance, denoise_steps, draft_sharpness)
    if acceptance == "rejection" and (settings.rules.logits_processor or settings.rules.stopping_criteria):
        raise ValueError('acceptance="rejection" cannot be combined with logits_processor or stopping_criteria')
    if streamer is not None:
        check_streamer(streamer, rows)
    strings = defaults["stop_strings"] if stop_strings is None else stop_strings
    strings = (strings,) if isinstance(strings, str) else tuple(strings or ())
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ValueError(f"stop_strings must be strings that are not empty, got {string!r}")
    if strings and tokenizer is None:
        raise ValueError(f"stop_strings {list(strings)} need the target's tokenizer: pass tokenizer=")
    stop = (stop_string_criterion(tokenizer, list(strings)),) if strings else ()
    prompts = [row[live].long() for row, live in zip(ids, mask, strict=True)]
    return Call(
        ids,
        prompts,
        settings,
        sampling,
        seed,
        stop,
        strings,
        tokenizer,
        streamer,
        reuse_prefix,
        acceptance,
        denoise_steps,
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
    draft_sharpness: float | Literal["auto"] = "auto",
    acceptance: Literal["keyed", "rejection"] = "keyed",
    stop_token_ids: Sequence[int] | int | None = None,
    stop_strings: Sequence[str] | str | None = None,
    tokenizer: Any = None,
    streamer: Any = None,
    num_return_sequences: int | None = None,
    block_size: int | None = None,
    denoise_steps: int = 1,
    return_dict_in_generate: bool = False,
    **rules: Unpack[RuleArguments],
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
            ``inf`` is its plain argmax. ``"auto"`` chooses between inf, 2 and 1 per row as it goes
            (:class:`dflash.sharpness.AutoSharpness`). Changes the speed, never the text.
        acceptance: ``"keyed"`` as above, or ``"rejection"``: classic speculative sampling
            (:mod:`dflash.rejection`). The text is then distributed as the target's, but it is no function of the
            seed alone: it depends on the drafter, the block size and where blocks begin, and differs from
            ``"keyed"``'s. Needs a drafter and ``denoise_steps=1``, and takes no Python processors or criteria; at
            temperature 0 both are greedy.
        stop_token_ids: ids that end a row, emitted as its last token; an empty list for none.
        stop_strings: end a row with the token that completes one of them, wherever in a block it stands, exactly as
            transformers does it in one-token decoding (its ``StopStringCriteria``); needs ``tokenizer``.
        tokenizer: the target's.
        streamer: a streamer of transformers, for a batch of one: gets the prompt, then the new ids of every step,
            and ``end()`` whatever happens.
        num_return_sequences: answers to each prompt, in consecutive rows of a batch that repeats it, so that each row
            has its own seed; 1 at temperature 0, where all would be the same.
        block_size: 1 to the drafter's own. Changes the speed, never the text.
        denoise_steps: passes of the drafter over a block, at least 1: each further one keeps the tokens that the one
            before was most sure of and drafts the rest anew (:mod:`dflash.denoise`). Changes the speed, never the text.
        return_dict_in_generate: return a :class:`GenerateOutput` with statistics.
        **rules: penalties, bans, forced tokens, Python processors and criteria, by the names and meanings of
            :class:`dflash.rules.RuleArguments`: repetition_penalty, presence_penalty, frequency_penalty,
            no_repeat_ngram_size, logit_bias, bad_words_ids, suppress_tokens, begin_suppress_tokens,
            forced_bos_token_id, forced_eos_token_id, min_length, min_new_tokens; logits_processor,
            stopping_criteria. Applied as transformers applies them to the row alone: its padding is never seen.

    Returns:
        ``[batch, length + longest answer]`` int64: the prompt as given, then the new tokens, right-padded with the
        pad id; or a :class:`GenerateOutput`.

    Raises:
        ValueError: an argument is out of range, target and drafter do not fit, the target is not supported, the row
            would pass the target's ``max_position_embeddings``, or the target's logits are NaN.
        TypeError: an argument has the wrong type.
    """
    target, call = _plan_one_shot(
        target,
        ids,
        attention_mask=attention_mask,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        draft_sharpness=draft_sharpness,
        acceptance=acceptance,
        stop_token_ids=stop_token_ids,
        stop_strings=stop_strings,
        tokenizer=tokenizer,
        streamer=streamer,
        num_return_sequences=num_return_sequences,
        denoise_steps=denoise_steps,
        **rules,
    )
    return generate_once(target, draft, call, block_size, return_dict_in_generate)


def stream(
    target: nn.Module,
    draft: nn.Module | None,
    ids: Tensor,
    *,
    tokenizer: Any = None,
    skip_special_tokens: bool = False,
    block_size: int | None = None,
    **arguments: Any,
) -> Iterator[StreamEvent]:
    """:func:`generate`, as it happens: an iterator over one event a step.

    Every argument is checked at once; the prompt is run when the first event is asked for. Closing the iterator before
    its end, or an interrupt, frees what :func:`generate` would keep for the next call.

    Args:
        target, draft, ids, block_size: as for :func:`generate`.
        tokenizer: the target's; the events then carry text.
        skip_special_tokens: as in ``tokenizer.decode``.
        arguments: the other arguments of :func:`generate`, but for ``streamer`` and ``return_dict_in_generate``.

    Yields:
        :class:`StreamEvent`; the ids of a row, joined, are what :func:`generate` returns for it.

    Raises:
        ValueError, TypeError: as :func:`generate` does. RuntimeError: the kept generator has started another call.
    """
    target, call = _plan_one_shot(target, ids, tokenizer=tokenizer, **_streaming(arguments))
    with _one_shot:
        generator = _generator(target, draft, call, block_size)
    events = generator._stream(call, skip_special_tokens)

    def released_unless_finished() -> Iterator[StreamEvent]:
        finished = False
        try:
            yield from events
            finished = True
        finally:
            if not finished and _kept is not None and _kept.generator is generator:
                release()

    return released_unless_finished()


def _streaming(arguments: dict[str, Any]) -> dict[str, Any]:
    for name in ("streamer", "return_dict_in_generate", "reuse_prefix"):
        if name in arguments:
            raise TypeError(f"stream() takes no {name}")
    return arguments


def _plan_one_shot(target: nn.Module, ids: Tensor, **arguments: Any) -> tuple[nn.Module, Call]:
    target = unwrap(target)
    if reason := refusal(target):
        raise UnsupportedTargetError(f"this target is not supported: {reason}")
    embedding = target.get_input_embeddings().weight
    call = plan(generation_defaults(target), embedding.shape[0], embedding.device, ids, **arguments)
    longest, new = max(map(len, call.prompts)), call.settings.max_new_tokens
    positions = getattr(text_config(target), "max_position_embeddings", None)
    if positions is not None and longest + new > positions:
        raise ValueError(
            f"a prompt of {longest} tokens and {new} new tokens pass the target's max_position_embeddings, {positions}"
        )
    return target, call


def _generator(target: nn.Module, draft: nn.Module | None, call: Call, block_size: int | None) -> Generator:
    """The kept generator if it serves this call, else a new one in its place."""
    global _kept
    _check_drafts(call, draft is not None and block_size != 1)
    batch = len(call.prompts)
    needed = max(map(len, call.prompts)) + call.settings.max_new_tokens
    if _kept is not None and _kept.serves(target, draft, block_size, batch, needed):
        generator = _kept.generator
        with generator._exclusive():
            if generator._structure != snapshot(target):  # hooks, adapters, attributes; the caches stay
                generator._take(target)
        return generator
    drafter = None if draft is None else load_draft(draft)
    _check_pair(target, drafter, block_size)
    release()
    capacity = -(-needed // _CAPACITY_STEP) * _CAPACITY_STEP
    positions = getattr(text_config(target), "max_position_embeddings", None)
    if positions is not None:
        capacity = min(capacity, positions)
    if drafter is draft and draft is not None:
        drafter = structural_twin(draft)
    generator = Generator(target, drafter, max_length=capacity, batch_size=batch, block_size=block_size)
    _kept = _Kept(target, draft, block_size, generator)
    return generator


def generate_once(
    target: nn.Module,
    draft: nn.Module | None,
    call: Call,
    block_size: int | None,
    return_dict_in_generate: bool,
    prompt_was_put: bool = False,
) -> Any:
    """Run ``call`` on the kept generator; an interrupt frees it."""
    with _one_shot:
        generator = _generator(target, draft, call, block_size)
        try:
            return generator._generate(call, return_dict_in_generate, prompt_was_put)
        except Exception:
            raise
        except BaseException:  # KeyboardInterrupt
            if _kept is not None and _kept.generator is generator:
                release()
            raise
