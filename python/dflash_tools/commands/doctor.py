"""``dflash doctor``: the state of the installation, or of a pair."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shutil
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from packaging.version import Version
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dflash import DraftConfig
from dflash.internals import (
    OVERLAPPING,
    captured,
    check_config,
    check_encoding,
    check_gpu,
    find_draft,
    gguf,
    ops,
    options,
    read_draft_config,
    targets,
    terminal,
)

from ..doctor.diagnosis import Diagnosis, Pair, Prompts, diagnose, find_prompts
from ..measure.progress import bars

_MISSING = "not installed"  # as `version_of` says it


@dataclass(frozen=True)
class Check:
    """One line of the report. Its status is ``"ok"``, ``"warning"`` (works, but slower) or ``"error"``."""

    name: str
    found: str
    status: str = "ok"
    advice: str = ""


def _package(name: str, least: str) -> Check:
    version = targets.version_of(name)
    if version == _MISSING:
        return Check(name, version, "error", f"pip install '{name}>={least}'")
    if Version(version).release < Version(least).release:
        return Check(name, version, "error", f"pip install -U '{name}>={least}': older ones are not supported")
    return Check(name, version)


def _clash(name: str) -> Check:
    version = targets.version_of("dflash")
    if version == _MISSING:
        return Check(name, "dflash belongs only to dflash-engine")
    advice = "pip uninstall dflash dflash-engine, then install the one you want"
    return Check(name, f"dflash {version} is installed too and owns the same import name", "error", advice)


def _instruction_set(name: str) -> Check:
    chosen, forced = ops.isa(), os.environ.get("DFLASH_ISA")
    if forced:
        return Check(name, f"{chosen}, because DFLASH_ISA is set", "warning", "unset DFLASH_ISA")
    better = {"scalar": "avx2", "avx2": "avx512vl", "avx512": "avx512_bf16", "avx512_bf16": "amx_bf16"}.get(chosen)
    if better in processor_flags():
        advice = "install on this machine, or with -C cmake.define.DFLASH_ALL_ISAS=ON"
        return Check(name, f"{chosen}, and this processor has {better} too", "warning", advice)
    if chosen == "scalar" and platform.machine() in ("x86_64", "AMD64"):
        return Check(name, "scalar", "warning", "this processor has no AVX2: expect low speed")
    return Check(name, chosen)


def processor_flags() -> set[str]:
    """Return what Linux says that the processor has."""
    path = Path("/proc/cpuinfo")
    return set(path.read_text().split()) if path.exists() else set()


def _gpu_present() -> bool:
    """Return True if the machine has an NVIDIA GPU, even if torch does not see it."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def _gpu(name: str) -> Check:
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        return Check(name, f"{names} (torch CUDA {torch.version.cuda})")
    if not _gpu_present():
        return Check(name, "none")
    if torch.version.cuda is None:
        found, advice = "present, but this torch is a CPU build", "install a CUDA build of torch (pytorch.org)"
    else:
        found, advice = "present, but torch cannot use it", "check the driver with nvidia-smi"
    return Check(name, found, "warning", advice)


_REBUILD, _FREE = "rebuild with CMAKE_CUDA_ARCHITECTURES for this GPU", "free the GPU and try again"
_CUDA_ADVICE = {"driver": "update the driver", "out of memory": _FREE, "busy": _FREE}
_SLOW = "until then a target runs its own layers, and ops run in plain torch"


def _cuda_kernels(name: str) -> Check:
    if not ops.has_cuda_kernels():
        if not torch.cuda.is_available():
            return Check(name, "not in this build")
        return Check(name, "not in this build", "warning", f"install the CUDA toolkit (nvcc) and reinstall; {_SLOW}")
    if not torch.cuda.is_available():
        return Check(name, "in this build; there is no GPU to run on")
    if reason := ops.cuda_status(torch.cuda.current_device()):
        advice = next((advice for word, advice in _CUDA_ADVICE.items() if word in reason), _REBUILD)
        return Check(name, f"in this build, but: {reason}", "warning", f"{advice}; {_SLOW}")
    return Check(name, "in this build and running; each next to plain torch, on small tensors:")


def _kernel_checks() -> list[Check]:
    """Compare each kernel with plain torch on the current GPU."""
    if not torch.cuda.is_available() or ops.cuda_status(torch.cuda.current_device()):
        return []
    off, checks, index = ops.kernels_off(), [], torch.cuda.current_device()
    try:
        every = check_gpu(torch.device("cuda", index))
    except Exception as error:
        why = f"not compared: {terminal.first_line(error)}"
        return [Check("- kernels", why, "warning", _FREE)]
    for found in every:
        name = f"- {found.kernel}"
        if found.kernel in off:
            checks.append(Check(name, f"off: {off[found.kernel]}", "warning", "unset DFLASH_KERNELS to use it"))
        elif found.fault:
            advice = "runs turn it off (DFLASH_SELF_CHECK), which are right but slower; please report this"
            checks.append(Check(name, found.fault, "error", advice))
        elif found.kernel == OVERLAPPING:
            checks.append(Check(name, "the same bits as one by one" if ops.overlaps(index) else "none here"))
        else:
            took = f"{found.microseconds:.0f} us with its launch"
            checks.append(Check(name, f"error {found.error:.1e}, at most {found.bound:.1e}; {took}"))
    return checks


def _cuda_graphs(name: str) -> Check:
    if not torch.cuda.is_available():
        return Check(name, "no GPU to replay them on: steps run directly")
    if reason := _graph_error():
        return Check(name, f"cannot be used: {reason}", "warning", "steps run kernel by kernel, which is slower")
    return Check(name, "used: a step is one launch (if not, Generator.graph_reason says why)")


def _graph_error() -> str:
    """Capture one addition and replay it; return what went wrong."""
    try:
        x = torch.zeros(1, dtype=torch.float32, device="cuda")
        replay = captured(lambda: x.add_(1), None, torch.cuda.Stream())
        replay()
        return "" if x.item() == 1 else "a graph was replayed and did nothing"
    except Exception as error:
        return terminal.first_line(error)


def _overlap(name: str) -> Check:
    switches = {"DFLASH_OVERLAP": ops.OVERLAP, "DFLASH_PREFETCH": ops.PREFETCH}
    if off := [switch for switch, is_on in switches.items() if not is_on]:
        return Check(name, f"turned off by {' and '.join(off)}", "warning", f"unset {' and '.join(off)}")
    if not torch.cuda.is_available() or ops.cuda_status(torch.cuda.current_device()):
        return Check(name, "no kernel runs on a GPU")
    if ops.overlaps(torch.cuda.current_device()):
        return Check(name, "used: a kernel starts, and reads weights, while the one ahead of it still runs")
    major, minor = torch.cuda.get_device_capability()
    if major < 9:
        return Check(name, f"not used: it needs compute capability 9.0, this GPU has {major}.{minor}")
    advice = f"{_REBUILD}; until then a step takes longer"
    return Check(name, "not used: the kernels are compiled for older GPUs", "warning", advice)


def examine() -> list[Check]:
    """Check this installation: kernels run on the GPU, no model does. Changes nothing."""
    return [
        Check("dflash-engine", targets.version_of("dflash-engine")),
        Check("python", platform.python_version()),
        _package("torch", "2.11"),
        _package("transformers", "5.15"),
        _clash("import name"),
        _instruction_set("CPU kernels"),
        Check("CPU threads", f"{torch.get_num_threads()} of {os.cpu_count()} processors"),
        _gpu("GPU"),
        _cuda_kernels("CUDA kernels"),
        *_kernel_checks(),
        _overlap("CUDA overlap"),
        _cuda_graphs("CUDA graphs"),
    ]


_POSITIONS = (1, 2, 3, 4, 6, 8, 12)  # and the last
# docs/doctor.md has the sources.
_HEALTHY = "published drafters keep the first draft in about 80 % of the steps, and 4 to 8 tokens per step"


@options.command()
def doctor(
    context: typer.Context,
    model: Annotated[str | None, "Examine a pair: its target, a folder or a hub id."] = None,
    draft: Annotated[str | None, "Its DFlash drafter: a folder, a GGUF file or a hub id."] = None,
    prompts: Annotated[
        str | None, "JSON lines to answer, 32 at most; default: a few of the pair's or of our own."
    ] = None,
    max_new_tokens: Annotated[int, "New tokens of an answer at most."] = 128,
    no_thinking: options.NoThinking = False,
    bos: options.Bos = False,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.Json = False,
) -> None:
    """Check this installation or, with --model and --draft, say whether a pair is wired as it was trained.

    A pair answers a few prompts. Then its drafter drafts again from the same hidden states with other taps, RoPE, mask,
    causality, window, scale and block size. If one of these accepts more than the config does, the report names the
    fault, the gain and the line that repairs it.

    The exit code is 0 if nothing was found, 1 if something does not work or the pair has a fault, and 2 if the pair
    cannot be examined at all.
    """
    options.check_pair(model, draft, "a pair is examined; without both, the installation is")
    if model is None:
        source = context.get_parameter_source
        names = [str(option.name) for option in context.command.params if option.name in context.params]
        given = [name for name in names if name != "as_json" and source(name).name == "COMMANDLINE"]
        if given:
            names = f"{', '.join(map(options.option_of, given))} {'needs' if len(given) == 1 else 'need'}"
            raise ValueError(f"{names} --model and --draft: without a pair, the installation is checked")
        _examine_installation(as_json)
        return
    if max_new_tokens < 4:
        raise ValueError(f"--max-new-tokens must be at least 4, got {max_new_tokens}")
    # 1. Read the small files first, so that what does not fit is refused before weights are loaded.
    source = options.Source(model, trust_remote_code, quiet=as_json)
    rows, origin = find_prompts(prompts, str(source.name))
    tokenizer = options.load_tokenizer(source)
    check_encoding(tokenizer, False, bos)
    path = find_draft(draft)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # loading the drafter warns of unknown keys
        keys, file = read_draft_config(path), gguf.read_gguf(path) if path.is_file() else None
        config = DraftConfig.from_config(keys, str(path / "config.json" if file is None else path))
    empty = targets.check_target(source.load_empty_target(), loaded=False)
    check_config(empty, config)
    asked = Prompts(rows, tokenizer, {"enable_thinking": False} if no_thinking else {}, bos=bos, origin=origin)
    asked.check_room(empty)
    # 2. Load the weights, and run.
    target, drafter, _ = options.ModelOptions(model, str(path), dtype, device).load(source)
    with bars(["answers", "wirings"], shown=not as_json) as show:
        found = diagnose(Pair(target, drafter, keys, file), asked, max_new_tokens, show=show)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found)))
    else:
        _print_diagnosis(found, Console())
    if found.findings:
        raise typer.Exit(1)


def _examine_installation(as_json: bool) -> None:
    checks = examine()
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(check) for check in checks]))
    else:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        marks = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "error": "[red]error[/]"}
        for check in checks:
            table.add_row(marks[check.status], check.name, escape(terminal.printable(check.found)))
            if check.advice:
                table.add_row("", "", f"[bold]-> {escape(terminal.printable(check.advice))}[/]")
        Console().print(table)
    if any(check.status == "error" for check in checks):
        raise typer.Exit(1)


def _print_diagnosis(found: Diagnosis, console: Console) -> None:
    def say(text: str, style: str = "") -> None:
        console.print(terminal.printable(text), style=style, markup=False, highlight=False, soft_wrap=True)

    def show(rows: Iterable[Sequence[str]], left: int = 2) -> None:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, left))
        for row in rows:
            table.add_row(*(escape(terminal.printable(cell)) for cell in row))
        console.print(table)

    # 1. The pair as it is.
    mean, size = f"{found.acceptance_length:.2f} tokens per step as configured", found.block_size
    say(f"acceptance {mean}: {found.prompts} prompts, {found.new_tokens} new tokens, greedy, blocks of {size}")
    say(f"prompts: {found.prompts_from}", "dim")
    shares = found.acceptance_per_position
    numbers = [number for number in _POSITIONS if number < len(shares)] + [len(shares)]
    show([("draft", *map(str, numbers)), ("kept in", *(f"{shares[number - 1]:.0%}" for number in numbers))], 0)
    say(_HEALTHY, "dim")
    # 2. Its faults, or what was tried.
    for finding in found.findings:
        gain = ""
        if finding.before is not None and finding.after is not None:
            gain = f", {finding.before:.2f} -> {finding.after:.2f} tokens per step"
        say(f"{finding.fault}  {finding.found}{gain}", "red")
        say(f"  -> {finding.advice}", "bold")
    if found.trials and not found.findings:
        say(
            f"no fault found: {found.replayed:.2f} tokens per step at the {found.places} places where it drafted "
            f"again, and the best of {found.tried} other wirings:",
            "green",
        )
        show((change, f"{length:.2f}") for change, length in found.trials.items())
    if found.encodings and not found.findings:
        say(f"{mean}, and with other ways to encode prompts:")
        show((change, f"{length:.2f}") for change, length in found.encodings.items())
    for note in found.notes:
        say(note, "dim")
    say(f"{found.seconds:.0f} s", "dim")
