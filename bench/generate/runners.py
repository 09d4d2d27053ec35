"""The ways to generate that are compared; what each is: ``python bench/bench_generate.py --help``."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from package_pair import Loaded
from peers import checkpoint, native_drafter, reference_loop
from torch import Tensor, nn

import dflash
from dflash.evaluate import draft_folder

BASE, ONE_TOKEN = "transformers", "one-token"


class Answer(NamedTuple):
    """A sequence ``[1, prompt + new]``, and the tokens that its steps emitted."""

    ids: Tensor
    tokens: int
    steps: int


Runner = Callable[[Tensor], Answer]


def runners(arguments: argparse.Namespace, pair: Loaded) -> dict[str, Runner]:
    """Return every runner that can run here, by name; says on standard error what is left out and why."""
    found = {}
    for name, make in _makers(arguments, pair).items():
        try:
            found[name] = make()
        except (ValueError, RuntimeError) as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    return found


def our_runners(arguments: argparse.Namespace, pair: Loaded) -> dict[str, Callable[[], Runner]]:
    """Return what makes this package's own runners, by name."""
    makers = {
        ONE_TOKEN: lambda: ours(arguments, pair, drafts=False),
        "dflash": lambda: ours(arguments, pair),
    }
    if pair.first is not pair.draft:
        makers["dflash-first"] = lambda: ours(arguments, pair._replace(draft=pair.first))
    if arguments.compile:
        makers["dflash compiled"] = lambda: ours(arguments, pair, compile=True)
    return makers


def _makers(arguments: argparse.Namespace, pair: Loaded) -> dict[str, Callable[[], Runner]]:
    def theirs(**options) -> Runner:
        return hf_generate(pair.target, arguments.temperature, arguments.new, **options)

    def assisted(drafter: nn.Module) -> Runner:
        return theirs(assistant_model=drafter, speculation_type="dflash", prompt_is_step=False)

    dtype = getattr(torch, arguments.dtype)
    best, first = (checkpoint(draft_folder(arguments.pair, generation), dtype) for generation in (None, 1))
    return {
        BASE: theirs,
        "prompt lookup": lambda: theirs(prompt_lookup_num_tokens=arguments.lookup),
        "transformers dflash": lambda: assisted(native_drafter(*first)),
        "as_assistant": lambda: assisted(dflash.as_assistant(pair.first)),
        "reference": lambda: _reference(reference_loop(*best, pair.target, arguments.temperature, arguments.new)),
        **our_runners(arguments, pair),
    }


def hf_generate(target: nn.Module, temperature: float, new: int, prompt_is_step: bool = True, **options) -> Runner:
    """Return a runner of transformers' ``generate`` with ``options``.

    Args:
        target: the model. It always gets a cache, whatever its generation_config says.
        temperature: 0 for greedy.
        new: new tokens at most.
        prompt_is_step: whether the prompt's forward pass counts as a step.
        options: of ``generate``.
    """
    options["use_cache"] = True
    sample = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}

    def run(ids: Tensor) -> Answer:
        torch.manual_seed(1)
        with _forwards(target) as count:
            out = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **sample, **options)
        first = 0 if prompt_is_step else 1
        return Answer(out, out.shape[1] - ids.shape[1] - first, count[0] - first)

    return run


@contextmanager
def _forwards(target: nn.Module) -> Iterator[list[int]]:
    """Count the forward passes of ``target`` in a list of one."""
    count = [0]
    handle = target.register_forward_hook(lambda *_: count.__setitem__(0, count[0] + 1))
    try:
        yield count
    finally:
        handle.remove()


def _reference(loop: Callable[[Tensor], tuple[Tensor, list[int]]]) -> Runner:
    def run(ids: Tensor) -> Answer:
        out, lengths = loop(ids)
        return Answer(out, sum(lengths), len(lengths))

    return run


def ours(arguments: argparse.Namespace, pair: Loaded, drafts: bool = True, **options) -> Runner:
    """Return a runner of a `dflash.Generator` with ``options``."""
    length = max(ids.shape[1] for ids in pair.prompts) + arguments.new
    draft = pair.draft if drafts else None
    generator = dflash.Generator(pair.target, draft, max_length=length, reuse_prefix=False, **options)

    def run(ids: Tensor) -> Answer:
        out = generator.generate(
            ids,
            max_new_tokens=arguments.new,
            temperature=arguments.temperature,
            seed=1,
            draft_sharpness=arguments.draft_sharpness,
            return_dict_in_generate=True,
        )
        lengths = out.statistics.acceptance_lengths[0]
        first = 0 if drafts else 1  # without drafts the prompt's forward pass is a step like the others
        return Answer(out.sequences, sum(lengths) + first, len(lengths) + first)

    return run
