import gc
import importlib.util
import os
import re
import subprocess
import sys
import weakref
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

# Processes of `pytest -n` share the cores, and what a test starts inherits this. Before torch, which reads it once.
if processes := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, processors // int(processes))))

import pytest
import torch
from baseline import greedy, prompt
from families import make_draft, make_target
from filelock import FileLock
from op_checks import CUDA_DTYPES, DTYPES, Cuda, Emulated
from transformers import PreTrainedModel

import dflash
from dflash import Drafter, Generator, ops
from dflash.ops import reference
from dflash_tools.measure import demo

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("cuda_emulation", "faults")]
sys.path.append(str(ROOT))  # recipes


def _prefixes(name: str) -> tuple[str, ...]:
    """Return the prefixes of tests' ids that a file lists, one per line."""
    return tuple(line for line in (ROOT / "tests" / name).read_text().splitlines() if line and line[0] != "#")


SLOW, FULL = _prefixes("slow.txt"), _prefixes("full.txt")
_DTYPE = re.compile(r"bfloat16|float16|float32|dtype\d")  # in the name of a case


def pytest_configure(config: pytest.Config) -> None:
    import examples

    examples.use_profile("long" if config.getoption("markexpr") == "long" else "sample")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases: dict[tuple[str, ...], list[pytest.Item]] = {}  # of a slow test, by dtype
    for item in items:
        # The emulated CUDA kernels are slow, and compiling them takes most of a minute in a first run.
        emulated = "cuda-emulated" in item.nodeid or {"emulation", "emulated_kernels"} & set(item.fixturenames)
        if emulated:
            item.add_marker(pytest.mark.emulated)
        if emulated or item.nodeid.startswith(SLOW + FULL):
            item.add_marker(pytest.mark.slow)
        if emulated or item.nodeid.startswith(SLOW):
            test, _, case = item.nodeid.partition("[")
            cases.setdefault((test, *_DTYPE.findall(case)), []).append(item)
        if item.nodeid.startswith(FULL):
            item.add_marker(pytest.mark.full)
    # A plain run has the first of each dtype and a fifth of the others, as the names fall.
    for found in cases.values():
        for item in found[1:]:
            if zlib.crc32(item.nodeid.encode()) % 5:
                item.add_marker(pytest.mark.full)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("no GPU")
    if item.get_closest_marker("linux") and sys.platform != "linux":
        pytest.skip("needs Linux")


@pytest.fixture(scope="session")
def emulated_kernels() -> ModuleType:
    """Compile the CUDA kernels for the CPU, with sanitizers if DFLASH_EMULATION=sanitize."""
    import build

    if reason := build.missing():
        pytest.skip(f"no emulation of CUDA: {reason}")
    module = build.load(os.environ.get("DFLASH_EMULATION") == "sanitize")
    if path := os.environ.get("DFLASH_PTX"):
        import ptx

        ptx.use(module, Path(path))
    return module


@pytest.fixture
def emulation(emulated_kernels) -> ModuleType:
    """Return the emulation, in the order of threads and blocks given by DFLASH_EMULATION_SEED (default 0)."""
    emulated_kernels.seed(int(os.environ.get("DFLASH_EMULATION_SEED", "0")))
    return emulated_kernels


# Where the tests of an op run. A test that uses `kernels` runs in all of these places; one that uses `implementation`
# also runs on the plain-torch twin. With `dtype`, it runs with every storage type of the place.
PLACES = {"cpu": DTYPES, "cuda-emulated": CUDA_DTYPES, "cuda": CUDA_DTYPES}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for fixture, places in (("kernels", PLACES), ("implementation", {**PLACES, "twin": DTYPES})):
        if fixture not in metafunc.fixturenames:
            continue
        dtypes = "dtype" in metafunc.fixturenames
        cases = [
            pytest.param(*(place, dtype)[: 1 + dtypes], marks=[pytest.mark.cuda] * (place == "cuda"),
                         id=f"{place}-{str(dtype).removeprefix('torch.')}" if dtypes else place)
            for place, types in places.items()
            for dtype in (types if dtypes else types[:1])
        ]  # fmt: skip
        metafunc.parametrize([fixture, "dtype"][: 1 + dtypes], cases, indirect=[fixture])


def _place(request: pytest.FixtureRequest) -> object:
    if request.param == "cuda-emulated":
        return Emulated(request.getfixturevalue("emulation"))
    return {"cpu": ops, "twin": reference}.get(request.param) or Cuda()


@pytest.fixture
def kernels(request: pytest.FixtureRequest) -> object:
    """Return the functions of ``dflash.ops`` for CPU tensors, run on the CPU, an emulated GPU or a real one."""
    return _place(request)


@pytest.fixture
def implementation(request: pytest.FixtureRequest) -> object:
    """Return the same functions as ``kernels``, or their plain-torch twins."""
    return _place(request)


@pytest.fixture(scope="session")
def reference_package() -> ModuleType:
    """Import the reference package's ``model.py`` from its own folder, under its own name. Installs it if needed."""
    path = ROOT / ".peers" / "dflash" / "model.py"
    with FileLock(ROOT / ".peers" / "lock"):  # one process of `pytest -n` installs it
        if not path.exists():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(ROOT / ".peers")]
            subprocess.run([*pip, "dflash==0.1.0"], check=True)
    spec = importlib.util.spec_from_file_location("dflash_reference_package", path)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def pair_dir() -> Path:
    """Return the folder of the package's trained pair: ``target``, ``draft`` and ``prompts.jsonl``."""
    return demo.PAIR


@dataclass
class Done:
    """The result of a command."""

    code: int
    out: str
    err: str

    def assert_done(self) -> "Done":
        """Check that the command succeeded; return itself."""
        assert self.code == 0, self.err
        return self

    def assert_refused(self, *words: str) -> None:
        """Check that the command wrote nothing but one line, an error with these words."""
        assert (self.code, self.out, self.err.count("\n")) == (2, "", 1), self.err
        assert self.err.startswith("dflash: ")
        assert all(word in self.err for word in words), self.err


@pytest.fixture
def shell(monkeypatch, capsys) -> Callable[..., Done]:
    """Return ``shell("demo", "--json")``, which runs the ``dflash`` command in this process without network."""
    from dflash import cli

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def call(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["dflash", *map(str, arguments)])
        capsys.readouterr()
        try:
            cli.main()
            code = 0
        except SystemExit as exit:
            code = exit.code or 0
        return Done(code, *capsys.readouterr())

    return call


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """Return ``torch.set_num_threads``; after the test there are as many threads as before."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def another_run() -> Iterator[Callable[[], None]]:
    """Return a function that resets accelerate's state. It exists once per process, and runs must not share it."""
    from accelerate.state import AcceleratorState

    def reset() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)

    reset()
    yield reset
    reset()


@pytest.fixture
def released() -> Iterator[None]:
    """Release, after the test, what one-shot calls keep of its models."""
    yield
    dflash.release()


@pytest.fixture
def kept() -> Callable[[], Generator | None]:
    """Return a function that finds the generator which one-shot calls keep, None if they keep none."""
    dflash.release()

    def found() -> list[Generator]:
        return [each for each in gc.get_referrers(Generator) if type(each) is Generator]

    others = weakref.WeakSet(found())
    return lambda: next((each for each in found() if each not in others), None)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    """Return a tiny random Qwen3."""
    return make_target("qwen3")


@pytest.fixture(scope="module")
def draft(target) -> Drafter:
    """Return a random drafter for `target`."""
    return make_draft(target)


@pytest.fixture(scope="module")
def prompts() -> list[torch.Tensor]:
    """Return prompts of 1, 16 and 40 tokens."""
    return [prompt(length, seed=31) for length in (1, 16, 40)]


@pytest.fixture(scope="module")
def plain(request, target, prompts) -> list[torch.Tensor]:
    """Return the target's own answers to the prompts, of as many tokens as the test module's ``NEW``."""
    return [greedy(target, p, request.module.NEW) for p in prompts]
