"""The pair inside the package, or another in a folder with ``target/``, ``draft/`` and ``prompts.jsonl``."""

import argparse
import importlib
import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import dflash

try:
    from dflash.loading import draft_folder
except ModuleNotFoundError:  # with --against: a release in which these were one package
    draft_folder = importlib.import_module("dflash.evaluate").draft_folder

PAIR = Path(dflash.__file__).parent / "pair"


class Loaded(NamedTuple):
    """A pair and its prompts, each ``[1, length]`` ids; ``first`` is a first-generation drafter, or the only one."""

    target: nn.Module
    draft: dflash.Drafter
    first: dflash.Drafter
    prompts: list[Tensor]


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--pair``."""
    text = "folder with target/, draft/ and prompts.jsonl; default: the package's"
    parser.add_argument("--pair", type=Path, default=PAIR, help=text)


def add_answer_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--pair``, how its drafter is made worse, and what it answers."""
    add_option(parser)
    add = parser.add_argument
    add("--noise", type=float, default=0.0, metavar="X", help="of the drafter's weights, in standard deviations")
    add("--temperature", type=float, default=0.0)
    add("--new", type=int, default=120, help="new tokens at most")
    add("--stop", type=int, default=0, metavar="ID", help="the token that ends an answer")
    add("--prompts", type=int, help="the first ones; default: all")
    add("--rounds", type=int, default=1, help="how often each prompt is answered")


def add_sizes(parser: argparse.ArgumentParser, option: str, default: list[int | str], help: str) -> None:
    """Add an option that takes several numbers of rows, or "auto"."""
    kind = {"type": lambda text: text if text == "auto" else int(text), "nargs": "+", "metavar": "N"}
    parser.add_argument(option, **kind, default=default, help=help)


def perturb(draft: nn.Module, amount: float) -> None:
    """Make a drafter worse: add noise of ``amount`` standard deviations of each parameter, always the same."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(amount * parameter.std().nan_to_num(0) * noise)


def load(folder: Path, dtype: str, count: int | None = None) -> Loaded:
    """Load a pair and its first ``count`` prompts, a BOS token in front if the tokenizer has one."""
    kind = getattr(torch, dtype)
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=kind).eval()
    folders = draft_folder(folder), draft_folder(folder, 1)
    drafts = {path: dflash.load_draft(path, dtype=kind) for path in folders}
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    lines = (folder / "prompts.jsonl").read_text().splitlines()[:count]
    texts = [json.loads(line)["prompt"] for line in lines]
    prompts = [torch.tensor([bos + tokenizer.encode(text, add_special_tokens=False)]) for text in texts]
    return Loaded(target, *map(drafts.get, folders), prompts)
