"""A generator for one target and drafter, built once and called often."""

from __future__ import annotations

import collections.abc
import contextlib
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal, NoReturn, ParamSpec, SupportsIndex, TypeVar, overload

import torch
from torch import Tensor, nn

from .call import Call, GenerateArguments, TargetDefaults, check_drafts, check_room, check_stream_arguments
from .drafter import quantized_draft, windowed_draft
from .engine import Direct, Engine, Replay, step
from .engine.graphs import compiled_per_kind, compiled_per_shape
from .engine.prefill import cached_prefix
from .engine.run import Answer, Run, event_of, output_of
from .fit import CheckedPair, check_pair
from .options import GeneratorArguments
from .outputs import GenerateOutput, StreamEvent
from .settings import tree_rows
from .state import State
from .streaming import BatchDecoder
from .targets import Fingerprint, KnownWeights, Target, check_target, first_hook
from .threads import fit_threads

if TYPE_CHECKING:
    from typing_extensions import Unpack

_Result = TypeVar("_Result")
_Parameters = ParamSpec("_Parameters")


class _Held(threading.local):
    """The locks of the calls that this thread is in the middle of, the outermost first."""

    locks: tuple[CallLock, ...] = ()


class CallLock:
    """Lets calls that share caches run one after another, whatever thread they come from, and never inside each other.

    Args:
        device: that the calls compute on.

    Attributes:
        lock: a re-entrant lock, for what a call may do before and after it runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.lock, self._device = threading.RLock(), device
        _all_locks.add(self)

    def run(
        self, work: Callable[_Parameters, _Result], *arguments: _Parameters.args, **keywords: _Parameters.kwargs
    ) -> _Result:
        """Return what ``work`` returns, run alone and without the caller's inference mode and autocast.

        Raises:
            RuntimeError: called from inside a call.
        """
        self.refuse_inside()
        before = held.locks
        # An interrupt must not leave the lock taken: no Python code stands between taking and releasing it.
        with self.lock:
            try:
                held.locks = (*before, self)
                with plain_settings(self._device):
                    return work(*arguments, **keywords)
            finally:
                held.locks = before

    def refuse_inside(self) -> None:
        """Raise RuntimeError inside a call on this thread."""
        if self in held.locks:
            raise RuntimeError(
                "this generator is in the middle of a call, which has called back (a streamer, a processor, a "
                "criterion or a hook): make a second Generator for calls from there"
            )


@contextlib.contextmanager
def plain_settings(device: torch.device) -> Iterator[None]:
    """Compute on ``device`` without the caller's inference mode and autocast."""
    current = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with current, torch.inference_mode(False), torch.autocast(device.type, enabled=False):
        yield


held = _Held()
_all_locks: weakref.WeakSet[CallLock] = weakref.WeakSet()


def _free_locks() -> None:
    """In a forked child, free the locks of other threads: those are gone."""
    for lock in _all_locks:
        if lock not in held.locks:
            lock.lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_free_locks)


class Generator:
    """Generates for one target and drafter, keeping caches and state between calls.

    The target is taken as it is now: hooks, adapters and a generation_config that change later are not seen, and
    tensors that are replaced later are an error. Calls from several threads run one after another. A call that starts
    while a stream of the same generator is not at its end takes over; the stream then raises ``RuntimeError``. A call
    from inside a call of the same generator (by a streamer's ``put``, a processor, a criterion or a hook) is refused.

    ``fused`` and ``reuse_prefix`` round sums in another order than the model's own modules and a new prompt do: in fp32
    the text stays the same, in bf16 a near-tie may fall the other way.

    A generator cannot be pickled or copied. A child process made by ``fork`` may use it, as far as torch works there.

    Args:
        target: the Hugging Face causal language model; it is never modified (see `dflash.targets`). It runs
            a trial once, when the first generator is made (docs/targets.md): what differs is refused by name.
        draft: a `Drafter`, any module that `load_draft` takes, or ``"mtp"`` for the head in the target's own files.
            None decodes one token per step through the same code, or what ``prompt_lookup`` finds; with ``block_size``
            in the same padded shapes, which bf16 output equals bit for bit.
        options: see `GeneratorArguments`; ``max_length`` must be given.

    Attributes:
        engine: what runs the steps.
        fused_reason: why the target's layers run as its own modules; empty if they run on this package's ops.
        step: runs one step on the device, see `dflash.engine.step`, between calls; ``state.report`` tells of it.
        lock: lets one call at a time use it.

    Raises:
        ValueError: target and drafter do not fit, the target is not supported, or a number is out of range.
    """

    def __init__(
        self, target: nn.Module, draft: nn.Module | Literal["mtp"] | None = None, **options: Unpack[GeneratorArguments]
    ) -> None:
        self._make(check_pair(check_target(target), draft, options))

    @classmethod
    def of_pair(cls, pair: CheckedPair) -> Generator:
        """Return the generator of a checked pair."""
        generator = cls.__new__(cls)
        generator._make(pair)
        return generator

    @torch.inference_mode(False)  # what is made here is also written outside of inference mode
    def _make(self, pair: CheckedPair) -> None:
        target, loaded, self.block_size, options = pair
        self.max_length, self.batch_size = options["max_length"], options["batch_size"]
        self.denoise_steps, self.prefill_chunk = options["denoise_steps"], options["prefill_chunk"]
        self.graph, self.fused, self.reuse_prefix = options["graph"], options["fused"], options["reuse_prefix"]
        self.weights, self.tree = options["weights"], options["tree"]
        # 1. The pair: the target's copy, the drafter, and the engine with its state.
        first = next(target.parameters())
        if first.device.type == "cuda":
            from .ops.check import self_check  # with a call of every op as an example: no CPU needs it

            self_check(first.device, first.dtype)
        else:
            fit_threads()
        taps = loaded.config.target_layer_ids if loaded is not None else ()
        prepared, self._defaults = Target(target, taps, self.fused, self.weights), TargetDefaults.of(target)
        if self.tree is not None and prepared.tree_obstacle:
            raise ValueError(
                f"tree={self.tree!r} needs a target that gives a row of a tree the logits of its path, this one takes "
                f"chains only: pass tree=None ({type(prepared.model).__name__} {prepared.tree_obstacle})"
            )
        if options["compile"] and prepared.compile_obstacle:
            raise ValueError(f"compile=True cannot be followed: {prepared.compile_obstacle}. Leave it out")
        self._weights, self.fused_reason, self._hook = Fingerprint(target), prepared.fused_reason, first_hook(target)
        self.draft = quantized_draft(options["draft_weights"], windowed_draft(options["drafter_window"], loaded))
        self._modules = [module for module in (prepared.model, self.draft) if module is not None]
        self.engine = Engine(
            prepared, self.draft, batch_size=self.batch_size, max_length=self.max_length, block_size=self.block_size,
            tree_rows=tree_rows(self.tree), widths=options["block_size"],
            prompt_lookup=options["prompt_lookup"] or 0,
        )  # fmt: skip
        if options["on_answer"] is not None:
            self.engine.record_answers(options["on_answer"])
        # 2. What launches the steps. The step after the last may still be running when the generator is freed; the
        # memory that it writes must not be another's by then.
        report, engine = self.state.report.tensor, self.engine
        on_gpu = report.device.type == "cuda"
        self.runner: Direct | Replay = Replay(report) if on_gpu else Direct(report, lambda: engine.is_exact)
        weakref.finalize(self, self.runner.drain).atexit = False
        self.step: Callable[[], None] = functools.partial(step, self.engine)
        self.compiles_step = options["compile"] and not on_gpu
        self.engine.leaves_out = not self.compiles_step
        if self.compiles_step:
            self.step = compiled_per_kind(self.step, self.engine.kind)
        elif options["compile"]:  # only the target's part of the step, inside the CUDA graph
            prepared.compiled_forward = compiled_per_shape(prepared.forward)
        # 3. Between calls: the run that the state belongs to, and the weights that caches and graphs were made with.
        self.lock = CallLock(self.engine.target.device)
        self._run: Run | None = None
        self._known = KnownWeights()

    @property
    def state(self) -> State:
        """The tensors that a step reads and writes."""
        return self.engine.state

    @property
    def vocab_size(self) -> int:
        """Rows of the target's embedding table."""
        return self.engine.vocab_size

    @property
    def graph_reason(self) -> str:
        """Why the last step ran kernel by kernel; empty if it was replayed as a CUDA graph, or soon will be."""
        return self.runner.reason

    def reset(self) -> None:
        """Forget what the caches hold and read all weights again. An unfinished stream is ended.

        Raises:
            RuntimeError: called from inside a call of this generator.
        """

        def forget() -> None:
            self._end_run()
            self.engine.forget_values()

        self.lock.run(forget)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "a Generator cannot be pickled or copied: it holds caches, a lock and what launches its steps. "
            "Make one from the target and the drafter where it is needed"
        )

    # ------------------------------------------------------------------------------------------ calls

    @overload
    def generate(
        self, ids: Tensor, *, return_dict_in_generate: Literal[False] = False, **arguments: Unpack[GenerateArguments]
    ) -> Tensor: ...

    @overload
    def generate(
        self, ids: Tensor, *, return_dict_in_generate: Literal[True], **arguments: Unpack[GenerateArguments]
    ) -> GenerateOutput: ...

    @overload
    def generate(
        self, ids: Tensor, *, return_dict_in_generate: bool, **arguments: Unpack[GenerateArguments]
    ) -> Tensor | GenerateOutput: ...

    def generate(
        self, ids: Tensor, *, return_dict_in_generate: bool = False, **arguments: Unpack[GenerateArguments]
    ) -> Tensor | GenerateOutput:
        """Do what `dflash.generate` does, with this generator's caches.

        Args:
            ids: ``[batch, length]`` int64 or int32 prompts, on the target's device.
            return_dict_in_generate: return a `GenerateOutput` with statistics.
            arguments: see `dflash.call.GenerateArguments`.

        Returns:
            ``[batch, length + longest answer]`` int64, or a `GenerateOutput`.

        Raises:
            ValueError: also when the batch is larger than ``batch_size`` or a row would pass ``max_length``.
            TypeError: an argument is unknown or has the wrong type.
            RuntimeError: called from inside a call of this generator.
        """
        output = self.run_call(self.resolve_call(ids, arguments))
        return output if return_dict_in_generate else output.sequences

    def stream(
        self, ids: Tensor, *, skip_special_tokens: bool = False, **arguments: Unpack[GenerateArguments]
    ) -> Iterator[StreamEvent]:
        """Do what `dflash.stream` does, with this generator's caches.

        Closing the iterator, or an interrupt, leaves the generator ready for the next call.

        Args:
            ids: ``[batch, length]`` int64 or int32 prompts, on the target's device.
            skip_special_tokens: as in ``tokenizer.decode``.
            arguments: see `dflash.call.GenerateArguments`, except ``streamer``.

        Yields:
            One `StreamEvent` per step; the first is the prompt's.

        Raises:
            ValueError: also when the batch is larger than ``batch_size`` or a row would pass ``max_length``.
            TypeError: an argument is unknown or has the wrong type.
            RuntimeError: another call has started since, or this one starts from inside a call of this generator.
        """
        check_stream_arguments(arguments)
        return self.stream_call(self.resolve_call(ids, arguments), skip_special_tokens)

    def resolve_call(self, ids: Tensor, arguments: GenerateArguments) -> Call:
        """Check a call against the target and this generator's sizes."""
        call = Call.resolve(self._defaults, ids, arguments, denoise_steps=self.denoise_steps, tree=self.tree)
        check_drafts(call, self.engine.target.model, self.draft, self.engine.widths)
        check_room(call, self.batch_size, self.max_length, self.tree)
        self.engine.check_pictures(call)
        if self._weights.replaced():
            raise ValueError("the target's tensors were replaced since this generator was made: make a new one")
        if self.graph is True and (reason := self.engine.graph_obstacle(call, self._hook)):
            raise ValueError(f"graph=True cannot be followed: {reason}")
        return call

    # ------------------------------------------------------------------------------------------ running a call

    def run_call(self, call: Call, prompt_was_put: bool = False) -> GenerateOutput:
        """Run a resolved call to its end; ``prompt_was_put`` if its streamer has had the prompt already."""
        self.lock.refuse_inside()
        try:
            return self.lock.run(self._run_to_end, call, prompt_was_put)
        finally:
            if call.streamer is not None:
                call.streamer.end()

    def _run_to_end(self, call: Call, prompt_was_put: bool) -> GenerateOutput:
        streamer, began, answers = call.streamer, time.perf_counter(), []
        if streamer is not None and not prompt_was_put:
            streamer.put(call.ids.cpu())
        for answers in self._answers(call, reads_ids=streamer is not None):
            if streamer is not None and answers[0].new_ids:
                streamer.put(torch.tensor(answers[0].new_ids, dtype=torch.int64, device="cpu"))
        return output_of(self.engine, answers, call, began)

    def stream_call(self, call: Call, skip_special_tokens: bool = False) -> Iterator[StreamEvent]:
        """Yield the events of a resolved call, which runs as they are asked for."""
        began, text = time.perf_counter(), None
        if call.tokenizer is not None:
            text = BatchDecoder(len(call.prompts), call.tokenizer, call.stop_strings, skip_special_tokens)
        steps = self._answers(call, reads_ids=True)
        try:
            while (answers := self.lock.run(next, steps, None)) is not None:
                yield event_of(self.engine, answers, text, began)
        finally:
            steps.close()

    def _answers(self, call: Call, *, reads_ids: bool) -> collections.abc.Generator[list[Answer], None, None]:
        """Run the prompts, then steps until every answer has ended; yield after each."""
        began, batch, last = time.perf_counter(), len(call.prompts), self._run
        # 1. The caches may be reused if the same weights filled them. Ids do not tell pictures apart, and a prompt that
        # is cached has no logits.
        reuse = self.reuse_prefix and call.pictures is None and not call.prompt_logprobs
        reuse = reuse and last is not None and last.consistent and not last.has_pictures
        reuse = reuse and self._known.filled(self._modules)
        if self.engine.target.ranks.count > 1:
            self.engine.check_ranks_agree(call, self.prefill_chunk)
            reuse = self.engine.target.ranks.all(reuse)
        run = self.begin_run(call, reads_ids=reads_ids)
        # 2. Set up the engine, with the prompts in its first rows.
        self.engine.configure(call)
        cached = cached_prefix(self.engine, call.prompts) if reuse else [0] * batch
        self.engine.state.vacate_(slice(batch, self.batch_size))
        answers = run.admit(call, cached, chunk=self.prefill_chunk, snapshot=self.reuse_prefix, began=began)
        # 3. Run.
        while run.prompts:
            run.run_chunk()
        while True:
            if run.failed:
                raise ValueError(next(answer.error for answer in answers if answer.error))
            yield answers
            if not run.running:
                return
            run.step()

    def begin_run(self, call: Call | None = None, *, reads_ids: bool) -> Run:
        """End the run that the state belongs to and return a new one, of a call or of many without Python rules."""
        self._end_run()
        if self.reuse_prefix:
            self._known.fill(self._modules)
        self.runner.start()
        self.engine.refresh()
        self.runner.settle()
        obstacle = "graph=False was asked for" if self.graph is False else ""
        if self.runner.ahead:
            obstacle = obstacle or self.engine.graph_obstacle(call, self._hook)
            if self._known.have_moved(self._modules):
                self.runner.clear()  # captured graphs hold the addresses of the weights
        self._run = Run(
            self.engine, self.runner, self.step, reads_ids=reads_ids, obstacle=obstacle,
            must_capture=self.graph is True,
        )  # fmt: skip
        return self._run

    def _end_run(self) -> None:
        if self._run is not None:
            self._run.ended, self._run = True, None
