"""Every bench runs, and what it prints and writes is complete."""

import importlib.util
import json
import math
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


@pytest.mark.usefixtures("reference_package")
def test_steps_on_cpu_are_timed_beside_the_reference_package(bench):
    lines = bench("bench_step_cpu.py", "--hidden", 64, "--repeats", 1, "--new", 2, "--without", "compiled")
    rows = [line.split() for line in lines[2:]]
    assert [row[2] for row in rows] == ["float32", "bfloat16"]
    assert [row[10:12] for row in rows] == [["-", "-"]] * 2
    for row in rows:
        size, floor, ours, share, reference, token = (float(row[column]) for column in (3, 4, 5, 6, 8, 12))
        assert size > 0
        assert floor > 0
        # The time of a step is the difference of two runs, which next to other work may be below zero.
        assert all(math.isfinite(value) for value in (ours, share, reference, token))


@pytest.mark.parametrize("weights", [[], ["--weights", "int8"]])
def test_steps_of_more_rows_are_timed_next_to_one_row(bench, tmp_path, weights):
    target, out = save_pair(tmp_path) / "target", tmp_path / "rows.json"
    sizes = ["--rows", 1, 3, "--new", 3, "--prompt", 8, "--repeats", 1, "--json", out]
    lines = bench("bench_rows.py", "--model", target, *sizes, *weights)
    assert [line.split()[0] for line in lines[2:]] == ["1", "3"]
    report = json.loads(out.read_text())
    assert report["weights"] == (weights[1] if weights else None)
    assert report["weight_mb"] > 0
    assert [row["rows"] for row in report["rows"]] == [1, 3]
    assert all(math.isfinite(row[name]) for row in report["rows"] for name in ("ms", "of_one", "share"))
    assert all(row["head"] + row["choice"] > 0 for row in report["rows"])


@pytest.mark.parametrize("options", [["--rows", 1], ["--rows", 2], ["--tree", "--draft", "random"]])
def test_drafting_is_timed_next_to_one_token_per_step(bench, tmp_path, options):
    pair = save_pair(tmp_path)
    models = ["--model", pair / "target", "--draft", pair / "draft"]
    _, _, *lines = bench("bench_auto.py", *models, "--limit", 2, "--new", 6, *options)
    found = {line[:24].strip(): line[24:].split() for line in lines}
    drafts = ("trees of 16", "tree auto") if "--tree" in options else ("whole blocks", "auto")
    ways = [f"{drafter}, {way}" for drafter in ("drafter", "useless") for way in drafts]
    assert list(found) == ["one token", *ways]
    assert {row[3] for row in found.values()} == {"2"}, "every answer is that of one token per step"
    assert found["one token"][:3] == ["1.00", "1.00", "1.0"]


@pytest.mark.parametrize("weights", [[], ["--weights", "int8"]])
def test_the_parts_of_a_step_and_the_rest_make_up_the_step(bench, tmp_path, weights):
    sizes = ["--rows", 1, 3, "--new", 3, "--prompt", 8, "--repeats", 1]
    lines = bench("bench_step_parts.py", "--model", save_pair(tmp_path) / "target", *sizes, *weights)
    assert lines[1].split() == ["rows", "1", "3"]
    rows = [[float(ms) for ms in line[24:].split()] for line in lines[2:]]
    assert len(rows) == 16
    for column, step in enumerate(rows[10]):
        called, within = rows[:10] + rows[11:12], rows[12:]  # each with what is left
        for parts in (called, within):
            assert sum(part[column] for part in parts) == pytest.approx(step, abs=0.06)


def test_cached_prompts_are_measured(bench, tmp_path):
    sizes = ["--shared", 40, "--users", 2, "--conversations", 3, "--turns", 2, "--chunk", 8, "--repeats", 1]
    _, users, *turns = bench("bench_prefix.py", "--model", save_pair(tmp_path) / "target", *sizes)
    assert users.endswith("80 of 120 tokens run")
    assert turns == [
        "turn 1 of 3 conversations, 20 tokens: 0% cached",
        "turn 2 of 3 conversations, 110 tokens: 24% cached",
    ]


def test_trees_are_measured_next_to_the_chain(bench, tmp_path):
    pair = save_pair(tmp_path)  # of the first generation, whatever the package's is: no other grows trees
    (pair / "prompts.jsonl").write_text('{"prompt": "w5 w6"}\n')
    arguments = ["--pair", pair, "--prompts", 1, "--new", 12, "--rows", 4, "auto", "--noise", 0.4, "--chain-steps", 99]
    lines = bench("bench_trees.py", *arguments)
    rows = {line[:10].strip(): line[10:].split() for line in lines[2:]}
    assert list(rows) == ["chain", "tree 4", "tree auto"]
    assert {row[-2] for row in rows.values()} == {"1/1"}
    assert [float(rows[name][-1]) for name in ("chain", "tree 4")] == [16, 4]
    assert all(float(row[1]) >= 1 for row in rows.values())


def test_widths_are_measured_next_to_auto(bench):
    arguments = ["--prompts", 1, "--new", 12, "--widths", 4, 16, "auto"]
    rows = {line[:10].strip(): line[10:].split() for line in bench("bench_width.py", *arguments)[2:]}
    assert list(rows) == ["width 4", "width 16", "width auto"]
    fixed = [rows["width 4"], rows["width 16"]]
    promised = [float(row.pop()) for row in fixed]  # of the widest, what it did
    assert promised[0] <= promised[1] == float(rows["width 16"][1])
    assert {row[-2] for row in rows.values()} == {"1/1"}
    assert [float(row[-1]) for row in fixed] == [4, 16]


def test_grammars_are_measured_with_and_without_masked_drafts(bench):
    lines = bench("bench_grammar.py", "--prompts", 1, "--rounds", 0, 4)
    rows = {" ".join(line.split()[:-2]): [float(value) for value in line.split()[-2:]] for line in lines}
    assert rows.pop("rounds") == [0, 4]
    assert len(rows) == 7
    assert all(1 <= plain <= 16 and 1 <= masked <= 16 for plain, masked in rows.values())
    assert rows["record: other keys"][0] < rows["record: other keys"][1]


def test_verification_is_timed_next_to_generation(bench):
    lines = bench("bench_verify.py", "--prompts", 2, "--new", 12)
    assert lines[0].endswith("2 prompts, 2 verified exactly")
    rows = {line[:20].strip(): float(line[20:].split()[0]) for line in lines[1:]}
    assert list(rows) == ["tokens", "drafted", "one token per step", "verify", "passes"]
    assert rows["tokens"] == 12
    assert rows["verify"] > rows["passes"] > 0


@pytest.mark.parametrize(("arguments", "column", "rows", "values"), [
    (["bench_first_token.py", "--prompts", 5, 40, "--dtypes", "float32"], 3, ["5", "40"], 4),
    (["bench_draft_window.py", "--contexts", 40, 80, "--windows", 0, 16], 0, ["none", "16"], 1),
])  # fmt: skip
def test_prompts_and_windows_are_timed(bench, arguments, column, rows, values):
    lines = bench(*arguments, "--hidden", 64, "--repeats", 1)[2:]
    assert [line.split()[column] for line in lines] == rows
    assert all(float(value) > 0 for line in lines for value in line.removesuffix("x").split()[values:])


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
