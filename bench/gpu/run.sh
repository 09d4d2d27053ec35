#!/usr/bin/env bash
# Everything that a GPU machine has to show: `bench/gpu/run.sh` runs all stages, `bench/gpu/run.sh STAGE...` some.
#
#   build    compile for this GPU, and say what the doctor says                      about 3 minutes on 16 cores
#   tests    ops, replay and fused targets with real kernels                         6
#   memory   a few of them under compute-sanitizer                                   3
#   probe    bandwidth; do captured kernels overlap?                                 1
#   step     the step at several contexts and batches; where its time goes           8
#   overlap  the step with overlap and prefetch on and off                           5
#   kernels  every kernel next to plain torch; what bounds it (Nsight Compute)       7
#   trace    when the blocks of one layer start, wait and end, as a picture          5
#   peers    the reference loop, torch.compile, StaticCache                          9
#   page     README.md of the results
#
# The minutes are estimates. A stage stops after ten minutes with what it has. Each can be repeated alone: results get
# the time into their name, so that nothing is overwritten, and the page shows the newest.
#
# --out FOLDER     where results go (default: bench/results/gpu)
# --device cpu     try every line without a GPU, with a tiny model; nothing that comes out means anything
# --commit NAME    for a tree without git
#
# Needs torch, transformers, pybind11, cmake, ninja, nvcc, pytest and pytest-xdist. When something fails:
#   a test      its file with DFLASH_OVERLAP=0, then with CUDA_LAUNCH_BLOCKING=1. Wrong only with overlap: a wait is
#               missing, or a kernel of torch's own reads early. Always wrong: compute-sanitizer on that test.
#   no graphs   CUDA_MODULE_LOADING=EAGER, then DFLASH_OVERLAP=0; Generator.graph_reason says what CUDA said
#   probe       no programmatic edges, or no gain: overlap is worth nothing here, and fewer kernels are
#   step        slower with prefetch than without: fewer stages before the wait
set -uo pipefail
cd "$(dirname "$0")/../.."

device=cuda out=bench/results/gpu commit=
all=(build tests memory probe step overlap kernels trace peers page)
stages=()
while [ $# -gt 0 ]; do
  case $1 in
    --device) device=${2:?}; shift 2 ;;
    --out) out=${2:?}; shift 2 ;;
    --commit) commit=${2:?}; shift 2 ;;
    -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' bench/gpu/run.sh; exit ;;
    -*) echo "no option $1" >&2; exit 2 ;;
    *) [[ " ${all[*]} " == *" $1 "* ]] || { echo "no stage $1; choose from: ${all[*]}" >&2; exit 2; }; stages+=("$1"); shift ;;
  esac
done
[ ${#stages[@]} -gt 0 ] || stages=("${all[@]}")
: "${commit:=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}"
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONUNBUFFERED=1 PATH=${PATH}:/usr/local/cuda/bin PYTHONPATH=$PWD/python HF_HUB_OFFLINE=1
[ "$device" = cpu ] && on_cpu=1 || on_cpu=

named() { echo "$out/$1-$(date -u +%Y%m%d-%H%M%S).$2"; } # a file of results
until_end() { timeout -k 10 $((limit > SECONDS ? limit - SECONDS : 1)) "$@"; } # as long as the stage may still run

build() {
  python3 -c "import sys, torch, transformers as t; print('python', sys.version.split()[0], 'torch', torch.__version__, 'transformers', t.__version__)"
  if [ -z "$on_cpu" ]; then
    local arch log
    nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,clocks_throttle_reasons.active --format=csv
    arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
    log=$(named build log)
    { cmake -S . -B "$work/build" -G Ninja -DDFLASH_CUDA=ON "-DCMAKE_CUDA_ARCHITECTURES=$arch" \
        -DPython_EXECUTABLE="$(command -v python3)" -Dpybind11_DIR="$(python3 -m pybind11 --cmakedir)" &&
      until_end cmake --build "$work/build"; } >"$log" 2>&1 || { tail -n 40 "$log"; return 1; }
    cp "$work"/build/_C*.so python/dflash/
    python3 tests/cuda_emulation/ptxas_table.py <"$log" >"$(named registers txt)"
  fi
  python3 -c "import sys; sys.argv[1:] = ['doctor']; from dflash.cli import main; main()" | tee "$(named doctor txt)"
}

tests() {
  local kind=cuda names=(test_linear test_linear_add_scale test_block_attention test_rms_norm test_silu_mul test_append_kv test_append_context_kv
    test_qkv_norm_rope_append test_fuse_features test_select_tokens test_accept_prefix test_replay test_fused)
  [ "$on_cpu" ] && kind="not cuda and not slow" names=(test_silu_mul)
  names=("${names[@]/#/tests/}")
  until_end python3 -m pytest -q -p no:cacheprovider -n "$([ "$on_cpu" ] && echo 0 || echo 8)" -m "$kind" \
    --junitxml="$(named tests xml)" "${names[@]/%/.py}" 2>&1 | tail -n 40
}

memory() {
  local tool=(compute-sanitizer --tool memcheck --error-exitcode 9) op file bad=0
  file=$(named memory txt)
  [ "$on_cpu" ] && tool=(env)
  for op in linear block_attention qkv_norm_rope_append; do
    until_end "${tool[@]}" python3 -m pytest -q -p no:cacheprovider -x "tests/test_$op.py" \
      -k "$([ "$on_cpu" ] && echo "cpu-bfloat16" || echo "cuda-bfloat16") and (64 or 131)" 2>&1 | tail -n 4 | tee -a "$file" || bad=1
  done
  return $bad
}

probe() {
  if [ "$on_cpu" ]; then
    echo "probe: nvcc only compiles it here"
    nvcc -std=c++17 -O3 -arch=sm_90 -cubin -o "$work/probe.cubin" bench/gpu/probe.cu
    return
  fi
  nvcc -std=c++17 -O3 -arch=native -o "$work/probe" bench/gpu/probe.cu && until_end "$work/probe" | tee "$(named probe txt)"
}

steps() { # steps NAME OPTION...: bench/step into a file of its own
  local name=$1 options=(--commit "$commit" --stop-after $((limit > SECONDS ? limit - SECONDS : 1)))
  shift
  [ "$on_cpu" ] && options+=(--device cpu --model tiny --dtype bfloat16 --steps 2 --rounds 1) || options+=(--rounds 3)
  until_end python3 bench/step "$@" "${options[@]}" --json "$(named "$name" json)"
}
at() { [ "$on_cpu" ] && echo 64 || echo "$@"; } # contexts

step() {
  steps step-1k --contexts $(at 1024) --runners eager graph fused
  steps step-long --contexts $(at 8192 32768) --runners fused --accepted 6
  steps step-batch --contexts $(at 1024) --batches 2 4 8 --runners fused graph --accepted 6
  # With overlap on, the profiler counts the waiting of a kernel that started early as its time.
  DFLASH_OVERLAP=0 steps table --contexts $(at 1024) --runners fused --accepted 6 --table
}

overlap() {
  local pair
  for pair in "1 1" "1 0" "0 0"; do
    set -- $pair
    DFLASH_OVERLAP=$1 DFLASH_PREFETCH=$2 steps "overlap$1-prefetch$2" --contexts $(at 1024 32768) --runners fused --accepted 6
  done
}

kernels() {
  local sizes=(--device cuda --models qwen3-8b --rows 16 --contexts 1024 8192 32768 --dtypes bfloat16 --seconds 0.05)
  [ "$on_cpu" ] && sizes=(--quick --dtypes bfloat16)
  until_end python3 bench/bench_all.py "${sizes[@]}" --json "$(named ops json)" \
    --only linear linears linear_add_scale block_attention add_rms_norm silu_mul qkv_norm_rope_append select_tokens
  command -v ncu >/dev/null || { echo "kernels: ncu is missing"; return; }
  [ "$on_cpu" ] && return
  until_end ncu --clock-control none --target-processes all -s 40 -c 24 --csv --page raw \
    -k 'regex:linear_kernel|attention|rms_norm|silu|swiglu|qkv_norm|scan_slices' --section SpeedOfLight \
    --section WarpStateStats --section Occupancy --section MemoryWorkloadAnalysis \
    python3 bench/step --commit "$commit" --rounds 1 --steps 1 --contexts 1024 --runners eager --accepted 6 \
    >"$(named ncu csv)" 2>"$work/ncu.err" || tail -n 2 "$work/ncu.err"
}

trace() {
  if [ "$on_cpu" ]; then
    python3 bench/gpu/timeline.py --try "$(named timeline png)"
    return
  fi
  local arch
  arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
  { cmake -S . -B "$work/trace" -G Ninja -DDFLASH_CUDA=ON -DDFLASH_TRACE=ON "-DCMAKE_CUDA_ARCHITECTURES=$arch" \
      -DPython_EXECUTABLE="$(command -v python3)" -Dpybind11_DIR="$(python3 -m pybind11 --cmakedir)" &&
    until_end cmake --build "$work/trace"; } >"$work/trace.log" 2>&1 || { tail -n 40 "$work/trace.log"; return 1; }
  cp -r python "$work/python" && cp "$work"/trace/_C*.so "$work/python/dflash/"
  PYTHONPATH=$work/python until_end python3 bench/gpu/timeline.py "$(named timeline png)"
}

peers() { # each in a run of its own, so that a slow compilation takes no other's rows with it
  local runner
  for runner in reference compiled static; do
    steps "peer-$runner" --contexts $(at 1024) --accepted 6 --runners fused "$runner"
  done
}

page() { python3 bench/gpu/page.py "$out" && echo "$out/README.md"; }

failed=()
for name in "${stages[@]}"; do
  echo "=== $name"
  began=$SECONDS limit=$((SECONDS + 600))
  "$name" || failed+=("$name")
  printf -- '--- %s: %d min %02d s\n' "$name" $(((SECONDS - began) / 60)) $(((SECONDS - began) % 60))
done
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}" >&2; exit 1; }
