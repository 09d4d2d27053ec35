"""One step: propose a block, verify it, keep the longest matching path plus one token; and what it needs."""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import ops
from ..call import Call
from ..drafter import Drafter, MtpHead
from ..history import FeatureHistory
from ..outputs import FinishedAnswer
from ..proposers import ChainProposer, LookupProposer, MtpProposer, TreeProposer, chain_widths
from ..sampling import HostRules, KeyedAcceptance, LogitRules, RejectionAcceptance
from ..settings import MAX_LOGPROBS, BlockSize, tree_rows
from ..state import FULL, RUNNING, STOPPED, Block, Logprobs, State
from ..targets import Target, first_hook
from .budget import TreeBudget, WidthBudget, context_bucket, measured_costs

if TYPE_CHECKING:
    from ..grammar import GrammarMasks

GRAMMAR_OBSTACLE = "a grammar's masks are made on the host"  # why steps must not be captured
_MAX_RULES = 16  # of different layouts; each holds up to six tensors over the vocabulary


@torch.no_grad()
def step(engine: Engine) -> None:
    """Propose one block, verify it, keep the longest matching path plus one token; all on the device.

    Reads and writes only the state's tensors: fixed shapes, no host synchronization, and only values depend on data
    (on a CPU also whether rows that are done, features that no row has, or a drafter that has nothing to do, are left
    out). A row that is done stays as it is. ``state.report`` tells the host what was emitted. Follows section 4 of
    the paper (arXiv 2602.06036).
    """
    state = engine.state
    block = engine.proposer.propose(state)
    raw = engine.target.verify(block, state)  # also writes the drafter's next input
    logits = engine.rules.apply(raw, block, state)
    choices = engine.acceptance.choose(logits, block, state)
    engine.store_logits_(raw, choices)
    engine.commit_(block, choices)


@torch.no_grad()
def host_step(engine: Engine) -> None:
    """Run a step with grammars, or with Python rules that choose one token at a time; waits for the device.

    A grammar's masks are made while the device runs the target.
    """
    state, masks = engine.state, engine.grammar_masks
    block = engine.proposer.propose(state)
    if masks is not None:
        masks.ask(block)
    raw = engine.target.verify(block, state)
    logits = engine.rules.apply(raw, block, state)
    if masks is not None:
        logits = masks.apply(logits)
    if engine.host_rules is None:
        chosen = (engine.acceptance.choose(logits, block, state),)
    else:
        chosen = walk(engine, block, logits, state, state.done.tolist())
    engine.store_logits_(raw, chosen[0])
    engine.commit_(block, *chosen)


def walk(
    engine: Engine, block: Block, logits: Tensor, state: State, done: list[int]
) -> tuple[Tensor, Tensor, list[int]]:
    """Choose a block's tokens in order, calling processors and criteria as one-token decoding would.

    Args:
        engine: whose host rules are called, and whose keyed noise chooses.
        block: the last emitted token and drafts.
        logits: ``[batch, rows, vocab]``.
        state: whose ``length [batch]`` is the index of the last emitted token.
        done: per row, nonzero to leave it out.

    Returns:
        Choices ``[batch, rows]`` int64 up to each row's first token that is not a draft; limits ``[batch]`` int64,
        lower where a criterion ended the row; and the rows that a criterion ended.
    """
    rules, (batch, rows) = engine.host_rules, block.ids.shape
    positions, tokens = state.positions(rows), state.tokens.clone()
    drafts, stop = _drafts(block), list(map(set, state.stop_token_ids.tolist()))
    first, ends = positions[:, 0].tolist(), state.limits.tolist()
    choices, limits, stopped = [[0] * rows for _ in range(batch)], list(ends), []
    walking = [row for row in range(rules.rows) if done[row] == RUNNING]
    at = [0] * batch  # the block's row that each row of the batch has come to
    for j in range(rows):
        # 1. Processors, row by row, then one choice for all. Of a chain a slice of logits, where lists of indices are
        # tensors that are sent to the device.
        if block.tree is None:
            scores = logits[:, j : j + 1].to(torch.float32, copy=True)
        else:
            scores = logits[range(batch), at][:, None].float()
        for row in walking:
            scores[row] = rules.process(tokens[row : row + 1, : first[row] + j], scores[row].clone())
        chosen = state.sampling.select(scores, positions[:, j : j + 1])
        tokens.scatter_(1, positions[:, j : j + 1], chosen.clamp(min=0))
        # 2. Rows with a draft that equals the choice, and that nothing ends, walk on to it.
        ids, matching = chosen[:, 0].tolist(), []
        for row in walking:
            token, emitted = ids[row], first[row] + j + 1
            choices[row][at[row]] = token
            if token >= 0 and rules.stops(tokens[row : row + 1, :emitted]):
                limits[row] = emitted
                stopped.append(row)
            elif token not in stop[row] and emitted < ends[row] and (at[row], token) in drafts[row]:
                at[row] = drafts[row][at[row], token]
                matching.append(row)
        walking = matching
        if not walking:
            break
    # 3. Processors and criteria may know more than the ids (a clock): rank 0's count. Its choices are shared later.
    ranks, tensor = engine.target.ranks, block.ids.new_tensor
    lowered = ranks.share_(tensor(limits))
    return tensor(choices), lowered, ranks.share_rows(stopped, lowered)


def _drafts(block: Block) -> list[dict[tuple[int, int], int]]:
    """Return, per row of the batch, which row of the block continues a row with a token: ``(row, token) -> row``.

    As in `dflash.ops.accept_path_`, the first of several siblings with one id counts.
    """
    ids, rows = block.ids.tolist(), block.ids.shape[1]
    parents = [range(-1, rows - 1)] * len(ids) if block.tree is None else block.tree.parents.tolist()
    return [
        {(parent[row], token[row]): row for row in reversed(range(rows)) if parent[row] >= 0}
        for parent, token in zip(parents, ids, strict=True)
    ]


class Engine:
    """The parts of a step, for one target and drafter.

    Args:
        target: the target.
        draft: the drafter; None for none.
        batch_size: rows of the batch.
        max_length: tokens that a row may hold.
        block_size: rows of a chain; a tree is one less deep.
        tree_rows: the most rows of a tree; 0 for chains only.
        widths: ``"auto"`` to choose the rows of chains as a call proceeds; others for all rows.
        prompt_lookup: tokens of an n-gram after which the text so far is drafted again; 0 for none.

    Attributes:
        state: see `State`.
        chain: drafts chains.
        tree: drafts trees; None without room for them.
        proposer: the one of the call, or of all calls that share the rows.
        budget: chooses the rows of a tree or of a chain as the call proceeds; None where they are fixed.
        costs: the measured seconds of a step by size, per way of launching; with chains also per way of drafting and
            context length.
        calls: per row, the call that it belongs to, or None.
        on_answer: gets every answer that has ended; None for nobody.
        leaves_out: True if steps may leave out rows that are done, where the host knows which: shapes may change.
        rules: the logit rules of all rows.
        host_rules: Python processors and criteria of the call; None for none.
        logprobs: where log probabilities go; None while no row asks for them.
        acceptance: chooses the target's tokens.
        keyed: the acceptance by keyed noise, which also chooses the first token of every call.
    """

    def __init__(
        self, target: Target, draft: Drafter | MtpHead | None, *, batch_size: int, max_length: int, block_size: int,
        tree_rows: int = 0, widths: BlockSize = None, prompt_lookup: int = 0,
    ) -> None:  # fmt: skip
        self.target, self.draft = target, draft
        self.batch_size, self.block_size, self.widths = batch_size, block_size, widths
        self.state = State(target, draft, batch_size, max_length, block_size, tree_rows)
        self.on_answer: Callable[[FinishedAnswer], None] | None = None
        self.chain: ChainProposer | LookupProposer
        self.tree: TreeProposer | None = None
        if draft is None:
            self.chain = LookupProposer(prompt_lookup, block_size)
        elif isinstance(draft, MtpHead):
            self.chain = MtpProposer(draft, target, block_size, prompt_lookup)
        else:
            self.chain = ChainProposer(draft, target, block_size, prompt_lookup)
            self.tree = TreeProposer(draft, target, batch_size, block_size) if tree_rows else None
        self.proposer: ChainProposer | LookupProposer | TreeProposer = self.chain
        self.budget: TreeBudget | WidthBudget | None = None
        self._tree_budget, self._width_budget = TreeBudget({}), WidthBudget({}, block_size)
        self.costs: dict[Hashable, dict[int, float]] = {}
        self.vocab_size = target.embedding_weight.shape[0]
        self.keyed = KeyedAcceptance()
        self.acceptance: KeyedAcceptance | RejectionAcceptance = self.keyed
        self.calls: list[Call | None] = [None] * batch_size
        self.leaves_out = False
        self.host_rules: HostRules | None = None
        self.logprobs: Logprobs | None = None
        # Made at first use, and kept: graphs hold their addresses.
        self._rejection: RejectionAcceptance | None = None
        self._logprobs: Logprobs | None = None
        self._masks: GrammarMasks | None = None
        self._rules: OrderedDict[tuple, LogitRules] = OrderedDict()
        self._apply_settings()

    def record_answers(self, on_answer: Callable[[FinishedAnswer], None]) -> None:
        """Call ``on_answer`` with every answer that ends, and keep the target's features of all positions for it."""
        self.on_answer = on_answer
        self.state.history = FeatureHistory(self.state.context, self.state.tokens.shape[1])

    def refresh(self) -> None:
        """Notice weights whose storage was replaced; called once per call, outside of the step."""
        self.target.refresh(self.state.target_cache)
        if self.draft is not None:
            self.draft.refresh()

    def forget_values(self) -> None:
        """Read all weights again at the next `refresh`, whether they are known to have changed or not."""
        self.target.forget_values()
        if self.draft is not None:
            self.draft.forget_values()

    # ------------------------------------------------------------------------------------------ rows and calls

    def check_ranks_agree(self, call: Call, chunk: int) -> None:
        """Raise ValueError if the target's processes begin different calls, or cannot run this one together."""
        ranks = self.target.ranks
        if call.logprobs is not None:
            raise ValueError(f"logprobs need a target in one process, this one is spread over {ranks.count}")
        ranks.compare("its prompts or arguments", lambda: (call.changes_text(), chunk, self.block_size, self.widths))

    def check_pictures(self, call: Call) -> None:
        """Raise ValueError if a call's prompts have pictures that the target cannot run."""
        if call.pictures and (reason := self.target.picture_obstacle(call.pictures)):
            raise ValueError(f"pictures cannot be given to this target: {reason}")

    def configure(self, call: Call) -> None:
        """Give the first rows to ``call``, none to others, and set the ways to draft and to accept."""
        self._free(slice(0, self.batch_size))
        self._assign(slice(0, len(call.prompts)), call)
        self.host_rules = call.host_rules
        # At temperature 0 every way to accept is the greedy one.
        samples = self.draft is not None and call.sampling.temperature > 0
        self.acceptance = self.keyed
        if samples and call.acceptance == "rejection":
            if self._rejection is None:  # it holds the drafts' probabilities
                sizes = self.batch_size, self.block_size - 1, self.vocab_size
                self._rejection = RejectionAcceptance(*sizes, self.target.device)
            self.acceptance = self._rejection
        if rows := tree_rows(call.tree):
            self._use_budget(self._tree_budget if call.tree == "auto" else None)
            self.proposer = self.tree
            self.tree.configure(self.rules, samples, rows, forecasts=self.budget is not None)
        else:
            self._draft_chains(call.denoise_steps, self._rejection if self.acceptance is self._rejection else None)
            self._use_budget(self._width_budget if self.widths == "auto" else None)

    def admit(self, row: int, call: Call) -> None:
        """Assign a free row to a call of one prompt; the other rows keep theirs.

        Raises:
            ValueError: its grammar is for another tokenizer than those of other rows.
        """
        self._assign(slice(row, row + 1), call)
        self._draft_chains(call.denoise_steps)

    def begin_rows_(self, passes: int) -> None:
        """Take all rows from their calls, forget what they hold, and set how those that `admit` assigns will draft."""
        self._free(slice(0, self.batch_size))
        self.state.vacate_(slice(0, self.batch_size))
        self.host_rules, self.acceptance = None, self.keyed
        self._apply_settings()
        self._draft_chains(passes)
        # A row's text must not depend on the others, so a width is chosen only where no bit depends on it.
        is_free = self.target.is_exact_for(self.batch_size * self.block_size)
        self._use_budget(self._width_budget if self.widths == "auto" and is_free else None)

    def retire(self, row: int) -> None:
        """Take ``row`` from its call; steps do least for it."""
        self._free(slice(row, row + 1))
        if isinstance(self.budget, WidthBudget):
            self.budget.leave(row)
        self.state.vacate_(slice(row, row + 1))
        self._apply_settings()
        self._draft_chains(self.chain.passes)

    def _assign(self, rows: slice, call: Call) -> None:
        """Write into ``rows`` how the prompts of ``call`` sample, where they end and what rules they have."""
        self.state.sampling.set_(rows, call.sampling)
        self.target.ranks.share_(self.state.sampling.seeds)  # each has drawn its own if the call named none
        for row in range(rows.start, rows.stop):
            self.state.set_stop_token_ids(row, call.stop_token_ids)
        self.calls[rows] = [call.without_pictures()] * len(call.prompts)
        if call.grammars:
            self._begin_grammars(rows.start, call)
        self._apply_settings()

    def _free(self, rows: slice) -> None:
        """Take ``rows`` and their grammars from their calls."""
        for row in range(rows.start, rows.stop):
            self.calls[row] = None
            if self._masks is not None:
                self._masks.set_(row, None)

    def _begin_grammars(self, first: int, call: Call) -> None:
        """Let the rows from ``first`` on begin the grammars of a call."""
        rows, masks = max(self.block_size, tree_rows(call.tree)), self._masks
        one = next(matcher for matcher in call.grammars if matcher is not None)
        if masks is None or masks.words != one.words or masks.rows < rows:
            if masks is not None and masks.are_used:
                raise ValueError("grammars of rows that run at the same time must be for one tokenizer, got two")
            masks = self._masks = one.masks(self.state, rows)
        for row, (matcher, prompt) in enumerate(zip(call.grammars, call.prompts, strict=True), first):
            masks.set_(row, matcher, len(prompt))

    @property
    def grammar_masks(self) -> GrammarMasks | None:
        """Tokens that the grammars of calls allow; None if no row has one."""
        return self._masks if self._masks is not None and self._masks.are_used else None

    @property
    def is_exact(self) -> bool:
        """True if no bit that a step decides depends on the number of threads."""
        return self.acceptance is self.keyed and self.target.is_exact_for(self.state.block.numel())

    def _apply_settings(self) -> None:
        """Use the logit rules of all rows from now on, and keep log probabilities if a row asks for them."""
        # 1. Rules of one layout share tensors that never move; the least recently used layouts go.
        settings, asks = [], False
        for call in self.calls:
            settings.append({} if call is None else call.rules)
            asks = asks or (call is not None and call.logprobs is not None)
        layout = LogitRules.layout(settings) if any(settings) else ()
        if layout not in self._rules:
            while len(self._rules) >= _MAX_RULES:
                self._rules.popitem(last=False)
            self._rules[layout] = LogitRules(settings, self.vocab_size, self.target.device)
        self._rules.move_to_end(layout)
        self.rules = self._rules[layout]
        if layout:
            self.rules.set_(settings)
        # 2. Log probabilities
        if asks and self._logprobs is None:
            self._logprobs = Logprobs(*self.state.tokens.shape, MAX_LOGPROBS, self.target.device)
        self.logprobs = self._logprobs if asks else None

    def _draft_chains(self, passes: int, rejection: RejectionAcceptance | None = None) -> None:
        self.proposer = self.chain
        self.chain.configure(self.rules, passes, rejection, self.grammar_masks)

    def graph_obstacle(self, call: Call | None, hook: str) -> str:
        """Return why steps must not be captured; empty if they may.

        Args:
            call: whose steps they are; None if they are those of many, without grammars and Python rules.
            hook: the name of one of the target's, or empty.
        """
        if self.target.ranks.count > 1:
            return "the target is spread over several processes"
        if call is not None and call.host_rules is not None:
            return "logits_processor and stopping_criteria run on the host"
        if call is not None and call.grammars:
            return GRAMMAR_OBSTACLE
        if hook:
            return f"a graph would not call the target's hook on {hook}"
        if self.draft is not None and (hook := first_hook(self.draft)):
            return f"a graph would not call the drafter's hook on {hook}"
        return ""

    # ------------------------------------------------------------------------------------------ rows of a block

    def _use_budget(self, budget: TreeBudget | WidthBudget | None) -> None:
        """Let ``budget`` choose from now on. It keeps what it has learned of the drafter in earlier calls."""
        self.budget = budget
        if budget is not None:
            budget.begin()

    def choose_rows(self) -> None:
        """Set the rows of the next step; the call leaves them to us."""
        self.proposer.rows = int(self._shared(self.budget.choose()))

    def costs_of(
        self, count: int, launching: Hashable, length: int, time_step: Callable[[], float], warm_ups: int
    ) -> dict[int, float]:
        """Return what a step of each size costs; measure it first if that was not done before.

        Args:
            count: rows of the batch that the step runs.
            launching: how steps are launched: kernel by kernel, launches may take as long as 128 rows.
            length: of the longest context.
            time_step: takes a step, launched so, and returns its seconds.
            warm_ups: how many steps of a kind take longer than the others.
        """
        is_tree = isinstance(self.budget, TreeBudget)
        key = (count, launching) if is_tree else (count, launching, self.chain.kind[:-1], context_bucket(length))
        if key in self.costs:
            return self.costs[key]
        # Rows that are done stay as they are, but for the features that wait.
        kept = [self.state.done, self.state.num_context, self.state.context]
        values = [tensor.clone() for tensor in kept]
        self.state.done.fill_(FULL)

        def time_step_of(rows: int) -> float:
            self.proposer.rows = rows
            return self._shared(time_step())

        sizes = () if is_tree else (chain_widths(self.block_size), math.inf)
        self.costs[key] = measured_costs(time_step_of, warm_ups, *sizes)
        for tensor, value in zip(kept, values, strict=True):
            tensor.copy_(value)
        return self.costs[key]

    def _shared(self, number: float) -> float:
        """Return rank 0's number."""
        if self.target.ranks.count == 1:
            return number
        return float(self.target.ranks.share_(torch.tensor(number, dtype=torch.float64, device=self.target.device)))

    def kind(self) -> Hashable:
        """Return what the branches of `step`, and the shapes and addresses of its tensors, depend on.

        Rules that are freed and made again are others. The stop list is replaced only by a longer one.
        """
        rules, stop = weakref.ref(self.rules), self.state.stop_token_ids.shape
        return self.proposer.kind, self.acceptance, rules, stop, self.logprobs is not None

    # ------------------------------------------------------------------------------------------ the end of a step

    def store_logits_(self, logits: Tensor, choices: Tensor) -> None:
        """Store the log probabilities and best tokens that are asked for, of a chain. Call it before `commit_`."""
        if self.logprobs is not None:
            self.logprobs.write_(slice(None), logits, choices, self.state.positions(choices.shape[1]))
        if self.state.history is not None:
            self.state.history.write_top_(slice(None), self.state.length + 1, logits)

    def commit_(self, block: Block, choices: Tensor, limits: Tensor | None = None, stopped: Sequence[int] = ()) -> None:
        """Emit what was accepted, advance every row and its caches, and report to the host.

        Args:
            block: what was proposed.
            choices: ``[batch, rows]`` int64, the target's choices after each row of the block.
            limits: ``[batch]`` int64, lower limits for this step; None for the state's.
            stopped: rows that end with this step whatever they emit.
        """
        state, limits, path, expected = self.state, self.state.limits if limits is None else limits, None, None
        counters = state.tokens, state.length, state.num_context, state.done
        waiting = state.num_context.clone() if block.waits else None
        choices = self.target.ranks.share_(choices)
        # 1. Accept a chain's longest matching prefix, whose features are where they belong, or a tree's path.
        if block.tree is None:
            ops.accept_prefix_(block.ids, choices, state.stop_token_ids, limits, *counters)
            report = choices, block.ids
        else:
            path, report = state.tree_path, (state.tree_choices, state.block)
            ops.accept_path_(
                block.ids, block.tree.parents, choices, state.stop_token_ids, limits, *counters, path, *report
            )
            ops.gather_rows_(state.features(block), path, state.context)
            expected = self.tree.expected if isinstance(self.budget, TreeBudget) else None
        for row in stopped:
            state.done[row].fill_(STOPPED)
        # 2. The caches follow. The drafter's takes a chain of positions, whatever shape was verified.
        state.target_cache.commit_(state.length, state.num_context, path)
        if state.draft_cache is not None:
            state.draft_cache.commit_(state.length, state.num_context)
        if waiting is not None:
            state.wait_(waiting)
        if state.history is not None:
            state.history.write_(slice(None), state.length - state.num_context, state.context)
        # 3. Tell the host.
        state.report.write_(state.length, state.done, *report, expected)
