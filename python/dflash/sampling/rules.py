"""Logit rules: one small class per rule.

Row ``j`` of a block chooses the token at position ``length + 1 + j``. Its prefix is ``tokens[: length + 1]``, then the
drafted ids ``1 .. j`` of the block; in a tree the position follows the row's depth, and the drafted ids are its path's.
So counts, n-grams and bad words see the same tokens as in one-token decoding. Rows after a wrong draft are dropped,
whatever their logits. Meaning and order follow transformers' processors (``_get_logits_processor``), before temperature
and filters, in float32. Each row of a batch has its own rules, sees only its own tokens and writes the same text as a
single prompt; padding is never counted.

To add a rule, add its row to `dflash.settings.GenerateArguments`, and a class here to `RULES`; see CONTRIBUTING.md.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..state import State, Tree

Settings = Mapping[str, Any]
"""The rules of one row that are on, from `dflash.settings.resolve_rules`."""
Biases = Sequence[tuple[tuple[int, ...], float]]

# Values of rules on the host, whatever dtype and device the user has made the default.
_IDS: dict[str, Any] = {"dtype": torch.int64, "device": "cpu"}
_NUMBERS: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
_YES = torch.tensor(True, dtype=torch.bool, device="cpu")
_DECISIVE_BIAS = 10.0  # smaller biases are kept from the drafter: acceptance was lower with them
_ANY = -1  # in a table of words: matches every token
_ABSENT = -2  # what stands before a row's first token
_NO_TOKEN = 2**31 - 1  # past every vocabulary
_ENDLESS = 2**62  # a length past every text, in int64


# --------------------------------------------------------------------------------------------- the tokens a row sees


class ChainTokens:
    """Tokens before ``positions [batch, rows]`` as the rows of a chain see them, in one tensor for all rows.

    Args:
        tokens: ``[batch, capacity]`` int64, the emitted ones.
        ids: ``[batch, rows]`` int64, the block.
        positions: ``[batch, rows]`` int64, of the tokens that the rows choose.
    """

    def __init__(self, tokens: Tensor, ids: Tensor, positions: Tensor) -> None:
        self._tokens, self._positions = tokens.scatter(1, positions - 1, ids)[:, None], positions

    def at(self, places: Tensor) -> Tensor:
        """Return the tokens at ``places [batch, rows, n]``, 0 or more. Ignore places that a row does not see."""
        return self._tokens.expand(-1, places.shape[1], -1).gather(2, places)

    def windows(self, size: int) -> list[tuple[Tensor, Tensor]]:
        """Return the windows of ``size`` consecutive tokens that each row sees, each once.

        They come as ``tokens [batch, rows or 1, n + size - 1]``, where window ``i`` begins at token ``i``, and as
        ``is_seen [batch, rows or 1, n]`` bool.
        """
        count = self._tokens.shape[2] - size + 1
        if count < 1:
            return []
        starts = torch.arange(count, device=self._tokens.device)
        return [(self._tokens, starts + size <= self._positions[..., None])]


class TreeTokens:
    """`ChainTokens` of a tree, whose first row is at ``length [batch]``. Only the drafts on a path are kept per row."""

    def __init__(self, tokens: Tensor, ids: Tensor, length: Tensor, tree: Tree) -> None:
        rows = ids.shape[1]
        # Invisible rows are written to one more column, which is cut off again.
        columns = torch.where(tree.visible, tree.depth[:, None], rows)
        path = ids.new_zeros(len(ids), rows, rows + 1).scatter(2, columns, ids[:, None].expand(-1, rows, -1))
        self._path = path[..., :rows]  # [batch, rows, depth]
        self._tokens, self._length, self._depth = tokens[:, None], length[:, None, None], tree.depth[..., None]

    def at(self, places: Tensor) -> Tensor:
        """See `ChainTokens.at`."""
        rows, capacity = self._path.shape[1], self._tokens.shape[2]
        emitted = self._tokens.expand(-1, rows, -1).gather(2, places.clamp(max=capacity - 1))
        drafted = self._path.gather(2, (places - self._length).clamp(0, rows - 1))
        return torch.where(places < self._length, emitted, drafted)

    def windows(self, size: int) -> list[tuple[Tensor, Tensor]]:
        """See `ChainTokens.windows`."""
        count, device = self._tokens.shape[2] - size + 1, self._tokens.device
        # 1. Windows that end on the path, the block's first row included.
        rows = self._path.shape[1]
        places = self._length - (size - 1) + torch.arange(rows + size - 1, device=device)
        is_seen = (places[..., :rows] >= 0) & (torch.arange(rows, device=device) <= self._depth)
        on_path = self.at(places.clamp(min=0).expand(-1, rows, -1)), is_seen
        # 2. Windows of emitted tokens only.
        if count < 1:
            return [on_path]
        return [(self._tokens, torch.arange(count, device=device) + size <= self._length), on_path]


class Rows(NamedTuple):
    """The rows of one block, as rules see them; the last three are None for the drafter's own logits.

    Attributes:
        positions: ``[batch, rows]`` int64, the position of the token that each row chooses.
        prompt: ``[batch, 1]`` int64, tokens in the prompt.
        limits: ``[batch, 1]`` int64, the length at which each row ends.
        state: the state, of which ``tokens``, ``length``, ``prompt_length`` and ``limits`` are read.
        block: ``[batch, rows]`` int64, the last emitted token, then drafts.
        tree: which row of the block continues which; None for a chain.
        sequence: the tokens before ``positions`` as each row sees them. None where no rule needs it.
    """

    positions: Tensor
    prompt: Tensor
    limits: Tensor
    state: State
    block: Tensor | None = None
    tree: Tree | None = None
    sequence: ChainTokens | TreeTokens | None = None


# -------------------------------------------------------------------------------------------------------------- rules


class Rule:
    """One rule. Its values lie in tensors that keep their addresses, ``[batch, ...]`` per name in `values`.

    A row without the rule has neutral values, which change no bit of its logits.

    Attributes:
        for_drafts: True if the drafter's logits get the rule too, because it certainly changes the target's choice.
        reads_sequence: True if `apply` reads ``rows.sequence``.
        neutral: by name, the value for a row without the rule, and for the end of a table that is shorter than
            another row's.
    """

    for_drafts = False
    reads_sequence = False
    neutral: ClassVar[Mapping[str, float]] = {}

    @classmethod
    def values(cls, settings: Settings, vocab_size: int) -> dict[str, Tensor]:
        """Return one row's tensors on the host, named as in `neutral`; empty if the rule is off.

        With ``vocab_size`` 0, as `layout` asks, only their shapes mean anything.
        """
        raise NotImplementedError

    @classmethod
    def constants(cls, settings: Settings) -> dict[str, Hashable]:
        """Return the Python values that the step branches on, by attribute."""
        return {}

    def __init__(self, rows: Sequence[Settings | None], vocab_size: int, device: torch.device) -> None:
        """``rows`` holds the settings of each row with this rule, all with the same constants; None for the others."""
        values = {name: tensor.to(device) for name, tensor in self.stacked(rows, vocab_size).items()}
        vars(self).update(self.constants(next(row for row in rows if row is not None)), **values)

    @classmethod
    def stacked(cls, rows: Sequence[Settings | None], vocab_size: int) -> dict[str, Tensor]:
        """Return the values of all rows on the host, ``[batch, ...]`` each."""
        found = {id(row): cls.values(row, vocab_size) for row in rows if row is not None}
        stacks = {}
        for name, fill in cls.neutral.items():
            tensors = [values[name] for values in found.values()]
            shape = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]
            stack = tensors[0].new_full((len(rows), *shape), fill)
            for index, row in enumerate(rows):
                if row is not None:
                    tensor = found[id(row)][name]
                    stack[(index, *map(slice, tensor.shape))] = tensor
            stacks[name] = stack
        return stacks

    @classmethod
    def layout(cls, rows: Sequence[Settings | None]) -> tuple:
        """Return the constants and shapes, on which a captured step depends."""
        constants = next(cls.constants(row) for row in rows if row is not None)
        shapes = ((name, *tensor.shape) for name, tensor in cls.stacked(rows, 0).items())
        return cls.__name__, *constants.items(), *shapes

    def set_(self, rows: Sequence[Settings | None], vocab_size: int) -> None:
        """Write the values of settings with the same layout in place."""
        for name, tensor in self.stacked(rows, vocab_size).items():
            getattr(self, name).copy_(tensor)

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        """Return the logits ``[batch, rows, vocab]`` float32 under this rule."""
        raise NotImplementedError

    def apply_to_drafts(self, logits: Tensor, rows: Rows) -> Tensor:
        """Return the drafter's logits under this rule."""
        return self.apply(logits, rows)


def _filled(ids: Iterable[int], value: float, others: float, vocab_size: int) -> Tensor:
    tensor = torch.full((vocab_size,), others, **_NUMBERS)
    if vocab_size:
        tensor[list(ids)] = value
    return tensor


def _upper_bound(ids: Iterable[int], vocab_size: int) -> Tensor:
    """Return an upper bound of the logits ``[vocab]``: -inf for ``ids``, infinity for the others."""
    return _filled(ids, -math.inf, math.inf, vocab_size)


def _slots(count: int) -> int:
    """Return the slots of a table with ``count`` entries: a power of two, to compile few shapes."""
    return 1 << max(count - 1, 0).bit_length()


def _aligned(word: Sequence[int], width: int) -> Tensor:
    """Return all but the last token of ``word``, the last of them first, as ``[width]``."""
    return torch.tensor([*reversed(word[:-1]), *[_ANY] * (width - len(word) + 1)], **_IDS)


def _ends_with(rows: Rows, prefixes: Tensor) -> Tensor:
    """True ``[batch, rows, ...]`` where ``prefixes [batch, ..., n]``, read backwards, precede the rows' positions."""
    positions, width = rows.positions, prefixes.shape[-1]
    places = positions[..., None] - 1 - torch.arange(width, device=positions.device)
    suffix = torch.where(places < 0, _ABSENT, rows.sequence.at(places.clamp(min=0)))
    suffix = suffix.view(*positions.shape, *[1] * (prefixes.dim() - 2), width)
    prefixes = prefixes[:, None]
    return ((suffix == prefixes) | (prefixes == _ANY)).all(-1)


def _ban_(logits: Tensor, ids: Tensor, where: Tensor) -> Tensor:
    """Write -inf for ``ids [..., n]`` where ``where [batch, rows, n]``; ids may repeat or lie past the logits."""
    vocab_size = logits.shape[-1]
    where = (where & (ids < vocab_size)).expand(*logits.shape[:2], -1)
    bound = logits.new_full(where.shape, math.inf).masked_fill_(where, -math.inf)
    return logits.scatter_reduce_(2, ids.clamp(max=vocab_size - 1).expand_as(bound), bound, "amin")


class LogitBias(Rule):
    """logit_bias of single tokens: ``bias`` and ``draft_bias [batch, vocab]``, the part that the drafter gets."""

    for_drafts = True
    neutral: ClassVar = {"bias": 0.0, "draft_bias": 0.0}

    @classmethod
    def values(cls, settings: Settings, vocab_size: int) -> dict[str, Tensor]:
        biases = settings.get("logit_bias", ())
        return _token_biases(biases, vocab_size) if biases and not _sequences(biases) else {}

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        return logits + self.bias[:, None, : logits.shape[-1]]

    def apply_to_drafts(self, logits: Tensor, rows: Rows) -> Tensor:
        return logits + self.draft_bias[:, None, : logits.shape[-1]]


class SequenceBias(LogitBias):
    """logit_bias with sequences in it.

    ``biased_ends [batch, ends]`` are the last tokens of the sequences, each once, then -1. ``biased_prefixes [batch,
    ends, n, longest - 1]`` and ``prefix_biases [batch, ends, n]`` are the sequences with that last token.
    """

    reads_sequence = True
    neutral: ClassVar = LogitBias.neutral | {"biased_ends": -1, "biased_prefixes": _ANY, "prefix_biases": 0.0}

    @classmethod
    def values(cls, settings: Settings, vocab_size: int) -> dict[str, Tensor]:
        biases = settings.get("logit_bias", ())
        sequences = _sequences(biases)
        return _token_biases(biases, vocab_size) | _sequence_tables(sequences) if sequences else {}

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        matches = _ends_with(rows, self.biased_prefixes)
        bias = torch.nn.functional.pad(self.bias, (0, 1))  # one more column, for ends of -1
        ends = self.biased_ends % bias.shape[1]
        total = bias.gather(1, ends)[:, None]
        for slot in range(matches.shape[-1]):  # in a fixed order, since sums depend on it
            total = total + torch.where(matches[..., slot], self.prefix_biases[:, None, :, slot], 0.0)
        bias = bias[:, None].expand(-1, total.shape[1], -1).scatter(2, ends[:, None].expand_as(total), total)
        return logits + bias[..., : logits.shape[-1]]


def _sequences(biases: Biases) -> Biases:
    return [pair for pair in biases if len(pair[0]) > 1]


def _token_biases(biases: Biases, vocab_size: int) -> dict[str, Tensor]:
    single = {ids[0]: bias for ids, bias in biases if len(ids) == 1}
    bias = torch.zeros(vocab_size, **_NUMBERS)
    if vocab_size and single:
        bias[list(single)] = torch.tensor(list(single.values()), **_NUMBERS)
    return {"bias": bias, "draft_bias": torch.where(bias.abs() >= _DECISIVE_BIAS, bias, 0.0)}


def _sequence_tables(biases: Biases) -> dict[str, Tensor]:
    """Return the tables of `SequenceBias`. Sequences with the same last token keep the order of addition."""
    groups = list(dict.fromkeys(len(ids) for ids, _ in biases))  # transformers adds biases of one length together
    ends: dict[int, list[tuple[tuple[int, ...], float]]] = {}
    for ids, bias in sorted(biases, key=lambda pair: groups.index(len(pair[0]))):
        ends.setdefault(ids[-1], []).append((ids, bias))
    rows, deep, width = _slots(len(ends)), _slots(max(map(len, ends.values()))), max(groups) - 1
    last, added = torch.full((rows,), -1, **_IDS), torch.zeros(rows, deep, **_NUMBERS)
    prefixes = torch.full((rows, deep, width), _ANY, **_IDS)
    for row, (end, sequences) in enumerate(ends.items()):
        last[row] = end
        for slot, (ids, bias) in enumerate(sequences):
            prefixes[row, slot], added[row, slot] = _aligned(ids, width), bias
    return {"biased_ends": last, "biased_prefixes": prefixes, "prefix_biases": added}


class RepetitionPenalty(Rule):
    """``repetition_penalty [batch]`` float32."""

    neutral: ClassVar = {"repetition_penalty": 1.0}

    @classmethod
    def values(cls, settings: Settings, vocab_size: int) -> dict[str, Tensor]:
        penalty = settings.get("repetition_penalty")
        return {} if penalty is None else {"repetition_penalty": torch.tensor(penalty, **_NUMBERS)}

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        ids, counts = _counts(rows, torch.zeros_like(rows.prompt), logits.shape[-1])
        old = logits.gather(2, ids)
        penalty = self.repetition_penalty[:, None, None]
        new = torch.where(old < 0, old * penalty, old / penalty)
        return logits.scatter(2, ids, torch.where(counts > 0, new, old))


class CountPenalties(Rule):
    """``presence_penalty`` and ``frequency_penalty [batch]`` float32."""

    neutral: ClassVar = {"presence_penalty": 0.0, "frequency_penalty": 0.0}

    @classmethod
    def values(cls, settings: Settings, vocab_size: int) -> dict[str, Tensor]:
        if not any(name in settings for name in cls.neutral):
            return {}
        return {name: torch.tensor(settings.get(name, 0.0), **_NUMBERS) for name in cls.neutral}

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        ids, counts = _counts(rows, rows.prompt, logits.shape[-1])
        frequency, presence = (x[:, None, None] for x in (self.frequency_penalty, self.presence_penalty))
        loss = counts * frequency + (counts > 0) * presence
        return logits.scatter(2, ids, logits.gather(2, ids) - loss)


def _counts(rows: Rows, first: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Count the ids in each row's prefix, from position ``first [batch, 1]`` on.

    Returns:
        ``[batch, rows, n]`` int64 below ``vocab_size``, every id of the prefix and others, some repeated; and their
        counts ``[batch, rows, n]`` float32, exact below 2^24. Repeated ids have equal counts.
    """
    tokens, length, drafts = rows.state.tokens, rows.state.length, rows.block[:, 1:]
    place = torch.arange(tokens.shape[1], device=tokens.device)
    live = (place >= first) & (place <= length[:, None]) & (tokens < vocab_size)
    emitted = torch.zeros(tokens.shape[0], vocab_size, dtype=torch.float32, device=tokens.device)
    emitted = emitted.scatter_add(1, tokens.clamp(max=vocab_size - 1), live.float())
    ids = torch.cat([tokens, drafts], 1).clamp(max=vocab_size - 1)
    drafted, emitted = (drafts[:, :, None] == ids[:, None]).float(), emitted.gather(1, ids)[:, None]
    if rows.tree is None:
        counts = torch.cat([emitted, drafted], 1).cumsum(1)
    else:
        counts = emitted + rows.tree.visible[..., 1:].float() @ drafted  # sums of zeros and ones: exact in any order
    return ids[:, None].expand_as(counts), counts


class NoRepeatNgram(Rule):
    """no_repeat_ngram_size of the rows where ``applies [batch]``; a constant, because it is a number of passes."""

    reads_sequence = True
    neutral: ClassVar = {"applies": False}

    @classmethod
    def values(cls, settings: Settings, vocab_size: int) -> dict[str, Tensor]:
        return {"applies": _YES} if "no_repeat_ngram_size" in settings else {}

    @classmethod
    def constants(cls, settings: Settings) -> dict[str, Hashable]:
        return {"size": settings["no_repeat_ngram_size"]}

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        """Ban whatever would complete an n-gram that a row has seen.

        A window bans its last token if its other tokens equal the last ``size - 1`` that the row sees.
        """
        if self.size > rows.state.tokens.shape[1]:  # no row has room for one; a request may name any size
            return logits
        others, sequence = self.size - 1, rows.sequence
        places = rows.positions[..., None] - others + torch.arange(others, device=logits.device)
        suffix = sequence.at(places.clamp(min=0))
        logits = logits.clone()
        for tokens, is_seen in sequence.windows(self.size):
            matches, count = is_seen & self.applies[:, None, None], is_seen.shape[2]
            for k in range(others):
                matches = matches & (tokens[..., k : k + count] == suffix[..., k : k + 1])
            _ban_(logits, tokens[..., others:], matches)
        return logits


class BadWords(Rule):
    """bad_words_ids of two tokens or more: ``word_ends [batch, n]``, ``word_prefixes [batch, n, longest - 1]``."""

    reads_sequence = True
    neutral: ClassVar = {"word_prefixes": _ANY, "word_ends": _NO_TOKEN}

    @classmethod
    def values(cls, settings: Settings, vocab_size: int) -> dict[str, Tensor]:
        words = [word for word in settings.get("bad_words_ids", ()) if len(word) > 1]
        if not words:
            return {}
        width = max(map(len, words)) - 1
        prefixes = torch.full((_slots(len(words)), width), _ANY, **_IDS)
        for prefix, word in zip(prefixes, words, strict=False):
            prefix.copy_(_aligned(word, width))
        ends = torch.full((len(prefixes),), _NO_TOKEN, **_IDS)
        ends[: len(words)] = torch.tensor([word[-1] for word in words], **_IDS)
        return {"word_prefixes": prefixes, "word_ends": ends}

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        return _ban_(logits.clone(), self.word_ends[:, None], _ends_with(rows, self.word_prefixes))


class SuppressTokens(Rule):
    """suppress_tokens, which ban forced tokens too: ``bound [batch, vocab]`` float32, -inf for them."""

    for_drafts = True
    neutral: ClassVar = {"bound": math.inf}
    setting: ClassVar = "suppress_tokens"

    @classmethod
    def banned(cls, settings: Settings) -> Sequence[int]:
        """Return the ids that the settings ban."""
        return settings.get(cls.setting, ())

    @classmethod
    def values(cls, settings: Settings, vocab_size: int) -> dict[str, Tensor]:
        ids = cls.banned(settings)
        return {"bound": _upper_bound(ids, vocab_size)} if ids else {}

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        return torch.minimum(logits, self.bound[:, None, : logits.shape[-1]])


class BannedTokens(SuppressTokens):
    """bad_words_ids of one token."""

    @classmethod
    def banned(cls, settings: Settings) -> Sequence[int]:
        return [word[0] for word in settings.get("bad_words_ids", ()) if len(word) == 1]


class BeginSuppressTokens(SuppressTokens):
    """begin_suppress_tokens: ids that are banned as the first new token."""

    setting: ClassVar = "begin_suppress_tokens"

    @classmethod
    def constants(cls, settings: Settings) -> dict[str, Hashable]:
        return {"bos_is_forced": "forced_bos_token_id" in settings}

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        first = rows.prompt + (rows.prompt <= 1) if self.bos_is_forced else rows.prompt
        bound = self.bound[:, None, : logits.shape[-1]]
        return torch.minimum(logits, torch.where((rows.positions == first)[..., None], bound, math.inf))


class MinLength(Rule):
    """``min_length`` and ``min_new_tokens [batch]`` int64; ``stop [batch, vocab]`` float32: -inf for stop tokens."""

    for_drafts = True
    neutral: ClassVar = {"stop": math.inf, "min_length": 0, "min_new_tokens": 0}

    @classmethod
    def values(cls, settings: Settings, vocab_size: int) -> dict[str, Tensor]:
        if "stop_token_ids" not in settings:
            return {}
        least = {name: min(settings.get(name, 0), _ENDLESS) for name in ("min_length", "min_new_tokens")}
        bound = _upper_bound(settings["stop_token_ids"], vocab_size)
        return {"stop": bound, **{name: torch.tensor(value, **_IDS) for name, value in least.items()}}

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        least, least_new = self.min_length[:, None], self.min_new_tokens[:, None]
        early = (rows.positions < least) | (rows.positions - rows.prompt < least_new)
        return torch.minimum(logits, torch.where(early[..., None], self.stop[:, None, : logits.shape[-1]], math.inf))


class ForcedBos(Rule):
    """forced_bos_token_id: ``forced [batch, vocab]`` float32, the logits that force it where ``forces [batch]``."""

    for_drafts = True
    neutral: ClassVar = {"forced": 0.0, "forces": False}
    setting: ClassVar = "forced_bos_token_id"

    @classmethod
    def values(cls, settings: Settings, vocab_size: int) -> dict[str, Tensor]:
        ids = settings.get(cls.setting)
        return {"forced": _filled(ids, 0.0, -math.inf, vocab_size), "forces": _YES} if ids else {}

    def applies(self, rows: Rows) -> Tensor:
        """Return where a token is forced, ``[batch, rows]`` bool."""
        return rows.positions == 1

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        where = self.forces[:, None] & self.applies(rows)
        return torch.where(where[..., None], self.forced[:, None, : logits.shape[-1]], logits)


class ForcedEos(ForcedBos):
    """forced_eos_token_id: the last token of a row."""

    setting: ClassVar = "forced_eos_token_id"

    def applies(self, rows: Rows) -> Tensor:
        return rows.positions == rows.limits - 1


RULES: tuple[type[Rule], ...] = (
    *(LogitBias, SequenceBias, RepetitionPenalty, CountPenalties, NoRepeatNgram, BadWords),
    *(BannedTokens, MinLength, ForcedBos, ForcedEos, SuppressTokens, BeginSuppressTokens),
)
"""Every rule, in the order in which they are applied."""
