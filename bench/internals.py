"""The parts of the package beyond its public names that benches use.

Only this file follows when the engine changes; every other bench goes through it.
"""

import contextlib
import time
from collections.abc import Callable, Hashable, Iterator

import torch
from torch import Tensor, nn

import dflash
from dflash.engine import Direct, Replay
from dflash.state import Block
from dflash.targets import Target, find_layers, structural_copy
from dflash.targets.model import weight_of

__all__ = [
    "Direct",
    "ForcedStep",
    "Replay",
    "cache_layers",
    "find_layers",
    "make_runner",
    "prompt_logits",
    "structural_copy",
    "time_layers",
    "time_parts",
    "weights_of",
]

Force = Callable[[Tensor, Tensor], Tensor]
"""Called with the block ``[batch, rows]`` and the target's choices ``[batch, rows]``; returns the choices to use."""


class _ForcedAcceptance:
    """An acceptance whose choices are overwritten."""

    def __init__(self, acceptance, force: Force) -> None:
        self._acceptance, self._force = acceptance, force

    def choose(self, logits: Tensor, block, state) -> Tensor:
        return self._force(block.ids, self._acceptance.choose(logits, block, state))


class _ForcedProposer:
    """A proposer of trees that are overwritten."""

    def __init__(self, proposer, replace: Callable) -> None:
        self._proposer, self._replace = proposer, replace

    def propose(self, state) -> Block:
        block = self._proposer.propose(state)
        return Block(*self._replace(block.ids, block.tree))

    def __getattr__(self, name: str):
        return getattr(self._proposer, name)


class ForcedStep:
    """A generator's step whose target's choices are overwritten, at a random state in the middle of a text.

    Args:
        target: the target.
        drafter: its drafter.
        force: what overwrites the choices; with ``tree`` also the drafted trees, by its ``replace``.
        options: of `dflash.Generator`.

    Attributes:
        state: the engine's.
        report: what the step writes for the host.
    """

    def __init__(self, target: nn.Module, drafter: dflash.Drafter, force: Force, **options) -> None:
        self._generator = dflash.Generator(target, drafter, reuse_prefix=False, **options)
        engine = self._generator.engine
        if rows := options.get("tree"):
            engine.tree.configure(engine.rules, samples=False, rows=rows)
            engine.proposer = _ForcedProposer(engine.tree, force.replace)
        engine.acceptance = _ForcedAcceptance(engine.acceptance, force)
        self.drafter, self.force = drafter, force
        self.state, self.report = engine.state, engine.state.report.tensor

    def __call__(self) -> None:
        """Take one step."""
        self._generator.step()

    def fill_(self) -> None:
        """Fill tokens, features and both caches with random numbers."""
        state, target = self.state, self._generator.engine.target
        state.tokens.random_(0, self._generator.vocab_size)
        state.context.normal_()
        config, sizes = target.config, {"dtype": target.dtype, "device": target.device}
        state.target_cache.allocate(config.num_hidden_layers, config.num_key_value_heads, config.head_dim, **sizes)
        for buffer in (*state.target_cache.buffers, *state.draft_cache.buffers):
            buffer.normal_()

    def place_(self, context: int, accepted: int) -> None:
        """Put every row between two steps at length ``context``, the last of which emitted ``accepted`` tokens."""
        state = self.state
        state.length.fill_(context)
        state.draft_cache.slots_(state.length[:, None])  # one that slides goes there
        state.num_context.fill_(accepted)
        state.limits.fill_(state.tokens.shape[1])
        state.done.zero_()

    def share_(self, other: "ForcedStep") -> None:
        """Use the tokens, features and caches of ``other`` from now on."""
        ours, theirs = self.state, other.state
        ours.tokens, ours.context = theirs.tokens, theirs.context
        ours.target_cache, ours.draft_cache = theirs.target_cache, theirs.draft_cache
        self._generator.engine.target.refresh(ours.target_cache)

    def launcher(self) -> tuple[Replay | Direct, Callable[[], None], Callable[[], Hashable]]:
        """Return the runner, the step, and what returns the key under which the runner keeps the step's graph."""
        return self._generator.runner, self._generator.step, self._generator.engine.kind


def weights_of(generator: dflash.Generator) -> tuple[list, object]:
    """Return the weights of the layers and of the head of a target that runs on `dflash.ops`, as the ops take them."""
    fused = generator.engine.target._fused
    return list(fused.stack.layers), weight_of(fused.head)


def cache_layers(cache: object) -> tuple[list[Tensor], list[Tensor]]:
    """Return the keys and the values of a cache, a tensor per layer."""
    return list(cache.keys.values()), list(cache.values.values())


def make_runner(report: Tensor) -> Replay | Direct:
    """Return what launches steps that write ``report`` for the host."""
    return Replay(report) if report.is_cuda else Direct(report)


def prompt_logits(model: nn.Module, weights: str | None = None) -> Callable[[Tensor, int], Tensor]:
    """Return what computes the logits ``[count, vocab]`` of the last tokens of ``ids [length]``, as for a prompt."""
    target, start = Target(model, weights=weights), torch.zeros(1, dtype=torch.int64)

    def predict(ids: Tensor, count: int) -> Tensor:
        cache = target.new_cache(1, len(ids), 1)
        return target.forward(ids[None], start, cache, count, keep=start + len(ids))[0][0]

    return predict


def time_parts(generator: dflash.Generator) -> dict[str, list[float]]:
    """Return lists to which every pass adds the seconds that the head takes, and the choice of tokens."""
    target, found = generator.engine.target, {"head": [], "choice": []}
    head = (target.draft_head.__self__, "logits") if not target.fused_reason else (target.head, "forward")
    for seconds, (owner, name) in zip(found.values(), (head, (generator.engine.keyed, "choose")), strict=True):
        setattr(owner, name, _timed(getattr(owner, name), seconds))
    return found


@contextlib.contextmanager
def time_layers() -> Iterator[list[float]]:
    """Give a list to which every pass of layers in one op adds its seconds."""
    run, seconds = dflash.ops.decoder_layers, list[float]()
    dflash.ops.decoder_layers = _timed(run, seconds)
    try:
        yield seconds
    finally:
        dflash.ops.decoder_layers = run


def _timed(run: Callable, seconds: list[float]) -> Callable:
    def timed(*arguments, **options):
        began = time.perf_counter()
        result = run(*arguments, **options)
        seconds.append(time.perf_counter() - began)
        return result

    return timed
