"""The prompts that a pair is examined on, its answers, and drafts made again from the target's states over these."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..drafter import Drafter
from ..evaluate import Decoding, GeneratorRunner, add_up, mean_acceptance
from ..evaluate.lines import read_jsonl
from ..evaluate.prompts import first_prompt, prompt_ids
from ..generator import Generator
from ..outputs import Statistics
from ..proposers import ChainProposer
from ..sampling import Sampling
from ..targets import Target, check_target, find_layers, max_positions, structural_copy, tapped_modules
from .wiring import Wiring

Show = Callable[..., None]  # show(name, done, total, text)

RAW_LAST = -1  # the last layer, before the final norm
_CACHE_BYTES = 2**28  # of the drafter's caches and logits in one pass
_COUNT = 8  # of the prompts next to a target
_MOST = 32  # of --prompts: the target's states over all answers are kept in memory
_OWN = (
    "Write a Python function that merges two sorted lists.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it take? Explain step by step.",
    "Summarize the plot of Romeo and Juliet in five sentences.",
    "Translate into French: The weather was so bad that we stayed at home and read.",
    "List the planets of the solar system in order, with one fact about each.",
    "Write a SQL query for the ten customers with the largest total of orders in 2023.",
    "Explain to a child why the sky is blue.",
    "Solve 3x + 7 = 25 and check the result.",
)


class Pair(NamedTuple):
    """A causal language model, its drafter, and the drafter's parsed ``config.json``."""

    target: Any
    drafter: Drafter
    keys: Mapping[str, Any]


class Answered(NamedTuple):
    """The token ids of a prompt with the target's answer to it, and the length of the prompt."""

    ids: list[int]
    prompt_length: int


class Answers(NamedTuple):
    """Prompts with their answers, what they took, and the generator that wrote them."""

    sequences: list[Answered]
    total: Statistics
    generator: Generator

    @property
    def acceptance_length(self) -> float:
        return mean_acceptance(self.total) or 0.0


@dataclass(frozen=True)
class Prompts:
    """What a pair is asked, and how that is encoded.

    Attributes:
        rows: each ``{"prompt": text}`` or ``{"messages": [...]}``.
        template: arguments of the chat template.
        bos: put a BOS token before a prompt without chat template.
        origin: where the prompts come from, in words.
    """

    rows: Sequence[Mapping[str, Any]]
    tokenizer: Any
    template: Mapping[str, Any] = field(default_factory=dict)
    bos: bool = False
    origin: str = ""

    @functools.cached_property
    def ids(self) -> list[list[int]]:
        """Of each prompt. Raises ``ValueError`` if one cannot be encoded."""
        return [list(prompt_ids(self.tokenizer, row, template=self.template, bos=self.bos)) for row in self.rows]

    def check_room(self, target: Any) -> None:
        """Raise ``ValueError`` if a prompt cannot be encoded, or is too long for the target, which may be empty."""
        longest = max(map(len, self.ids))
        positions = max_positions(target)
        if positions is not None and longest + 2 > positions:
            raise ValueError(
                f"a prompt of {longest} tokens does not fit the target's {positions} positions: shorten it"
            )


def find_prompts(file: str | None, model: str) -> tuple[list[dict[str, Any]], str]:
    """Return the prompts to answer, each ``{"prompt"}`` or ``{"messages"}``, and where they come from in words.

    Args:
        file: JSON lines with ``prompt``, ``question``, ``turns`` (of which the first is asked) or ``messages``. Of more
            than 32, so many from all over the file are used. None for eight of ``prompts.jsonl`` next to the target's
            folder, if it is there, else of our own.
        model: the target's folder or hub id.

    Raises:
        ValueError: the file is missing, holds no prompt, or one of its lines is wrong.
    """
    if file is not None:
        return _read(Path(file), _MOST, f"--prompts {file!r}")
    path = Path(model).absolute().parent / "prompts.jsonl"
    if Path(model).is_dir() and path.is_file():
        try:
            return _read(path, _COUNT)
        except ValueError as error:
            raise ValueError(f"{error} (the file stands next to the target; --prompts names another)") from error
    return [{"prompt": text} for text in _OWN], f"{len(_OWN)} of the doctor's own"


def answer(pair: Pair, prompts: Prompts, max_new_tokens: int, show: Show) -> Answers:
    """Answer every prompt greedily. Raises ``ValueError`` as `Prompts.check_room`."""
    prompts.check_room(pair.target)
    room = max(map(len, prompts.ids)) + max_new_tokens
    positions = max_positions(pair.target)
    generator = Generator(pair.target, pair.drafter, max_length=min(room, positions or room))
    runner = GeneratorRunner(generator, Decoding(max_new_tokens), pair.drafter.device)
    answers, sequences = [], []
    for number, row in enumerate(prompts.ids):
        show("answers", number, len(prompts.ids), "")
        answers.append(runner(row))
        sequences.append(Answered([*row, *answers[-1].ids], len(row)))
    show("answers", len(prompts.ids), len(prompts.ids), "")
    return Answers(sequences, add_up(answers, generator.block_size), generator)


def _read(path: Path, most: int, name: str = "") -> tuple[list[dict[str, Any]], str]:
    """Return up to ``most`` prompts from all over a file, and where they come from; ``name`` is for errors."""
    if not path.is_file():
        raise ValueError(f"{name or path} is not a file: name a file of JSON lines, each with a prompt")
    found = [first_prompt(row, where) for where, _, row in read_jsonl(path)]
    if not found:
        raise ValueError(f"{name or path} is empty: a line is a JSON object with a prompt")
    count = min(most, len(found))
    which = f"all {count}" if count == len(found) else f"{count} of the {len(found)}"
    return [found[index * len(found) // count] for index in range(count)], f"{which} in {path}"


# ---------------------------------------------------------------------------------------------- drafting again


class Recording(NamedTuple):
    ids: Tensor  # [length]
    prompt_length: int
    states: dict[int, Tensor]  # layer -> [length, hidden]; `RAW_LAST` is the last before the final norm


@torch.no_grad()
def record(target: nn.Module, sequences: Sequence[Answered], layers: Collection[int]) -> list[Recording]:
    """Run the target once over each sequence; it is not changed.

    The outputs of ``layers`` are kept; the last layer's twice, after the final norm and before it.
    """
    # 1. Hook a copy that shares the weights
    model: Any = structural_copy(check_target(target, spread=False))
    every = find_layers(model)
    modules: dict[int, Any] = dict(zip(layers, tapped_modules(model, tuple(layers)), strict=True))
    if len(every) - 1 in modules:
        modules[RAW_LAST] = every[-1]
    kept: dict[int, Tensor] = {}

    def keep(layer: int, _module: nn.Module, _arguments: tuple[Any, ...], output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output  # [1, length, hidden]
        kept[layer] = states[0]

    for layer, module in modules.items():
        module.register_forward_hook(functools.partial(keep, layer))
    # 2. Run it, sequence by sequence: padding would cost memory, and on a CPU more time than it saves
    device, recordings = model.get_input_embeddings().weight.device, []
    for one in sequences:
        ids = torch.tensor(one.ids, dtype=torch.int64, device=device)
        model.get_decoder()(input_ids=ids[None], use_cache=False)
        recordings.append(Recording(ids, one.prompt_length, dict(kept)))
    return recordings


class Score(NamedTuple):
    """What one wiring accepts."""

    tokens: Tensor  # [places], tokens per step: the accepted drafts and the target's own
    valid: float  # share of the rows that draft a token; a NaN drafts none

    @property
    def mean(self) -> float:
        return self.tokens.mean().item()


class Replay:
    """Drafts at the same places of the same answers for every wiring, as a step does: one pass of the proposer each.

    Args:
        recordings: of the target's greedy answers.
        target: the copy whose embeddings and head the drafter shares.
        drafter: its weights.
        per_prompt: places of each answer at most, spread evenly.

    Attributes:
        anchors: ``[places]`` int64, the position of each place's last token before the drafts.
        rows: ``[places]`` int64, its answer; in ascending order.
    """

    def __init__(self, recordings: Sequence[Recording], target: Target, drafter: Drafter, per_prompt: int) -> None:
        self.recordings, self.target, self.drafter = recordings, target, drafter
        self.last_layer = target.config.num_hidden_layers - 1
        where: list[tuple[int, int]] = []
        for row, recording in enumerate(recordings):
            first, length = recording.prompt_length, len(recording.ids)
            count = min(per_prompt, length - 1 - first)  # every anchor has a token after it
            spread = torch.linspace(first, length - 2, max(count, 0), dtype=torch.float32, device="cpu")
            where.extend((row, place) for place in spread.long().unique().tolist())
        places = torch.tensor(where, dtype=torch.int64, device=drafter.device).view(-1, 2)
        self.rows, self.anchors = places.unbind(1)

    def can_read(self, wiring: Wiring) -> bool:
        """True if the states that the wiring taps were recorded."""
        return all(layer in self.recordings[0].states for layer in self.layers(wiring))

    def layers(self, wiring: Wiring) -> list[int]:
        """Return the recorded layers that the wiring taps."""
        is_raw = wiring.raw_last_tap
        return [RAW_LAST if is_raw and tap == self.last_layer else tap for tap in wiring.config.target_layer_ids]

    @torch.no_grad()
    def score(self, wiring: Wiring, every: int = 1) -> Score:
        """Draft at the places, or at one of ``every`` so many, and compare with the target's answer."""
        drafter, layers = wiring.apply(self.drafter), self.layers(wiring)
        target: Any = self.target if drafter.dtype == self.target.dtype else _cast(self.target, drafter.dtype)
        rows, anchors = self.rows[::every], self.anchors[::every]
        accepted, drafts = [], []
        for row, recording in enumerate(self.recordings):
            places = anchors[rows == row]
            if not len(places):
                continue
            context = torch.cat([recording.states[layer] for layer in layers], -1)[None].to(drafter.dtype)
            drafts.append(_draft(drafter, target, recording.ids, context, places))
            accepted.append(_accepted(drafts[-1], recording.ids, places))
        return Score(1.0 + torch.cat(accepted).float(), (torch.cat(drafts) >= 0).float().mean().item())


def _accepted(drafts: Tensor, ids: Tensor, anchors: Tensor) -> Tensor:
    """Return the length of the longest prefix of ``drafts [places, count]`` that the sequence continues with."""
    ahead = _positions(anchors, drafts.shape[1])
    inside = ahead < len(ids)
    return ((drafts == ids[ahead.clamp(max=len(ids) - 1)]) & inside).long().cumprod(1).sum(1)


def _draft(drafter: Drafter, target: Target, ids: Tensor, context: Tensor, anchors: Tensor) -> Tensor:
    """Draft ``[places, block - 1]`` after each anchor of a sequence, as a step does; -1 where a logit is NaN.

    ``ids`` are ``[length]``, ``context`` has its tapped states ``[1, length, taps * hidden]``.
    """
    # 1. Compute the keys and values of the whole context once
    block_size, length = drafter.config.block_size, torch.tensor([len(ids)], dtype=torch.int64, device=ids.device)
    whole = drafter.new_cache(1, len(ids) + block_size)
    drafter.inject_(drafter.fuse(context, length), torch.arange(len(ids), device=ids.device)[None], whole)
    # 2. Draft at as many places at a time as memory allows
    per_place = sum(buffer.numel() * buffer.element_size() for buffer in whole.buffers)
    per_place += block_size * target.embedding_weight.shape[0] * 8
    drafts = []
    for part in anchors.split(max(1, _CACHE_BYTES // per_place)):
        count = len(part)
        cache = drafter.new_cache(count, whole.capacity)
        for copies, buffer in zip(cache.buffers, whole.buffers, strict=True):
            copies.copy_(buffer.expand_as(copies))
        state: Any = SimpleNamespace(  # what a proposer reads of the engine's state
            tokens=ids.expand(count, -1),
            anchor=ids[part][:, None],
            length=part,
            context=context[0, part - 1][:, None],
            num_context=torch.ones_like(part),
            sampling=Sampling.create(count, part.device),
            draft_cache=cache,
            block=part.new_empty(count, block_size),
            positions=functools.partial(_positions, part),
        )
        drafts.append(ChainProposer(drafter, target, block_size).propose(state).ids[:, 1:])
    return torch.cat(drafts)


def _positions(anchors: Tensor, rows: int) -> Tensor:
    """Return ``[places, rows]`` int64, the positions after each anchor's."""
    return anchors[:, None] + torch.arange(1, rows + 1, device=anchors.device)


def _cast(target: Target, dtype: torch.dtype) -> Any:
    """Return what a proposer reads of a target, for a drafter of another dtype."""
    return SimpleNamespace(
        config=target.config,
        head=target.head,
        embedding_weight=target.embedding_weight.to(dtype),
        draft_head=lambda hidden: target.draft_head(hidden.to(target.dtype)).to(dtype),
    )
