"""One-shot calls: ``generate`` and ``stream`` on a generator that is kept for the next call with the same pair."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, cast, overload

import torch
from torch import Tensor, nn

from .call import Call, GenerateArguments, TargetDefaults, check_drafts, check_stream_arguments
from .drafter import MTP, Drafter
from .fit import check_pair
from .generator import CallLock, Generator, held
from .options import OPTIONS, OneShotOptions
from .outputs import GenerateOutput, StreamEvent
from .settings import tree_rows
from .targets import Fingerprint, check_target, forget_trials, max_positions, structural_copy, unwrap

if TYPE_CHECKING:
    from typing_extensions import Unpack


_CAPACITY_STEP = 256
Draft: TypeAlias = nn.Module | Literal["mtp"] | None
"""What drafts: a drafter, a head in the target's files, or nothing."""


class OneShotArguments(GenerateArguments, OneShotOptions, total=False):
    """The keyword arguments of `generate` and `stream`: those of a call, and the options of `OneShotOptions`."""


@overload
def generate(
    target: nn.Module, draft: Draft, ids: Tensor, *, return_dict_in_generate: Literal[False] = False,
    **arguments: Unpack[OneShotArguments],
) -> Tensor: ...  # fmt: skip


@overload
def generate(
    target: nn.Module, draft: Draft, ids: Tensor, *, return_dict_in_generate: Literal[True],
    **arguments: Unpack[OneShotArguments],
) -> GenerateOutput: ...  # fmt: skip


@overload
def generate(
    target: nn.Module, draft: Draft, ids: Tensor, *, return_dict_in_generate: bool,
    **arguments: Unpack[OneShotArguments],
) -> Tensor | GenerateOutput: ...  # fmt: skip


def generate(
    target: nn.Module, draft: Draft, ids: Tensor, *, return_dict_in_generate: bool = False,
    **arguments: Unpack[OneShotArguments],
) -> Tensor | GenerateOutput:  # fmt: skip
    """Generate exactly what ``target`` would write on its own, drafting blocks with ``draft``.

    At temperature 0 the output is that of ``target.generate(do_sample=False)``. At a positive temperature each token is
    ``argmax(filtered(logits / temperature) + gumbel(seed, position, token))``: a function of the seed, the position and
    the prefix only. The text is therefore the same for every drafter, block size and batch (drafter-invariant
    speculative decoding; Daliri et al., "Coupling without communication and drafter-invariant speculative decoding").

    The caches of the last (target, draft) are kept for the next call, and `release` frees them. A call notices tensors
    that were replaced or moved since, hooks that came or went, and adapters that were switched. Call `release` after
    other changes of a live model (its attributes, config, methods or functions) and, with weights in 8 bits, after
    writes that torch does not count (``tensor.data``, NumPy). Calls from several threads run one after another. A call
    from inside a call (by a streamer, a processor, a criterion or a hook) makes caches of its own.

    Args:
        target: a causal language model of transformers; never modified.
        draft: a drafter from `load_draft`, or a module it takes. ``"mtp"`` drafts with the head for multi-token
            prediction in the target's own files (docs/drafters.md). None decodes one token per step.
        ids: ``[batch, length]`` int64 or int32 prompts, on the target's device.
        return_dict_in_generate: return a `GenerateOutput` with statistics.
        arguments: see `OneShotArguments` and `dflash.call.GenerateArguments`.

    Returns:
        ``[batch, length + longest answer]`` int64: the prompt as given, then the new tokens, right-padded with the pad
        id; or a `GenerateOutput`.

    Raises:
        ValueError: an argument is out of range, target and drafter do not fit, the target is not supported, a row would
            pass the target's ``max_position_embeddings``, or the target's logits are NaN.
        TypeError: an argument is unknown or has the wrong type.
    """
    output = generate_call(_resolve(target, draft, ids, arguments))
    return output if return_dict_in_generate else output.sequences


def stream(
    target: nn.Module, draft: Draft, ids: Tensor, *, skip_special_tokens: bool = False,
    **arguments: Unpack[OneShotArguments],
) -> Iterator[StreamEvent]:  # fmt: skip
    """Do what `generate` does, as an iterator over one event per step.

    Every argument is checked at once; the prompt is run when the first event is asked for. Closing the iterator before
    its end, or an interrupt, frees what `generate` would keep for the next call.

    Args:
        target: see `generate`.
        draft: see `generate`.
        ids: see `generate`.
        skip_special_tokens: as in ``tokenizer.decode``.
        arguments: see `generate`, except ``streamer``. With ``tokenizer`` the events carry text.

    Yields:
        `StreamEvent`; the ids of a row, joined, are what `generate` returns for it.

    Raises:
        ValueError: as `generate`.
        TypeError: as `generate`.
        RuntimeError: the kept generator has started another call.
    """
    check_stream_arguments(arguments)
    one_shot = _resolve(target, draft, ids, arguments)
    with _lock():
        generator = _generator_for(one_shot)
    return _released_unless_finished(generator, generator.stream_call(one_shot.call, skip_special_tokens))


def release() -> None:
    """Free what one-shot calls keep for the next, and forget which targets were tried.

    Call it after a change of a live model that is not one of tensors, hooks or adapters: of its attributes, its config,
    its methods or the functions that they call.
    """
    _free()
    forget_trials()


def _free() -> None:
    """Free the kept generator."""
    global _cached
    cached, _cached = _cached, None
    if cached is not None:
        for finalizer in cached.finalizers:
            finalizer.detach()


def generate_call(one_shot: OneShot, prompt_was_put: bool = False) -> GenerateOutput:
    """Run a resolved one-shot call on the kept generator; an interrupt frees it."""
    with _lock():
        generator = _generator_for(one_shot)
        try:
            return generator.run_call(one_shot.call, prompt_was_put)
        except BaseException as error:
            if not isinstance(error, Exception):  # KeyboardInterrupt
                _release_if(generator)
            raise


# ---------------------------------------------------------------------------------------------- the kept generator


class _CachedGenerator:
    """The generator of the last pair. It holds neither of the user's modules, and is freed with either of them."""

    def __init__(self, target: nn.Module, draft: Draft, options: OneShotOptions, generator: Generator) -> None:
        self.generator, self.options, self.is_mtp = generator, options, draft == MTP
        modules = [module for module in (target, draft) if isinstance(module, nn.Module)]
        self.fingerprints = [Fingerprint(module) for module in modules]
        self.finalizers = [weakref.finalize(module, _free) for module in modules]

    def serves(self, target: nn.Module, draft: Draft, options: OneShotOptions, call: Call) -> bool:
        """Return True if the generator was made for this pair and has room for the call."""
        modules = [module for module in (target, draft) if isinstance(module, nn.Module)]
        return (
            self.is_mtp == (draft == MTP)
            and self.generator.batch_size == len(call.prompts)
            and self.generator.max_length >= call.longest + call.max_new_tokens
            and self.options == options
            and tree_rows(self.generator.tree) >= tree_rows(call.tree)
            and len(self.fingerprints) == len(modules)
            and all(map(Fingerprint.matches, self.fingerprints, modules))
        )


_cached: _CachedGenerator | None = None
_one_at_a_time = CallLock(torch.device("cpu"))
_our_locks: weakref.WeakSet[CallLock] = weakref.WeakSet()  # of every generator that one-shot calls have made


def _is_inside_a_call() -> bool:
    """Return True if a one-shot call on this thread has called back: from a streamer, a processor or a hook."""
    return not _our_locks.isdisjoint(held.locks)


def _lock() -> AbstractContextManager[object]:
    """Return what makes one-shot calls run one after another.

    A call from inside a call has its turn already. Waiting for another thread, which may wait for the generator that
    runs here, would never end.
    """
    return contextlib.nullcontext() if _is_inside_a_call() else _one_at_a_time.lock


class OneShot(NamedTuple):
    """A resolved one-shot call: the target without wrappers, the drafter, the call and the generator's options.

    ``is_checked``: the target has passed `check_target`; that of the kept generator need not, unless it has changed.
    """

    target: nn.Module
    draft: Draft
    call: Call
    options: OneShotOptions
    is_checked: bool


def _resolve(target: nn.Module, draft: Draft, ids: Tensor, arguments: OneShotArguments) -> OneShot:
    """Split the arguments of a one-shot call, and check those of the call."""
    given = cast(dict[str, object], arguments)
    options = cast(
        OneShotOptions, {name: given.pop(name, OPTIONS[name].off) for name in OneShotOptions.__annotations__}
    )
    cached, target = _cached, unwrap(target)
    is_new = cached is None or not cached.fingerprints[0].is_of(target)
    if is_new:
        check_target(target)
    return OneShot(target, draft, Call.resolve(TargetDefaults.of(target), ids, arguments), options, is_new)


def _generator_for(one_shot: OneShot) -> Generator:
    """Return the kept generator if it serves this call, else a new one in its place.

    A call from inside a one-shot call gets a generator of its own, which is not kept.
    """
    global _cached
    target, draft, call, options, is_checked = one_shot
    if draft is not None and draft != MTP and not isinstance(draft, nn.Module):
        came = type(draft).__name__
        what = f"draft must be a module, {MTP!r} or None, got {came}"
        raise TypeError(f"{what}: load it once, draft = dflash.load_draft(...)")
    # 1. Take the kept generator if it serves the call.
    cached, is_inside = _cached, _is_inside_a_call()  # another thread may release it meanwhile
    if cached is not None and not is_inside and cached.serves(target, draft, options, call):
        check_drafts(call, target, cached.generator.draft, cached.generator.engine.widths)
        cached.generator.engine.check_pictures(call)
        return cached.generator
    # 2. Check what a new one needs before the old one is freed.
    if not is_checked:
        check_target(target)
    needed, positions = call.longest + call.max_new_tokens, max_positions(target)
    if positions is not None and needed > positions:
        raise ValueError(
            f"a prompt of {call.longest} tokens and {call.max_new_tokens} new tokens pass the target's "
            f"max_position_embeddings, {positions}"
        )
    capacity = min(-(-needed // _CAPACITY_STEP) * _CAPACITY_STEP, positions or sys.maxsize)
    sizes = {"max_length": capacity, "batch_size": len(call.prompts), "reuse_prefix": False, "tree": call.tree}
    pair = check_pair(target, draft, {**sizes, **options})
    check_drafts(call, target, pair.draft, pair.options["block_size"])
    # 3. Make it.
    if not is_inside:
        _free()
    if pair.draft is not None and pair.draft is draft:  # the caller's modules are not held
        pair = pair._replace(draft=cast(Drafter, structural_copy(draft)))
    generator = Generator.of_pair(pair)
    _our_locks.add(generator.lock)
    if not is_inside:
        _cached = _CachedGenerator(target, draft, options, generator)
    generator.engine.check_pictures(call)
    return generator


def _released_unless_finished(generator: Generator, events: Iterator[StreamEvent]) -> Iterator[StreamEvent]:
    try:
        yield from events
    except BaseException:  # closed before its end, too
        _release_if(generator)
        raise


def _release_if(generator: Generator) -> None:
    """Free the kept generator if it is this one."""
    cached = _cached
    if cached is not None and cached.generator is generator:
        _free()
