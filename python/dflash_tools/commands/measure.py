"""``dflash demo`` and ``dflash benchmark``: speed and acceptance."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash.light import checked, options

from ..config import BenchmarkConfig, Decoding


@options.command()
def demo(
    prompt: Annotated[str | None, "Answer this instead of held-out prompts."] = None,
    prompts: Annotated[int | None, "Answer exactly this many held-out prompts."] = None,
    seconds: Annotated[float | None, "Start no more prompts after this time; default: 12, without --prompts."] = None,
    max_new_tokens: options.MaxNewTokens = 256,
    temperature: Annotated[float, "0 is greedy."] = 0.0,
    seed: Annotated[int, "The same seed writes the same text."] = 0,
    tree: options.TreeRows = None,
    model: options.PairModel = None,
    draft: Annotated[str | None, "Its DFlash drafter: a folder, a GGUF file or a hub id."] = None,
    dtype: Annotated[
        str | None, "Of --model; default: float32, where transformers writes the same, and of a GGUF file its own."
    ] = None,
    pair: Annotated[Path | None, typer.Option(hidden=True, help="Folder with target, draft, prompts.jsonl.")] = None,
    as_json: options.Json = False,
) -> None:
    """Answer held-out prompts with the packaged pair, and measure the speed. Nothing is downloaded.

    With --model and --draft, that pair answers a few questions instead.

    Streams a few answers, with accepted drafts and bonus tokens in different colors. Then compares transformers'
    generate, one-token decoding and DFlash. The exit code is 1 if any answer differs between them in a token;
    transformers' count in float32 at temperature 0.

    With --tree, draft trees are compared too, and one step's tree is drawn.

    Example: dflash demo --prompts 4
    """
    # 1. Check the options.
    options.check_sampling(max_new_tokens, temperature=temperature, seed=seed)
    options.check_pair(model, draft, "without both, the pair inside the package answers")
    if model is None and dtype not in (None, "float32"):
        raise ValueError(f"--dtype {dtype} is for another pair, the package's runs in float32: add --model and --draft")
    decoding = Decoding(max_new_tokens, temperature, seed, tree=checked("tree", options.as_number(tree)))
    if prompt is not None and prompts is not None:
        raise ValueError("--prompts counts held-out prompts: it does not go with --prompt")
    if prompts is not None and prompts < 1:
        raise ValueError(f"--prompts must be at least 1, got {prompts}")
    if prompts is not None and seconds is not None:
        raise ValueError("--prompts answers exactly that many prompts: it does not go with --seconds")
    if seconds is not None and not seconds > 0:
        raise ValueError(f"--seconds must be above 0, got {seconds}")
    from rich.console import Console

    from dflash import demo_pair
    from dflash.internals import PAIR, check_text, sources, targets

    from ..measure import demo as demos
    from ..measure import report as reports
    from ..measure.compare import GeneratorRunner
    from ..measure.trees import TreeWatch

    if prompt is not None:
        check_text(prompt, "--prompt")
    if 0 < temperature < demos.LEAST_TEMPERATURE:
        raise ValueError(f"temperature must be 0 or at least {demos.LEAST_TEMPERATURE} here, got {temperature}")
    # 2. Choose the prompts.
    budget = demos.TimeLimit(None if prompts is not None else demos.SECONDS if seconds is None else seconds)
    folder = PAIR if pair is None else pair
    known = demos.demo_prompts(folder) if model is None else list(map(demos.Prompt, demos.QUESTIONS))
    if prompt is not None and not prompt.endswith(demos.ARROW) and all(one.text.endswith(demos.ARROW) for one in known):
        prompt += demos.ARROW
    asked = known[:prompts] if prompt is None else [demos.Prompt(prompt)]
    # 3. Load the pair.
    if model is None:
        target, drafter, tokenizer = demo_pair(folder)
    else:
        models = options.ModelOptions(model, draft, dtype or "float32", tree=tree).resolve()
        source = models.source(quiet=as_json)
        if dtype is None and source.gguf is not None:  # as dflash generate and serve load it
            models = dataclasses.replace(models, dtype="auto")
        tokenizer = sources.load_tokenizer(source)
        target, drafter, _ = models.load(source)
    # 4. Answer the prompts, and show the first few answers as they are written.
    console, trees = Console(), TreeWatch()

    def show(prompt: demos.Prompt, runner: GeneratorRunner, ids: Sequence[int]) -> None:
        events = runner.stream(ids)
        events = events if tree is None else trees.watch(runner.generator, events)
        reports.print_answer(console, tokenizer, prompt.text, events)

    if not as_json:
        reports.print_legend(console)
    how: dict[str, Any] = {"budget": budget, "show": None if as_json else show}
    how["encode"] = demos.encode if model is None else demos.encode_message
    report = demos.measure(target, drafter, tokenizer, asked, decoding, **how)
    report["available"] = len(known) if prompt is None else 1
    # 5. Report.
    if as_json:
        typer.echo(json.dumps(report))
    else:
        if trees.best is not None:
            reports.print_tree(console, tokenizer, trees.best)
        kind = str(target.dtype).removeprefix("torch.")
        sizes = [targets.count_weights(part)[0] / 1e6 for part in (target, drafter)]
        about = f"target of {sizes[0]:.1f} M parameters, drafter of {sizes[1]:.1f} M, {kind}"
        reports.print_demo(console, report, about)
    if not report["identical"]:
        raise typer.Exit(1)


@options.command(config=("draft_sharpness", "tree", "thinking", "generator"))
def benchmark(
    dataset: Annotated[list[str], "humaneval, gsm8k, mt-bench, spec-bench or FILE.jsonl; may be repeated."],
    config: BenchmarkConfig,
    models: options.ModelOptions,
    target: options.Positional = None,
    data: Annotated[Path | None, "Folder of the datasets' files; default: from the hub."] = None,
    limit: Annotated[int | None, "Prompts of each dataset at most."] = None,
    draft_sharpness: options.Sharpness = 1.0,
    no_thinking: options.NoThinking = False,
    out: Annotated[Path | None, "Folder for results: summary.json, and the records of every prompt."] = None,
    plot: Annotated[Path | None, "Draw a .png."] = None,
    as_json: options.Json = False,
) -> None:
    """Measure speed and acceptance on datasets of prompts, compared with one-token decoding in the same run.

    With --tree, draft trees are measured next to chains. If the tokenizer has a chat template, a dataset's text becomes
    a user's message, with no instruction added. Speeds include the forward passes over the prompts.

    Example: dflash benchmark Qwen/Qwen3-4B --draft z-lab/Qwen3-4B-DFlash-b16 --dataset gsm8k --limit 20
    """
    # 1. Check the options and load the prompts: this is quick, loading the models is not.
    models = models.named(target)
    models = dataclasses.replace(models.resolve(), may_lack_draft=False)  # there is nothing to compare without
    if models.draft is None and models.prompt_lookup is None:
        raise ValueError(
            "a benchmark compares drafts with one-token decoding: name a drafter with --draft (auto: a known one), or "
            "pass --prompt-lookup 3"
        )
    config = dataclasses.replace(
        config,
        draft_sharpness=draft_sharpness,  # with --tree, that of the chains next to them
        tree=models.tree,
        thinking=False if no_thinking else None,
        generator=models.generator(models.draft),
    )
    numbers = ("max_new_tokens", "temperature", "seed", "draft_sharpness")
    options.check_sampling(**{name: getattr(config, name) for name in numbers})
    if limit is not None and limit < 1:
        raise ValueError(f"--limit must be at least 1, got {limit}")
    from rich.console import Console

    from dflash.internals import sources

    from ..measure import report as reports
    from ..measure.benchmark import run_benchmark
    from ..measure.datasets import DATASETS, Conversation, load_conversations

    if plot is not None:
        reports.check_plot(plot)
    if out is not None and out.exists() and not out.is_dir():
        raise ValueError(f"--out must be a folder, {str(out)!r} is a file")
    datasets: dict[str, list[Conversation]] = {}
    for given in dataset:
        name = given if given in DATASETS else Path(given).name.split(".")[0]
        if name in datasets:
            raise ValueError(f"--dataset {given!r}: two datasets have the name {name}")
        datasets[name] = load_conversations(given, data, limit)
    source = models.source(quiet=as_json)
    tokenizer = sources.load_tokenizer(source)
    config.check(tokenizer)
    # 2. Load the models and run.
    model, drafter, _ = models.load(source)
    about = {"model": models.model, "draft": models.draft, "command": shlex.join(["dflash", *sys.argv[1:]])}
    report = run_benchmark(model, drafter, tokenizer, datasets, config, about=about, out=out)
    # 3. Report.
    if as_json:
        typer.echo(json.dumps(report))
    else:
        reports.print_benchmark(report, Console())
    if plot is not None:
        reports.plot(report, plot)
