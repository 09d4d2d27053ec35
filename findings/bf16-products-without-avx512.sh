#!/usr/bin/env bash
# torch 2.13.0 (CPU), on a processor with AVX2 and no AVX-512: a product of two bfloat16 matrices takes tens of times as
# long as turning both into float32, multiplying these and rounding the result; with the second matrix transposed it
# takes some times as long. `torch.autocast("cpu", torch.bfloat16)`, which training uses to save time, meets both.
#
# Expected: at most the time of the detour, which torch could take itself. Seen with AVX2 (AMD EPYC, one thread), 512 x
# 576 by 576 x 1536: 45 times as long, and 7 times transposed. Exits with 1 if a product takes less than 8 times the
# detour's time, with 2 on a processor that shows nothing.
set -euo pipefail
if ! grep -qw avx2 /proc/cpuinfo || grep -qw avx512bw /proc/cpuinfo; then
  echo "this needs a processor with AVX2 and without AVX-512"
  exit 2
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.13.0
cat >"$folder/find.py" <<'PYTHON'
import statistics
import sys
import time

import torch

torch.set_num_threads(1)
torch.manual_seed(0)
a, b = torch.randn(512, 576).bfloat16(), torch.randn(576, 1536).bfloat16()
transposed = b.T.contiguous()
ways = {
    "product": lambda: a @ b,
    "transposed": lambda: a @ transposed.T,
    "by float32": lambda: (a.float() @ b.float()).bfloat16(),
}
times = {name: [] for name in ways}
for _ in range(6):
    for name, way in ways.items():
        begin = time.perf_counter()
        way()
        times[name].append(time.perf_counter() - begin)
middle = {name: statistics.median(found[1:]) for name, found in times.items()}
for name, seconds in middle.items():
    print(f"{name}: {1e3 * seconds:.1f} ms, {seconds / middle['by float32']:.1f} times the detour's")
error = (a @ b).float() - (a.float() @ b.float())
print(f"largest difference of the results: {error.abs().max():.3f} of values up to {(a.float() @ b.float()).max():.0f}")
sys.exit(middle["product"] < 8 * middle["by float32"])
PYTHON
"$folder/venv/bin/python" "$folder/find.py"
