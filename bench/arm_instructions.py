"""How many instructions a weight takes in the products for Arm, next to llama.cpp's for the same format.

    python bench/arm_instructions.py --llama-cpp FOLDER

FOLDER has llama.cpp's source. Both are compiled by the cross compiler of tests/arm and run under its emulator, which
logs every instruction of the inner functions: ours multiplies rows with a tile of 16 features, llama.cpp's repacked
ones do with as many. Counting says nothing about stalls, memory or clocks: nothing is timed, here or anywhere on Arm.

    instructions  per weight, for all rows together
    share         of llama.cpp's

Prints; asserts nothing. Takes a minute.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests" / "arm"))
import build

COLUMNS, FEATURES, ROWS = 1024, 16, (1, 8, 16)
# By set: the compiler's flags for both, and by format the layout that llama.cpp chooses there.
SETS = {
    "dotprod": ("-march=armv8.2-a+fp16+dotprod", {"q4_0": "4x4", "q8_0": "4x4", "q4_k": "8x4", "q6_k": "8x4"}),
    "i8mm": ("-march=armv8.2-a+fp16+dotprod+i8mm", {"q4_0": "4x8", "q8_0": "4x8", "q4_k": "8x8", "q6_k": "8x8"}),
}
PROGRAM = """
#include <cstdlib>
#include "cpu/linear/linear_blocks.h"
using namespace dflash::DFLASH_ISA;
extern "C" {
%(declared)s
}
static char memory[4][1 << 20] __attribute__((aligned(64)));
template <dflash::Format F>
static void ours(int rows) {
  BlockRows block{rows, %(columns)d};
  block.place(reinterpret_cast<uint32_t*>(memory[0]));
  multiply_tile<F>(block, 0, %(columns)d, reinterpret_cast<uint8_t*>(memory[1]), reinterpret_cast<float*>(memory[2]));
}
template <typename Fn>
static void theirs(int rows, Fn* one, Fn* some) {
  (rows == 1 ? one : some)(%(columns)d, reinterpret_cast<float*>(memory[2]), %(features)d, memory[1], memory[0], rows,
                           %(features)d);
}
int main(int, char** given) {
  const int rows = std::atoi(given[2]);
  switch (std::atoi(given[1])) { %(cases)s }
}
"""


def program(folder: Path, isa: str, source: Path) -> Path:
    """Compile the loops of one set and what calls them: case 2 i is our format i, case 2 i + 1 llama.cpp's."""
    flags, layouts = SETS[isa]
    declared, cases = [], []
    for i, (name, layout) in enumerate(layouts.items()):
        kind, rows = name.replace("_k", "_K"), "q8_K" if name.endswith("_k") else "q8_0"
        one, some = (f"ggml_{product}_{kind}_{layout}_{rows}" for product in ("gemv", "gemm"))
        declared += [f"void {each}(int, float*, size_t, const void*, const void*, int, int);" for each in (one, some)]
        cases.append(f"case {2 * i}: ours<dflash::Format::k{kind.upper()}>(rows); break;")
        cases.append(f"case {2 * i + 1}: theirs(rows, {one}, {some}); break;")
    text = PROGRAM % {
        "declared": "\n".join(declared), "cases": "\n".join(cases), "columns": COLUMNS, "features": FEATURES
    }  # fmt: skip
    (folder / f"{isa}.cpp").write_text(text)
    ggml, both = source / "ggml", [build.COMPILER, "-std=c++17", flags]
    includes = [f"-I{ggml / path}" for path in ("include", "src", "src/ggml-cpu")]
    theirs, ours = folder / f"{isa}-llama.o", folder / f"{isa}.o"
    subprocess.run([*both, "-O3", *includes, "-c", ggml / "src/ggml-cpu/arch/arm/repack.cpp", "-o", theirs], check=True)
    own = [*build.KERNEL_FLAGS, "-O3", f"-I{build.ROOT / 'csrc'}", f"-DDFLASH_ISA={isa}", "-DDFLASH_BASE=neon"]
    subprocess.run([*both, *own, "-c", folder / f"{isa}.cpp", "-o", ours], check=True)
    out = folder / isa
    subprocess.run(
        [build.COMPILER, "-static", "-Wl,--unresolved-symbols=ignore-all", ours, theirs, "-o", out], check=True
    )
    return out


def count(path: Path, case: int, rows: int) -> float:
    """Return the instructions per weight."""
    listed = subprocess.run(["nm", "-S", "-C", path], capture_output=True, text=True, check=True).stdout.splitlines()
    functions = [line.split(maxsplit=3) for line in listed if "multiply_blocks<" in line or " ggml_gem" in line]
    ranges = ",".join(f"0x{start}+0x{size}" for start, size, _, _ in functions)
    log = path.with_suffix(".log")
    command = [build.EMULATOR, "-singlestep", "-d", "exec,nochain", "-dfilter", ranges, "-D", log]
    subprocess.run([*command, path, str(case), str(rows)], check=True)
    with log.open() as lines:
        return sum(line.startswith("Trace") for line in lines) / (COLUMNS * FEATURES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp", required=True, type=Path, help="folder of llama.cpp's source")
    source = parser.parse_args().llama_cpp
    print("| set | format | rows | instructions | llama.cpp | share |\n| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for isa, (_, layouts) in SETS.items():
            path = program(Path(folder), isa, source)
            for i, name in enumerate(layouts):
                for rows in ROWS:
                    ours, theirs = (count(path, 2 * i + side, rows) for side in (0, 1))
                    print(f"| {isa} | {name} | {rows} | {ours:.3f} | {theirs:.3f} | {ours / theirs:.2f} |", flush=True)


if __name__ == "__main__":
    main()
