"""Every bench runs, and what it prints and writes is complete."""

import importlib.util
import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from tiny_pair import save_pair

import dflash
from dflash import ops

BENCH = Path(__file__).parents[1] / "bench"
STEMS = {name.rstrip("_") for name in ops.OPS}


@pytest.fixture
def bench(monkeypatch, capfd) -> Callable[..., list[str]]:
    """Return ``bench("bench_linear.py", "--quick")``, which runs a bench in this process and returns its lines."""
    monkeypatch.syspath_prepend(BENCH)
    threads, has_gradients = torch.get_num_threads(), torch.is_grad_enabled()

    def run(name: str, *arguments: object) -> list[str]:
        monkeypatch.setattr(sys, "argv", [str(BENCH / name), *map(str, arguments)])
        runpy.run_path(str(BENCH / name), run_name="__main__")
        return capfd.readouterr().out.splitlines()

    yield run
    torch.set_num_threads(threads)
    torch.set_grad_enabled(has_gradients)


def test_every_op_has_a_bench_of_its_stem():
    assert {"rms_norm", "accept_prefix", "block_attention"} <= STEMS
    on_harness = {path.stem for path in BENCH.glob("bench_*.py") if "from harness import" in path.read_text()}
    assert on_harness == {f"bench_{stem}" for stem in STEMS}


def test_all_of_them_run_and_leave_their_rows(bench, tmp_path):
    rows_file = tmp_path / "rows.json"
    lines = bench("bench_all.py", "--quick", "--threads", 1, "--json", rows_file)
    written = json.loads(rows_file.read_text())
    assert written["isa"] == ops.isa()
    assert written["threads"] == 1
    assert written["torch"] == torch.__version__
    rows = written["rows"]
    assert {row["op"] for row in rows} == STEMS
    assert len({(row["op"], row["shape"], row["dtype"]) for row in rows}) == len(rows)
    for row in rows:
        assert row["us"] > 0
        assert row["gb_s"] > 0
        assert row["peers_us"][row["peer"]] == min(row["peers_us"].values())
    assert len(lines) == 1 + len(rows)


def test_a_device_that_is_not_there_is_named(bench, monkeypatch, capfd):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        bench("bench_rms_norm.py", "--quick", "--device", "cuda")
    assert "sees no GPU" in capfd.readouterr().err


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    """Write a tiny pair of the first generation, whatever the package's is: no other grows trees."""
    folder = save_pair(tmp_path_factory.mktemp("pair"))
    (folder / "prompts.jsonl").write_text('{"prompt": "w5 w6"}\n')
    return folder


DRAFTING = "bench_auto.py --model {pair}/target --draft {pair}/draft --limit 2 --new 6"
SAME = r"( +\S+){3} +2$"  # every answer is that of one token per step
# Commands, the lines before their rows, and the rows.
TABLES = [
    ("bench_step_cpu.py --hidden 64 --repeats 1 --new 2 --without compiled", 2, [" float32 ", " bfloat16 "]),
    ("bench_rows.py --model {pair}/target --rows 1 3 --new 3 --prompt 8 --repeats 1", 2, ["^ +1 ", "^ +3 "]),
    ("bench_rows.py --model {pair}/target --rows 3 --new 3 --prompt 8 --repeats 1 --weights int8", 2, ["^ +3 "]),
    (f"{DRAFTING} --rows 2", 2, [
        "^one token +1.00 +1.00 +1.0 +2$", f"drafter, whole blocks{SAME}", f"drafter, auto{SAME}",
        f"useless, whole blocks{SAME}", f"useless, auto{SAME}",
    ]),
    (f"{DRAFTING} --tree --draft random", 2, [
        "^one token", f"trees of 16{SAME}", f"tree auto{SAME}", f"trees of 16{SAME}", f"tree auto{SAME}",
    ]),
    ("bench_prefix.py --model {pair}/target --shared 40 --users 2 --conversations 3 --turns 2 --chunk 8 --repeats 1", 1,
     [
        "80 of 120 tokens run$", "^turn 1 of 3 conversations, 20 tokens: 0% cached$", "110 tokens: 24% cached$",
    ]),
    ("bench_trees.py --pair {pair} --prompts 1 --new 12 --rows 4 auto --noise 0.4 --chain-steps 99", 2, [
        "^chain .* 1/1 +16", "^tree 4 .* 1/1 +4", "^tree auto .* 1/1 ",
    ]),
    ("bench_width.py --prompts 1 --new 12 --widths 4 16 auto", 2, [
        "^width 4 .* 1/1 +4", "^width 16 .* 1/1 +16", "^width auto .* 1/1 ",
    ]),
    ("bench_verify.py --prompts 2 --new 12", 0, [
        "2 prompts, 2 verified exactly$", "^tokens +12", "^drafted", "^one token per step", "^verify", "^passes",
    ]),
    ("bench_first_token.py --prompts 5 40 --dtypes float32 --hidden 64 --repeats 1", 2, [" 5 ", " 40 "]),
    ("bench_draft_window.py --contexts 40 80 --windows 0 16 --hidden 64 --repeats 1", 2, ["^ *none ", "^ *16 "]),
]  # fmt: skip


@pytest.mark.usefixtures("reference_package")
@pytest.mark.parametrize(("command", "head", "rows"), TABLES, ids=[command.split()[0] for command, *_ in TABLES])
def test_a_bench_prints_a_row_for_all_that_it_compares(bench, pair, command, head, rows):
    lines = bench(*command.format(pair=pair).split())[head:]
    for line, row in zip(lines, rows, strict=True):
        assert re.search(row, line), line


def test_the_parts_of_a_step_and_the_rest_make_up_the_step(bench, pair):
    sizes = ["--rows", 1, 3, "--new", 3, "--prompt", 8, "--repeats", 1, "--weights", "int8"]
    lines = bench("bench_step_parts.py", "--model", pair / "target", *sizes)
    assert lines[1].split() == ["rows", "1", "3"]
    rows = [[float(ms) for ms in line[24:].split()] for line in lines[2:]]
    assert len(rows) == 16
    for column, step in enumerate(rows[10]):
        called, within = rows[:10] + rows[11:12], rows[12:]  # each with what is left
        for parts in (called, within):
            assert sum(part[column] for part in parts) == pytest.approx(step, abs=0.06)


def test_grammars_are_measured_with_and_without_masked_drafts(bench):
    lines = bench("bench_grammar.py", "--prompts", 1, "--rounds", 0, 4)
    rows = {" ".join(line.split()[:-2]): [float(value) for value in line.split()[-2:]] for line in lines}
    assert rows.pop("rounds") == [0, 4]
    assert len(rows) == 7
    assert all(1 <= plain <= 16 and 1 <= masked <= 16 for plain, masked in rows.values())
    assert rows["record: other keys"][0] < rows["record: other keys"][1]


RELEASE = Path(dflash.__file__).parents[1]


class Here:
    """A release in this process, in place of `releases.Release`, which starts one."""

    def __init__(self, module: str, arguments: object, folder: Path | None) -> None:
        self._made = importlib.import_module(module).works(arguments)
        self.works = list(self._made)

    def ask(self, request: str, argument: str | int) -> object:
        if request == "run":
            return tuple(self._pieces[argument]())
        self._pieces = self._made[argument]()
        return len(self._pieces)

    def __enter__(self) -> "Here":
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def against_itself(bench, monkeypatch) -> Callable[..., list[list[str]]]:
    """Return a function that compares this release with itself and returns the lines, split into words."""
    monkeypatch.setattr(importlib.import_module("releases"), "Release", Here)

    def run(*command: object) -> list[list[str]]:
        return [line.replace("|", " ").split() for line in bench(*command, "--against", RELEASE)[2:]]

    return run


def test_every_op_and_a_step_are_compared_with_another_release(against_itself):
    rows = against_itself("bench_op_overhead.py", "--rounds", 1)
    assert {row[0] for row in rows} == STEMS | {"torch.add", "step", "one-token"}
    assert all(float(row[-1].removesuffix("x")) > 0 for row in rows)


@pytest.mark.parametrize(("command", "column", "rows"), [
    (["bench_step_cpu.py", "--hidden", 64, "--repeats", 1, "--new", 2], 2, ["float32 1/1", "bfloat16 1/1"]),
    (["bench_generate.py", "--prompts", 2, "--new", 8, "--rounds", 1], 0,
     ["one-token 2/2", "dflash 2/2", "dflash-first 2/2"]),
])  # fmt: skip
def test_steps_and_generations_are_compared_with_another_release(against_itself, command, column, rows):
    assert [f"{row[column]} {row[-1]}" for row in against_itself(*command)] == rows


def test_each_release_has_its_own_process_and_what_one_lacks_is_left_out_by_name(tmp_path):
    other = tmp_path / "dflash"
    shutil.copytree(Path(dflash.__file__).parent, other, ignore=shutil.ignore_patterns("__pycache__", "pair"))
    with (other / "__init__.py").open("a") as source:
        source.write("\nfrom . import ops as _ops\n_ops.rms_norm = None\n")
    command = [sys.executable, BENCH / "bench_op_overhead.py", "--only", "rms_norm", "silu_mul", "--rounds", "1"]
    done = subprocess.run([*command, "--against", tmp_path], capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in done.stdout.splitlines()[2:]] == ["torch.add", "silu_mul"]
    assert "rms_norm is left out: the other release: TypeError" in done.stderr


@pytest.fixture(scope="module")
def step():
    sys.path.insert(0, str(BENCH))
    try:
        import step.forced
        import step.meter
        import step.pair
        import step.runners
        import step.setting
        import step.static

        yield step
    finally:
        sys.path.remove(str(BENCH))


def steps_setting(step, batch: int):
    device = torch.device("cpu")
    pair = step.pair.named_pair("tiny", torch.float32, device)
    setting = step.setting.Setting(pair, step.forced.Forced(device), step.meter.Waits(), 40, batch, 6, False)
    setting.ours.fill_()
    return setting


class TestSteps:
    @pytest.mark.usefixtures("reference_package")
    def test_every_runner_leaves_its_rows(self, step, bench, tmp_path):
        rows_file = tmp_path / "rows.json"
        sizes = ["--model", "tiny", "--contexts", 40, "--batches", 1, 2, "--rounds", 1, "--steps", 1, "--tree", 32]
        bench("step", "--device", "cpu", *sizes, "--table", "--json", rows_file)
        written = json.loads(rows_file.read_text())
        left_out = {(entry["runner"], entry["batch"]) for entry in written["left_out"]}
        missing = set() if hasattr(transformers, "MuseGlimmerAssistantModel") else {("native", 1)}
        assert left_out == {("reference", 2), ("native", 2)} | missing
        rows = {(row["runner"], row["batch"], row["accepted"]) for row in written["rows"]}
        for batch in (1, 2):
            for accepted in (1, 6, 16):
                for runner in step.runners.RUNNERS | step.runners.tree_runners([32]):
                    assert ((runner, batch, accepted) in rows) != ((runner, batch) in left_out)
        assert len(rows) == len(written["rows"])
        for row in written["rows"]:
            assert row["floor_share"] == pytest.approx(row["floor_ms"] / row["step_ms"])
            ceiling = max(written["copy_gb_s"], written["read_gb_s"])
            assert row["floor_4300_ms"] == pytest.approx(row["floor_ms"] * ceiling / 4300)
        for runner in ("graph", "fused"):
            assert written["tables"][runner]["ops"]

    @pytest.mark.parametrize("batch", [1, 2])
    def test_the_static_peer_takes_the_same_step(self, step, batch):
        setting = steps_setting(step, batch)
        ours, theirs = setting.ours, step.static.StaticStep(setting.ours, setting.pair.target, False)
        setting.forced.set_(6)
        for state in (ours, theirs):
            state.place_(40, 6)
        for _ in range(3):
            for emitted in (6, 1):
                setting.forced.set_(emitted)
                ours(), theirs.launched()
                assert torch.equal(ours.state.length, theirs.length.expand(batch))
                block = theirs.report[:, 1 + step.forced.BLOCK :]
                assert torch.equal(ours.state.block, block)
                torch.testing.assert_close(ours.state.context, theirs.context)
        setting.forced.off.fill_(True)  # what the target itself chose
        ours(), theirs.step()
        assert torch.equal(ours.report[:, 2 : 2 + step.forced.BLOCK], theirs.report[:, 1 : 1 + step.forced.BLOCK])


@pytest.fixture
def engine_script(bench, monkeypatch) -> Callable[..., list[str]]:
    """Return a function that runs a script of ``bench/engines`` on one prompt and returns its lines."""
    monkeypatch.syspath_prepend(BENCH / "engines")
    return lambda name, *arguments: bench(f"engines/{name}", "--prompts", 1, "--new", 20, *arguments)


@pytest.fixture
def engine_here(monkeypatch) -> None:
    """Run an engine's part in this process. A process of its own would import torch and transformers once more."""
    run = subprocess.run

    def run_here(command: list[str], **options) -> subprocess.CompletedProcess:
        if "--answer" not in command:
            return run(command, **options)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", command[1:])
            runpy.run_path(command[1], run_name="__main__")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run_here)


@pytest.mark.usefixtures("engine_here")
def test_an_engine_gives_equal_text_and_steps(engine_script):
    lines = engine_script("on_transformers.py")
    assert lines[0].startswith(
        f"this package and transformers {transformers.__version__}, float32, transformers layout"
    )
    assert lines[1] == "equal text:  1 of 1 prompts"
    assert re.fullmatch(r"equal steps: 1 of 1 prompts, (\d+) of \1 steps", lines[2])


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_missing_engine_is_named_with_its_install_line(engine_script, name):
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    lines = engine_script(f"on_{name}.py")
    assert lines[0] == f"{name} is not installed for {sys.executable}:"
    assert lines[1].strip().startswith(f"pip install {name}")
