"""What every script of this folder does: export the pair, answer its prompts here and in an engine, and compare.

Of a pair with two drafters, that of the first generation is exported: every engine takes it.

The engine's part runs in a process of its own, with `--python` in an environment of its own. That process imports
nothing of this package: it reads a job from a file and writes its answers to another.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

_BENCH = Path(__file__).resolve().parents[1]
_MISSING = 3  # the exit code of an engine's process that cannot import the engine


@dataclass
class Job:
    """What an engine is asked: greedy answers to ``prompts``.

    Attributes:
        target: the target's folder.
        draft: the drafter's folder, in the engine's layout.
        prompts: token ids, BOS included.
        stop: ids that end an answer; the last id of it then.
        new: new tokens at most.
        block_size: tokens of a step at most, the bonus token counted.
        dtype: ``"float32"`` or ``"bfloat16"``.
        options: the script's own.
    """

    target: str
    draft: str
    prompts: list[list[int]]
    stop: list[int]
    new: int
    block_size: int
    dtype: str
    options: dict


@dataclass
class Answer:
    """New tokens, and how many each step emitted. The first token comes from the prompt and belongs to no step."""

    ids: list[int]
    steps: list[int]

    def cut(self, stop: list[int], new: int) -> "Answer":
        """Return what is left up to the first stop token or ``new`` tokens: some engines emit a whole last block."""
        ends = [place + 1 for place, token in enumerate(self.ids) if token in stop]
        ids = self.ids[: min([new, *ends])]
        steps, left = [], len(ids) - 1
        for count in self.steps:
            if left > 0:
                steps.append(min(count, left))
            left -= count
        return Answer(ids, steps)


@dataclass
class Result:
    """An engine's answers, its name and version, and what a reader of the table must know."""

    engine: str
    answers: list[Answer] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Engine:
    """An engine.

    Attributes:
        name: what the table calls it.
        module: what the engine's environment must have.
        install: the line that installs it.
        layout: the layout of the drafter's folder that it reads.
        answer: answers a job; runs in the engine's environment. An ``ImportError`` means that the engine is missing.
        add_options: adds the script's own options.
    """

    name: str
    module: str
    install: str
    layout: str
    answer: Callable[[Job], Result]
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None


def run(engine: Engine, description: str) -> None:
    """Run the script of an engine: the engine's part if the command line says so, else the comparison."""
    if sys.argv[1:2] == ["--answer"]:
        _answer(engine, *map(Path, sys.argv[2:4]))
        return
    sys.path.append(str(_BENCH))
    arguments = _parse(engine, description)
    with tempfile.TemporaryDirectory() as folder:
        _compare(engine, arguments, Path(folder))


def _answer(engine: Engine, job: Path, out: Path) -> None:
    """Run the engine's part."""
    try:
        result = engine.answer(Job(**json.loads(job.read_text())))
    except ImportError as error:
        print(error, file=sys.stderr)
        raise SystemExit(_MISSING) from None
    out.write_text(json.dumps(asdict(result)))


def _parse(engine: Engine, description: str) -> argparse.Namespace:
    import package_pair

    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    package_pair.add_option(parser)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new", type=int, default=128, help="new tokens at most")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--python", default=sys.executable, help="the Python of the engine's environment")
    parser.add_argument("--verbose", action="store_true", help="show what the engine prints")
    parser.set_defaults(layout=engine.layout)
    engine.add_options(parser)
    return parser.parse_args()


def _compare(engine: Engine, arguments: argparse.Namespace, folder: Path) -> None:
    import package_pair

    # 1. Answer here, if there is something to compare with
    missing = f"{engine.name} is not installed for {arguments.python}:\n    {engine.install}"
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({engine.module!r}) is None)"
    if subprocess.run([arguments.python, "-c", probe]).returncode:
        print(missing)
        return
    pair = package_pair.load(arguments.pair, arguments.dtype, arguments.prompts)
    try:
        job, ours = _prepare(arguments, pair, folder)
    except ValueError as error:  # the layout cannot express the pair
        print(f"{engine.name} cannot run this pair: {error}")
        return
    # 2. Answer there
    (folder / "job.json").write_text(json.dumps(asdict(job)))
    command = [
        arguments.python,
        str(Path(sys.argv[0]).resolve()),
        "--answer",
        str(folder / "job.json"),
        str(folder / "answers.json"),
    ]
    done = subprocess.run(command, capture_output=not arguments.verbose, text=True)
    if done.returncode == _MISSING:
        print(missing, done.stderr or "", sep="\n")
        return
    if done.returncode:
        tail = "" if arguments.verbose else f": {done.stderr.strip()[-2000:]}"
        print(f"{engine.name} ended with {done.returncode}{tail}")
        return
    # 3. Compare
    found = json.loads((folder / "answers.json").read_text())
    theirs = [Answer(**answer).cut(job.stop, job.new) for answer in found["answers"]]
    print(f"this package and {found['engine']}, {arguments.dtype}, {arguments.layout} layout, greedy, {job.new} tokens")
    print("\n".join([*table(ours, theirs), *found["notes"]]))


def _prepare(arguments: argparse.Namespace, pair, folder: Path) -> tuple[Job, list[Answer]]:
    """Return the job for the engine, its drafter exported, and this package's answers."""
    import dflash
    from dflash.loading import draft_folder
    from dflash_tools.train.export import export

    draft = folder / ("draft.gguf" if arguments.layout == "gguf" else "draft")
    target = arguments.pair / "target"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # how to start vLLM
        export(draft_folder(arguments.pair, 1), draft, arguments.layout, target=str(target), dtype=pair.first.dtype)
    eos = pair.target.generation_config.eos_token_id
    stop = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    length = max(ids.shape[1] for ids in pair.prompts) + arguments.new
    generator = dflash.Generator(pair.target, pair.first, max_length=length)
    ours = []
    for ids in pair.prompts:
        out = generator.generate(ids, max_new_tokens=arguments.new, temperature=0, return_dict_in_generate=True)
        steps = out.statistics.acceptance_lengths[0]
        new = out.sequences[0, ids.shape[1] :].tolist()
        ours.append(Answer(new, steps).cut(stop, arguments.new))
    own = {name: value for name, value in vars(arguments).items() if name not in {"pair", "python"}}
    prompts = [ids[0].tolist() for ids in pair.prompts]
    sizes = {"new": arguments.new, "block_size": pair.first.config.block_size, "dtype": arguments.dtype}
    return Job(str(target), str(draft), prompts, stop, options=own, **sizes), ours


def table(ours: list[Answer], theirs: list[Answer]) -> Iterator[str]:
    """Yield a line per difference, then the sums."""
    pairs = list(zip(ours, theirs, strict=True))
    for number, (a, b) in enumerate(pairs):
        for what, mine, other in (("token", a.ids, b.ids), ("step", a.steps, b.steps)):
            if mine != other:
                both = zip(mine, other, strict=False)
                place = next((i for i, (x, y) in enumerate(both) if x != y), min(len(mine), len(other)))
                values = f"{mine[place : place + 1]} here, {other[place : place + 1]} there"
                yield f"prompt {number}: {what} {place} differs: {values}"
    texts, counts = sum(a.ids == b.ids for a, b in pairs), sum(a.steps == b.steps for a, b in pairs)
    same = sum(x == y for a, b in pairs for x, y in zip(a.steps, b.steps, strict=False))
    yield f"equal text:  {texts} of {len(pairs)} prompts"
    yield f"equal steps: {counts} of {len(pairs)} prompts, {same} of {sum(len(a.steps) for a in ours)} steps"
    yield f"tokens per step: {_mean(ours):.3f} here, {_mean(theirs):.3f} there"


def _mean(answers: list[Answer]) -> float:
    return sum(sum(answer.steps) for answer in answers) / max(sum(len(answer.steps) for answer in answers), 1)
