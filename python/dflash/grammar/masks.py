"""Where rows stand in their grammars, and what these allow: drafts are drawn again, the target's logits are masked."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..state import RUNNING, Block, State

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Matcher:
    """One row's place in its grammar; ``words`` is the size of a mask, 32 tokens in each.

    Args:
        grammar: what is matched; only kept.
        state: llguidance's, not in error.
        vocab_size: tokens that it knows.
        stop: the ids that end a row.
    """

    def __init__(self, grammar: Hashable, state: LLMatcher, vocab_size: int, stop: frozenset[int]) -> None:
        self.grammar, self._state, self._vocab_size, self._stop = grammar, state, vocab_size, stop
        self.words = -(-vocab_size // 32)

    def masks(self, state: State, rows: int) -> GrammarMasks:
        """Return masks for a running batch and blocks of up to ``rows`` rows, for grammars of this tokenizer."""
        return GrammarMasks(state, rows, self.words)

    def copy(self) -> Matcher:
        """Return another at the same place; what both have learned of the grammar is shared."""
        return Matcher(self.grammar, self._state.deep_copy(), self._vocab_size, self._stop)

    def consume(self, ids: Sequence[int]) -> None:
        """Move on by emitted tokens; raises ValueError if the grammar bans one or passes llguidance's limits."""
        if not self._state.consume_tokens(list(ids)):
            raise ValueError(_reason(self._state))

    def fill_(self, masks: Tensor, ids: Sequence[int], parents: Sequence[int] | None = None) -> None:
        """Write which tokens may follow each row of a block. A chain's masks are one call, without Python's lock.

        Args:
            masks: ``[rows, words]`` int32 on the host, contiguous; bit ``i % 32`` of word ``i // 32`` is for token i.
                Rows that no match leads to, and those of stop tokens, are left as they are.
            ids: of the block's rows; the first is the anchor, which has been consumed; -1 for no proposal.
            parents: of a tree, the row that each row continues, -1 for none; None for a chain.

        Raises:
            ValueError: no token may follow the anchor.
        """
        if parents is None:
            drafts = list(itertools.takewhile(self._is_text, ids[1:]))
            state = self._state.deep_copy()  # a draft may lead to an error, which llguidance never leaves
            state.unsafe_compute_mask_ptr_with_draft_token(masks.data_ptr(), 4 * self.words, drafts)
            if not state.is_error():
                return
            ids, parents = [ids[0], *drafts], range(-1, len(drafts))
        children: list[list[int]] = [[] for _ in ids]
        for row, parent in enumerate(parents):
            if parent >= 0 and self._is_text(ids[row]):
                children[parent].append(row)
        self._visit(self._state.deep_copy(), 0, masks, ids, children)

    def _visit(self, state: LLMatcher, row: int, masks: Tensor, ids: Sequence[int], children: list[list[int]]) -> None:
        """Write the masks of a row and of all that continue it."""
        state.unsafe_compute_mask_ptr(masks[row].data_ptr(), 4 * self.words)
        if state.is_error():  # llguidance would allow a stop token
            if row == 0:
                raise ValueError(_reason(state))
            masks[row] = 0
            return
        for child in children[row]:
            if _has(masks[row], ids[child]):
                ahead = state.deep_copy()
                ahead.consume_token(ids[child])
                self._visit(ahead, child, masks, ids, children)

    def _is_text(self, token: int) -> bool:
        return 0 <= token < self._vocab_size and token not in self._stop


def first_banned(masks: Tensor, drafts: Sequence[int]) -> int | None:
    """Return the index of the first draft that its mask bans where another token is allowed; -1 ends the drafts."""
    for place, token in enumerate(itertools.takewhile(lambda token: token >= 0, drafts)):
        if not _has(masks[place], token):
            return place if masks[place].any() else None
    return None


def _has(mask: Tensor, token: int) -> bool:
    return token < 32 * len(mask) and bool(mask[token // 32].item() >> token % 32 & 1)


def _reason(state: LLMatcher) -> str:
    """Return the first line of an error; the others show llguidance's insides."""
    return state.get_error().splitlines()[0]


class GrammarMasks:
    """Masks for the rows of a batch, made on the host by llguidance.

    Those of a drafted chain are made before the target runs: they also say which drafts to draw again. Those of other
    blocks are made while the target's pass runs. A step waits for the device once, and once more each time that drafts
    are drawn again. If a row's grammar goes wrong, that row ends: its masks allow nothing.

    Args:
        state: of the running batch.
        rows: the most rows of a block.
        words: of a mask.

    Attributes:
        errors: per row, why its grammar could not go on; empty if nothing went wrong.
    """

    def __init__(self, state: State, rows: int, words: int) -> None:
        batch, device = len(state.length), state.length.device
        self._state, on_gpu = state, device.type == "cuda"
        self.rows, self.words, self.errors = rows, words, [""] * batch
        self._matchers: list[Matcher | None] = [None] * batch
        self._consumed = [0] * batch  # tokens of each row, its prompt included, that its matcher knows of
        self._masked: list[object] = [None] * batch  # the tokens consumed and the drafts that each row's masks are for
        # All bits are set where nothing is masked.
        self._masks = torch.full((batch, rows, words), -1, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self._is_masked = torch.zeros(batch, 1, 1, dtype=torch.bool, device=device)
        self._back = torch.arange(rows - 1, -1, -1, device=device)
        bits = [[not byte >> bit & 1 for bit in range(8)] for byte in range(256)]
        eight = torch.tensor(bits, dtype=torch.bool, device=device)
        self._banned_by_byte = eight.view(torch.int64)[:, 0]  # eight bools in each
        self._asked: Tensor | None = None
        self._arrived = torch.cuda.Event() if on_gpu else None  # what was asked is on the host
        self._sent = torch.cuda.Event() if on_gpu else None  # the masks have left the host

    @property
    def are_used(self) -> bool:
        """True if a row has a grammar."""
        return any(matcher is not None for matcher in self._matchers)

    def set_(self, row: int, matcher: Matcher | None, prompt_length: int = 0) -> None:
        """Let a row begin a grammar after its prompt, or have none. On a GPU this waits for the step that runs."""
        self._asked = None  # a step that failed before it got its answer has left this
        if matcher is None and self._matchers[row] is None:
            return
        self._is_masked[row] = matcher is not None
        self._matchers[row] = None if matcher is None else matcher.copy()
        self._consumed[row], self.errors[row] = prompt_length, ""
        if matcher is not None:
            if self._sent is not None:
                self._sent.synchronize()
            self._fill(row, [-1])

    def banned_drafts(self, drafts: Tensor, vocab_size: int) -> list[tuple[int, int, Tensor]]:
        """Find the first of each row's ``drafts [batch, drafts]`` that its grammar bans; waits for the device.

        Returns:
            Row, index of the draft, and ``[vocab]`` bool, what is not allowed there.
        """
        found = []
        for row, rest in self._advance(self._packed(drafts).tolist()).items():
            self._fill(row, [-1, *rest])
            if (place := first_banned(self._masks[row], rest)) is not None:
                mask = self._masks[row, place].to(drafts.device)
                found.append((row, place, self._banned(mask, vocab_size)))
        return found

    def ask(self, block: Block) -> None:
        """Send to the host what the masks of a block depend on, unless they are made; does not wait."""
        if block.is_checked:
            return
        asked = self._packed(block.ids if block.tree is None else torch.cat([block.ids, block.tree.parents], 1))
        if self._arrived is not None:
            pinned = torch.empty(asked.shape, dtype=asked.dtype, device="cpu", pin_memory=True)
            asked = pinned.copy_(asked, non_blocking=True)
            self._arrived.record()
        self._asked = asked

    def apply(self, logits: Tensor) -> Tensor:
        """Return ``logits [batch, rows, vocab]`` with -inf for what a grammar does not allow, NaN where it leaves none.

        Waits for what was asked and makes the masks. Rows that are not running keep theirs.
        """
        rows = logits.shape[1]
        if self._asked is not None:
            if self._arrived is not None:
                self._arrived.synchronize()
            values, self._asked = self._asked.tolist(), None
            for row, ids in self._advance(values).items():
                if (self._consumed[row], ids[1:]) != self._masked[row]:
                    self._fill(row, ids[:rows], ids[rows:] or None)
        masks = self._masks[:, :rows].to(logits.device, non_blocking=True)
        if self._sent is not None:
            self._sent.record()
        banned = self._banned(masks, logits.shape[2]) & self._is_masked
        logits = logits.masked_fill(banned, -torch.inf)
        nothing = (logits.amax(-1, keepdim=True) == -torch.inf) & self._is_masked
        return logits.masked_fill_(nothing, torch.nan)

    def _fill(self, row: int, ids: list[int], parents: list[int] | None = None) -> None:
        """Write a row's masks; see `Matcher.fill_`."""
        self._masks[row] = -1
        try:
            self._matchers[row].fill_(self._masks[row], ids, parents)
        except ValueError as error:
            self._give_up(row, error)
        self._masked[row] = self._consumed[row], ids[1:]

    def _packed(self, ids: Tensor) -> Tensor:
        """Return lengths, ends, the last tokens that a step may have emitted, and ``ids``, as columns."""
        length = self._state.length[:, None]
        recent = self._state.tokens.gather(1, (length - self._back).clamp(min=0))
        return torch.cat([length, self._state.done[:, None], recent, ids], 1)

    def _advance(self, packed: Sequence[Sequence[int]]) -> dict[int, list[int]]:
        """Move matchers to their rows' anchors; return the ids of the running rows that have one."""
        out = {}
        for row, (length, done, *rest) in enumerate(packed):
            matcher = self._matchers[row]
            if matcher is None or done != RUNNING:
                continue
            recent, ids = rest[: len(self._back)], rest[len(self._back) :]
            try:
                matcher.consume(recent[len(recent) - (length + 1 - self._consumed[row]) :])
            except ValueError as error:
                self._give_up(row, error)
                continue
            self._consumed[row] = length + 1
            out[row] = ids
        return out

    def _give_up(self, row: int, error: ValueError) -> None:
        """Allow nothing more in a row, which ends it."""
        self._masks[row] = 0
        self.errors[row] = f"the grammar of row {row} cannot go on at position {self._consumed[row]}: {error}"

    def _banned(self, masks: Tensor, vocab_size: int) -> Tensor:
        """Return what ``masks [..., words]`` ban, ``[..., vocab]`` bool. Ids unknown to the tokenizer are banned."""
        banned = self._banned_by_byte[masks.view(torch.uint8).int()].view(torch.bool)
        return torch.nn.functional.pad(banned, (0, vocab_size - banned.shape[-1]), value=True)
