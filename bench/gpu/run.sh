#!/usr/bin/env bash
# Everything that a GPU machine has to show: `bench/gpu/run.sh` runs all stages, `bench/gpu/run.sh STAGE...` some.
#
#   build    compile for this GPU; the doctor runs each kernel next to plain torch   3 minutes on an H100 and 16 cores
#   tests    every test of a CUDA kernel, with real kernels                          2
#   memory   a few of them under compute-sanitizer                                   1
#   answers  whole answers of the package's pair, next to one token at a time        1
#   probe    bandwidth; do captured kernels overlap?                                 1
#   step     the step at several contexts and batches, and with trees; its kernels   3
#   overlap  the step with overlap and prefetch on and off                           1
#   kernels  every kernel next to plain torch; what bounds it (Nsight Compute)       2
#   peers    the reference loop, torch.compile, StaticCache                          3
#
# A stage stops after nine minutes with what it has, and can run alone: it compiles what it needs, unless build/gpu has
# it. Results get the time into their name, so that nothing is overwritten. After every stage README.md of the folder
# (page.py) shows the newest results, and what did not run.
#
# --out FOLDER     where results go (default: bench/results/gpu)
# --archive FILE   also keep the folder as one .tar.gz, renewed after every stage
# --seconds N      stop after so long in all
# --device cpu     try every line without a GPU, with a tiny model; nothing that comes out means anything
# --commit NAME    for a tree without git
#
# On a machine that stops a command after ten minutes and gives back few files:
#     bench/gpu/run.sh --seconds 570 --archive OUT/gpu-1.tar.gz --commit NAME build tests
# Afterwards unpack the archives into one folder, and `python bench/gpu/page.py FOLDER`.
#
# Needs torch, transformers, pybind11, cmake, ninja, nvcc, pytest, pytest-xdist and, for the reference loop and a test,
# `.peers` (bench/README.md). When something fails:
#   a test      its file with DFLASH_OVERLAP=0, then with CUDA_LAUNCH_BLOCKING=1. Wrong only with overlap: a wait is
#               missing, or a kernel of torch's own reads early. Always wrong: compute-sanitizer on that test.
#   no graphs   CUDA_MODULE_LOADING=EAGER, then DFLASH_OVERLAP=0; Generator.graph_reason says what CUDA said
#   probe       no programmatic edges, or no gain: overlap is worth nothing here, and fewer kernels are
#   step        slower with prefetch than without: fewer stages before the wait
set -uo pipefail
cd "$(dirname "$0")/../.." || exit

all=(build tests answers memory probe step overlap kernels peers)
device=cuda out=bench/results/gpu archive='' total=1000000 commit='' stages=()
while [ $# -gt 0 ]; do
  case $1 in
    --device) device=${2:?}; shift 2 ;;
    --out) out=${2:?}; shift 2 ;;
    --archive) archive=${2:?}; shift 2 ;;
    --seconds) total=${2:?}; shift 2 ;;
    --commit) commit=${2:?}; shift 2 ;;
    -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' bench/gpu/run.sh; exit ;;
    -*) echo "no option $1" >&2; exit 2 ;;
    *) [[ " ${all[*]} " == *" $1 "* ]] || { echo "no stage $1; choose from: ${all[*]}" >&2; exit 2; }; stages+=("$1"); shift ;;
  esac
done
[ ${#stages[@]} -gt 0 ] || stages=("${all[@]}")
: "${commit:=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}"
mkdir -p "$out"
work=$(mktemp -d) nvcc=${CUDACXX:-nvcc} python_path=${PYTHONPATH:+:$PYTHONPATH}
trap 'rm -rf "$work"' EXIT
export PYTHONUNBUFFERED=1 PATH=${PATH}:/usr/local/cuda/bin HF_HUB_OFFLINE=1
if [ "$device" = cpu ]; then
  on_cpu=1 near=64 far=(80 96) farthest=96 # contexts
else
  on_cpu='' near=1024 far=(8192 32768) farthest=32768
fi

named() { echo "$out/$1-$(date -u +%Y%m%d-%H%M%S).$2"; } # a file of results
left() { echo $((limit > SECONDS ? limit - SECONDS : 1)); } # seconds of the stage

attempt() { # attempt NAME SECONDS COMMAND...: run it for so long at most; what goes wrong gets into the page
  local name=$1 seconds=$2 code=0
  shift 2
  timeout -k 10 "$seconds" "$@" || code=$?
  case $code in
    0) ;;
    124 | 137) faults+=("$name: stopped after $seconds s") ;;
    *) faults+=("$name: exit code $code") ;;
  esac
  return $code
}

use_build() { # a build for this GPU is what Python imports from here on
  if [ "$on_cpu" ]; then # what is installed
    attempt dflash "$(left)" python3 -c 'from dflash import _C'
    return
  fi
  local place=build/gpu/plain arch made_of
  arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
  made_of="$arch $(python3 -V) $(find csrc CMakeLists.txt -type f -print0 | LC_ALL=C sort -z | xargs -0 cat | sha256sum)"
  if [ "$(cat "$place/made-of" 2>/dev/null)" != "$made_of" ]; then
    mkdir -p "$place"
    { cmake -S . -B "$place/cmake" -G Ninja -DDFLASH_CUDA=ON "-DCMAKE_CUDA_ARCHITECTURES=$arch" \
        "-DPython_EXECUTABLE=$(command -v python3)" "-Dpybind11_DIR=$(python3 -m pybind11 --cmakedir)" &&
      attempt "plain build" "$(left)" cmake --build "$place/cmake"; } >"$place/log" 2>&1 ||
      { cp "$place/log" "$(named plain-build log)"; tail -n 40 "$place/log"; return 1; }
    echo "$made_of" >"$place/made-of"
  fi
  rm -rf "$place/python"
  cp -r python "$place/python" && cp "$place"/cmake/_C*.so "$place/python/dflash/" &&
    export PYTHONPATH=$PWD/$place/python$python_path
}

build() {
  python3 -c "import sys, torch, transformers as t; print('python', sys.version.split()[0], 'torch', torch.__version__, 'transformers', t.__version__)"
  [ "$on_cpu" ] || nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,clocks_throttle_reasons.active --format=csv
  use_build || return
  [ "$on_cpu" ] || attempt registers "$(left)" python3 tests/cuda_emulation/ptxas_table.py <build/gpu/plain/log >"$(named registers txt)"
  # Not by the command's name: this build has no entry points.
  attempt doctor "$(left)" python3 -c 'import typer
from dflash.cli.running import run
from dflash_tools.commands.doctor import doctor
app = typer.Typer()
app.command()(doctor)
run(app)' >"$work/doctor"
  tee "$(named doctor txt)" <"$work/doctor"
}

tests() {
  use_build || return
  local which files log
  # Of the others some need packages that such a machine may not have.
  mapfile -t files < <(grep -lwE 'kernels|implementation|on_gpu|cuda' tests/test_*.py tests/faults/test_*.py)
  which=(-n 12 -m cuda --continue-on-collection-errors "${files[@]}")
  [ "$on_cpu" ] && which=(-n 2 -m "not cuda and not slow" tests/test_silu_mul.py)
  log=$(named tests log)
  attempt tests "$(left)" python3 -m pytest -q -p no:cacheprovider -p bench.gpu.pytest_lines --lines "$(named tests jsonl)" \
    --max-worker-restart 100 "${which[@]}" >"$log" 2>&1
  tail -n 40 "$log"
}

answers() {
  use_build || return
  attempt answers "$(left)" python3 bench/gpu/answers.py --device "$device" >"$work/answers"
  tee "$(named answers txt)" <"$work/answers"
}

memory() { # torch would cut tensors out of large allocations, in which the tool sees no end
  use_build || return
  local tool=(compute-sanitizer --tool memcheck --error-exitcode 9) place=cuda op file
  file=$(named memory txt)
  [ "$on_cpu" ] && tool=(env) place=cpu
  for op in linear block_attention qkv_norm_rope_append; do
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 attempt "$op" "$(left)" "${tool[@]}" python3 -m pytest -q -p no:cacheprovider -x \
      "tests/test_$op.py" -k "$place-bfloat16 and float64" >"$work/memory" 2>&1
    cat "$work/memory" >>"$file"
    tail -n 4 "$work/memory"
  done
}

probe() {
  if [ "$on_cpu" ]; then
    attempt nvcc "$(left)" "$nvcc" -std=c++17 -O3 -arch=sm_90 -cubin -o "$work/probe.cubin" bench/gpu/probe.cu
    return
  fi
  attempt nvcc "$(left)" "$nvcc" -std=c++17 -O3 -arch=native -o "$work/probe" bench/gpu/probe.cu || return
  attempt probe "$(left)" "$work/probe" >"$work/probe.txt"
  tee "$(named probe txt)" <"$work/probe.txt"
}

steps() { # steps RUNS NAME OPTION...: bench/step into a file of its own, in its part of the time left for so many runs
  local seconds=$(($(left) / $1 + 1)) name=$2
  local options=(--commit "$commit" --stop-after "$((seconds * 4 / 5))")
  shift 2
  [ "$on_cpu" ] && options+=(--device cpu --model tiny --dtype bfloat16 --steps 2 --rounds 1) || options+=(--rounds 3)
  attempt "$name" "$seconds" python3 bench/step "$@" "${options[@]}" --json "$(named "$name" json)"
}

step() {
  use_build || return
  steps 5 step-1k --contexts "$near" --runners eager graph fused
  steps 4 step-long --contexts "${far[@]}" --runners fused --accepted 6
  steps 3 step-batch --contexts "$near" --batches 2 4 8 --runners fused graph --accepted 6
  steps 2 step-tree --contexts "$near" --runners fused graph --tree 32 64 --accepted 6
  # With overlap on, the profiler counts the waiting of a kernel that started early as its time.
  DFLASH_OVERLAP=0 steps 1 table --contexts "$near" --runners fused --accepted 6 --table
}

overlap() {
  use_build || return
  local runs=3 overlap prefetch
  while read -r overlap prefetch; do
    DFLASH_OVERLAP=$overlap DFLASH_PREFETCH=$prefetch \
      steps $((runs--)) "overlap$overlap-prefetch$prefetch" --contexts "$near" "$farthest" --runners fused --accepted 6
  done <<<$'1 1\n1 0\n0 0'
}

kernels() {
  use_build || return
  local sizes=(--device cuda --models qwen3-8b --rows 16 --contexts 1024 8192 32768 --dtypes bfloat16 --seconds 0.05)
  # Of our kernels, the third and fourth launch of each grid: the second layer's, mostly.
  local tool=(ncu --target-processes all --clock-control none --log-file "$(named ncu csv)" --csv --page raw
    --kernel-name-base demangled -k regex:dflash:: --filter-mode per-launch-config -s 2 -c 2
    --section SpeedOfLight --section WarpStateStats --section Occupancy --section MemoryWorkloadAnalysis)
  local run=(python3 bench/fused_step.py --context 1024)
  [ "$on_cpu" ] && sizes=(--quick --dtypes bfloat16) tool=(env) run+=(--device cpu)
  attempt ops $(($(left) / 2)) python3 bench/bench_all.py "${sizes[@]}" --json "$(named ops json)" \
    --only linear linears swiglu block_attention add_rms_norm silu_mul qkv_norm_rope_append select_tokens
  attempt "${tool[0]}" "$(left)" "${tool[@]}" "${run[@]}"
}

peers() { # each in a run of its own, so that a slow compilation takes no other's rows with it
  use_build || return
  local runs=3 runner
  for runner in reference static compiled; do
    steps $((runs--)) "peer-$runner" --contexts "$near" --accepted 6 --runners fused "$runner"
  done
}

log=$(named stages tsv)
note() { printf '%s\t%s\t%s\t%s\n' "$1" "$(date -u '+%Y-%m-%d %H:%M')" "$commit" "$2" >>"$log"; } # note STAGE OUTCOME
keep() { # after every stage: a run that is killed loses one at most
  python3 bench/gpu/page.py "$out"
  [ -z "$archive" ] || { tar -C "$out" -czf "$work/archive" . && cp "$work/archive" "$archive.partial" && mv "$archive.partial" "$archive"; }
}

failed=()
for name in "${stages[@]}"; do
  note "$name" "not begun"
done
for name in "${stages[@]}"; do
  [ $((total - SECONDS)) -gt 10 ] || { failed+=("$name"); continue; }
  echo "=== $name"
  note "$name" "begun, did not end"
  began=$SECONDS limit=$((SECONDS + 540 < total ? SECONDS + 540 : total)) faults=()
  "$name" || [ ${#faults[@]} -gt 0 ] || faults=("failed")
  [ ${#faults[@]} -eq 0 ] || failed+=("$name")
  took="$(((SECONDS - began) / 60)) min $(((SECONDS - began) % 60)) s"
  note "$name" "$took$(printf '; %s' "${faults[@]:-ok}")"
  echo "--- $name: $took"
  keep
done
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}" >&2; exit 1; }
