"""``dflash train``, ``dflash regenerate`` and ``dflash export``."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

import typer

from dflash.light import options, running, terminal

from ..config import RegenerateConfig, TrainConfig, is_first_process, numbers

if TYPE_CHECKING:
    from ..train.regenerate import Summary, Writer


@dataclass(frozen=True)
class _TrainOptions:
    """Inputs and outputs of a run, how rows are encoded, and where the run happens."""

    PANELS: ClassVar = {"model": "Files", "raw": "Rows", "cache_features": "Run"}

    model: options.Model
    data: Annotated[str, "Training rows: JSONL of chats, texts or tokens, or a data set's name."]
    output: Annotated[Path, "Folder for the draft, its checkpoints and metrics.jsonl."]
    heldout: Annotated[str | None, "Held-out rows; default: some of the data's prompts."] = None
    init: Annotated[str | None, "Start from this drafter: a folder or a hub id."] = None
    resume: Annotated[bool, "Continue from the last checkpoint in the folder."] = False

    type: Annotated[str | None, "dflash, dflash2 or dspark; default: that of --init, or dflash."] = None

    raw: Annotated[bool, "Prompts have no chat template."] = False
    bos: Annotated[bool, "Raw prompts start with the tokenizer's BOS token."] = False
    no_thinking: options.NoThinking = False
    max_length: Annotated[int, "Tokens per row at most; the target's positions, if fewer."] = 3072
    skip_long: Annotated[bool, "Leave out rows whose prompt is longer."] = False

    cache_features: Annotated[Path | None, "Keep the target's features in this folder, and read them there."] = None
    threads: Annotated[int | None, "CPU threads per process."] = None
    tracker: Annotated[str | None, "tensorboard or trackio."] = None
    dtype: Annotated[str, "The target's dtype: float32, bfloat16, float16 or auto."] = "auto"
    device: options.Device = None
    trust_remote_code: options.TrustRemoteCode = False
    dry_run: Annotated[bool, "Time a few steps, and print what the run would do."] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print the last metrics, or the plan, as JSON.")] = False
    debug: Annotated[bool, "Show the traceback of an error."] = False

    def __post_init__(self) -> None:
        if self.debug:
            running.set_debug(True)


@dataclass(frozen=True)
class _Shape:
    """Shape of a new drafter."""

    PANELS: ClassVar = {"layers": "Shape of a new drafter"}

    layers: Annotated[int | None, "Draft layers; default: 5."] = None
    block_size: Annotated[int | None, "Tokens per block, the anchor included; default: 16."] = None
    taps: Annotated[str | None, "Tapped target layers, as in 1,9,17; default: evenly spaced."] = None
    mask_token_id: Annotated[int | None, "Default: the tokenizer's, or an unused row."] = None
    intermediate_size: Annotated[int | None, "Width of the MLP; default: the target's."] = None
    sliding_window: Annotated[int | None, "Window of all draft layers but the last; default: none."] = None
    draft_vocab_size: Annotated[int | None, "Tokens that can be drafted, the most frequent; default: all."] = None
    markov_rank: Annotated[int | None, "Columns of a Markov head; default: none, or 256 for dspark."] = None


@dataclass(frozen=True)
class _Sizes:
    """Sizes of what DFlash 2 adds to a drafter."""

    PANELS: ClassVar = {"conv_kernel_size": "DFlash 2"}

    conv_kernel_size: Annotated[int | None, "Rows that a DFlash 2 convolution reads; default: 2."] = None
    conv_group_size: Annotated[int | None, "Channels that share its dynamic kernel; default: 16."] = None
    selector_rank: Annotated[int | None, "Columns of a DFlash 2 selector's codebooks; default: 256."] = None
    selector_top_k: Annotated[int | None, "Candidates that it scores; default: 16."] = None


def _given(group: _Shape | _Sizes) -> dict[str, Any]:
    return {name: value for name, value in vars(group).items() if value is not None}


@options.command(config=("eval_temperatures",))
def train(
    *,
    run: _TrainOptions,
    shape: _Shape,
    sizes: _Sizes,
    config: TrainConfig,
    eval_temperatures: Annotated[str, "Temperatures of the held-out answers, as in 0,1."] = "0",
) -> None:
    """Train a drafter for the target MODEL on rows of DATA, and write it to OUTPUT in the published layout.

    On several devices or machines: accelerate launch -m dflash_tools.train with the same options.

    Example: dflash train --model Qwen/Qwen3-4B --data answers.jsonl --output ./draft
    """
    # 1. Check the options before loading a model
    config = replace(config, eval_temperatures=numbers("--eval-temperatures", eval_temperatures, float))
    given, parts = _given(shape), _given(sizes)
    if parts and run.type != "dflash2":
        raise ValueError(f"{options.option_of(next(iter(parts)))} is for DFlash 2 drafters: add --type dflash2")
    device = _check(run)
    if run.type == "dspark" and run.init is None:
        given = {"markov_rank": 256, "predicts_from_anchor": True} | given
    from ..train.command import run_training

    run_training(run, given, parts, config, device)


def _check(run: _TrainOptions) -> str:
    if run.type not in (None, "dflash", "dflash2", "dspark"):
        raise ValueError(f"--type must be dflash, dflash2 or dspark, got {run.type!r}")
    if run.dry_run and run.resume:
        raise ValueError("--dry-run plans a run from its start: leave out --resume")
    if is_first_process():
        if run.output.exists() and not run.output.is_dir():
            raise ValueError(f"--output {str(run.output)!r} is a file")
        if not run.resume and run.output.is_dir() and any(run.output.iterdir()):
            what = f"--output {str(run.output)!r} is not empty"
            raise ValueError(f"{what}: name another folder, or --resume the run in it")
        options.check_writable(run.output)
    if missing := [name for name in ("accelerate", "datasets") if importlib.util.find_spec(name) is None]:
        raise ValueError(f"training needs {', '.join(missing)}: pip install '.[train]'")
    if run.threads is not None and run.threads < 1:
        raise ValueError(f"--threads must be at least 1, got {run.threads}")
    import torch

    from dflash.internals import sources

    device = sources.check_device(run.dtype, run.device)
    if device.split(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda, got {device!r}")
    if run.threads is not None:
        torch.set_num_threads(run.threads)
    return device


@dataclass(frozen=True)
class _Asking:
    """Models and files of a run, and options for reading and answering the prompts."""

    model: Annotated[str, "The target: a folder or a hub id; with --server, its name there."]
    out: Annotated[Path, "JSONL of responses; an interrupted run continues."]
    draft: Annotated[str | None, "A drafter for the target; faster in small batches."] = None
    server: Annotated[str | None, "Ask an OpenAI-compatible server: http://HOST:PORT/v1."] = None
    self_prompts: Annotated[
        int | None,
        typer.Option(min=1, help="Instead of PROMPTS, let the target write so many, and keep the useful ones."),
    ] = None
    beginnings: Annotated[Path | None, "With --self-prompts: a line each, with which they begin in turn."] = None
    raw: options.Raw = False
    bos: options.Bos = False
    no_thinking: options.NoThinking = False
    skip_long: Annotated[bool, "Leave out prompts that are too long."] = False
    limit: options.Limit = None
    split: Annotated[str, "Split of a data set of the hub."] = "train"
    batch_size: Annotated[int, "Sequences per batch."] = 64
    concurrency: Annotated[int, "Requests to the server at a time."] = 32
    token_ids: Annotated[bool, "Ask the server for token ids too (vLLM)."] = False
    weights: options.Weights = None
    dtype: options.Dtype = "auto"
    device: options.Device = None
    trust_remote_code: options.TrustRemoteCode = False
    as_json: options.Json = False

    def writer(self) -> Writer:
        """Return what answers the prompts: a server, or the target loaded here."""
        from dflash.internals import check_encoding, sources

        from ..train.regenerate import LocalWriter, ServerWriter, user_turn

        template = {"enable_thinking": False} if self.no_thinking else {}
        common: Any = {"raw": self.raw, "template": template, "skip_long": self.skip_long}
        if self.server is not None:
            local = "self_prompts", "draft", "bos", "weights", "trust_remote_code"
            if given := [name for name in local if getattr(self, name)]:
                why = "it hides its chat template" if self.self_prompts else "the server decides"
                raise ValueError(f"{options.option_of(given[0])} does not go with --server: {why}")
            common |= {"concurrency": self.concurrency, "token_ids": self.token_ids}
            return ServerWriter(self.server, self.model, api_key=os.environ.get("OPENAI_API_KEY"), **common)
        names = "model", "draft", "dtype", "device", "trust_remote_code", "weights"
        loading = options.ModelOptions(**{name: getattr(self, name) for name in names})
        loading.check_storage()
        source = loading.source(quiet=self.as_json)
        tokenizer = sources.load_tokenizer(source)
        own = self.self_prompts is not None
        check_encoding(tokenizer, self.raw, self.bos and own, {"--self-prompts": own})
        if own:
            user_turn(tokenizer, template)
        target, drafter, _ = loading.load(source)
        common |= {"name": self.model, "batch_size": self.batch_size, "bos": self.bos, "weights": self.weights}
        return LocalWriter(target, tokenizer, drafter, **common)


@options.command(config=("temperatures",))
def regenerate(
    prompts: Annotated[
        str | None, typer.Argument(help="JSONL with prompt, messages, conversations, question or turns; or a hub name.")
    ] = None,
    *,
    asking: _Asking,
    temperature: Annotated[list[float] | None, "0 is greedy; may be repeated; default: 0."] = None,
    config: RegenerateConfig,
) -> None:
    """Let the target answer PROMPTS, or prompts of its own, as training data for its drafter.

    An interrupted run continues if it is started again with the same arguments. The server's API key is read from
    OPENAI_API_KEY.

    Example: dflash regenerate prompts.jsonl --model Qwen/Qwen3-4B --out answers.jsonl
    """
    # 1. Check the output, and read the prompts
    count = asking.self_prompts
    if (prompts is None) == (count is None):
        raise ValueError("give PROMPTS, or --self-prompts N to let the target write them: one of the two")
    if asking.beginnings is not None and count is None:
        raise ValueError("--beginnings are those of prompts that the target writes: add --self-prompts N")
    beginnings = [""] if asking.beginnings is None else asking.beginnings.read_text(encoding="utf-8").splitlines()
    if not beginnings:
        raise ValueError(f"{asking.beginnings} is empty: it must have a line per beginning, or an empty line for none")
    from ..measure.progress import bars
    from ..train.data import load_prompts
    from ..train.regenerate import LocalWriter, check_out, write_prompts
    from ..train.regenerate import regenerate as write_responses

    check_out(asking.out)
    config = replace(config, temperatures=tuple(temperature or [0.0]))
    rows = [] if prompts is None else load_prompts(prompts, split=asking.split)
    writer, counts = asking.writer(), None
    with bars([*["self prompts"] * (count is not None), "responses"]) as show:

        def shown(so_far: Summary, total: int, bar: str = "responses") -> None:
            rate = f"{so_far.tokens_per_second:.0f} tokens/s"
            if so_far.acceptance_length:
                rate += f", acceptance length {so_far.acceptance_length:.2f}"
            show(bar, so_far.written, total, rate)

        # 2. Let the target write its own
        if count is not None:
            out, progress = asking.out.with_suffix(".prompts.jsonl"), functools.partial(shown, bar="self prompts")
            begun = {"beginnings": beginnings, "seed": config.seed}
            rows, counts = write_prompts(cast(LocalWriter, writer), count, out, progress=progress, **begun)
        # 3. Answer them
        summary = write_responses(rows[: asking.limit], writer, asking.out, config, progress=shown)
    summary.self_prompts = counts
    # 4. Report
    if asking.as_json:
        typer.echo(json.dumps({**asdict(summary), "tokens_per_second": summary.tokens_per_second}))
    else:
        typer.echo(_summary_text(summary), err=True)


def _summary_text(summary: Summary) -> str:
    from ..train.regenerate import tell

    text = f"self prompts: {tell(summary.self_prompts)}\n" if summary.self_prompts else ""
    text += f"{summary.written} responses in {summary.seconds:.1f} s, {summary.tokens_per_second:.0f} tokens/s"
    text += f", {summary.truncated} cut off" if summary.truncated else ""
    text += f", {summary.skipped} left out, too long" if summary.skipped else ""
    text += f", acceptance length {summary.acceptance_length:.2f}" if summary.acceptance_length else ""
    return text + (f"; {summary.found} were there before" if summary.found else "") + f": {summary.out}"


@options.command()
def export(
    draft: options.Draft,
    out: Annotated[Path, "Folder to write, missing or empty; with --format gguf a FILE.gguf that does not exist."],
    layout: Annotated[str, typer.Option("--format", help="published, speculators, transformers or gguf (llama.cpp).")],
    target: Annotated[str | None, "The target: its name for speculators; for gguf its tokenizer, or GGUF file."] = None,
    dtype: Annotated[str, "float32, bfloat16, float16 or auto (as it is); with --format gguf also q8_0."] = "auto",
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.Json = False,
) -> None:
    """Convert a drafter to the layout given by --format, from the published or the speculators one, or from GGUF.

    Example: dflash export --draft ./draft --format gguf --out draft.gguf --target Qwen/Qwen3-4B
    """
    import torch

    from dflash.internals import sources

    from ..train.export import export as export_draft

    if dtype != "q8_0":
        sources.check_dtype(dtype)
    kind: Any = dtype if dtype == "q8_0" else None if dtype == "auto" else getattr(torch, dtype)
    with warnings.catch_warnings(record=True) as caught:  # printed without their place in the code, before an error too
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        try:
            export_draft(draft, out, layout, target=target, dtype=kind, trust_remote_code=trust_remote_code)
        finally:
            for warning in caught:
                typer.echo(f"dflash: {terminal.printable(warning.message)}", err=True)
    if as_json:
        typer.echo(json.dumps({"out": str(out), "format": layout}))
    else:
        typer.echo(f"{draft} was written to {out} in the {layout} layout", err=True)
