#!/usr/bin/env bash
# Builds, tests and measures with the interpreter that is there, on a machine with a GPU:
#
#   benchmarks/on_gpu.sh OUT tests              all GPU tests (OUT/tests.txt)
#   benchmarks/on_gpu.sh OUT kernels            the kernels' tests
#   benchmarks/on_gpu.sh OUT sanitize           compute-sanitizer over the kernels and a few steps
#   benchmarks/on_gpu.sh OUT launches           launches per second, with and without Triton's own way
#   benchmarks/on_gpu.sh OUT replay             the host's replay: 1 to 16 threads, S of 1 to 8, fp32 and bf16 moments
#   benchmarks/on_gpu.sh OUT beside             the floor beside replay on some threads, from memory and from caches
#   benchmarks/on_gpu.sh OUT peers              DeepSpeed's CPU Adam, compiled beforehand: a minute that `step` need not take
#   benchmarks/on_gpu.sh OUT soak               5,000 steps of a small model with saves
#   benchmarks/on_gpu.sh OUT step NAME ARGS...  `stallfree bench step ARGS... --output OUT/NAME.json`
#   benchmarks/on_gpu.sh OUT versus OTHER ROUNDS NAME ARGS...  `step` with another tree of this project and with this one, in turn
#   benchmarks/on_gpu.sh OUT ranks              the tests of ranks with NCCL, and of several devices, on as many GPUs as there are
#   benchmarks/on_gpu.sh OUT fsdp NAME ARGS...  benchmarks/fsdp.py ARGS... --output OUT/NAME.json, a rank on every GPU
#
# WHEELS: a folder of wheels to install for the run, where the interpreter lacks some (pydantic, peers).
# Every part reports and goes on; the last line of each says how it ended.
set -uo pipefail
out=$1 part=$2
shift 2
mkdir -p "$out"
cd "$(dirname "$0")/.."
python3 setup.py -q build_ext --inplace || exit 1
export PYTHONPATH="$PWD/src" PYTHONUNBUFFERED=1
if [ -n "${WHEELS:-}" ]; then
  [ -d /tmp/wheels ] || python3 -m pip install -q --no-index --no-deps --target /tmp/wheels "$WHEELS"/*.whl
  export PYTHONPATH="/tmp/wheels:$PYTHONPATH"
fi

step() { # tree, name of the result, arguments
  local tree=$1 name=$2
  shift 2
  PYTHONPATH="$tree/src:$PYTHONPATH" python3 -c 'import sys; from stallfree.cli import main; sys.exit(main())' bench step "$@" --output "$out/$name.json"
}

tests() {
  python3 -m pytest -q -n "$(nproc)" -m gpu -p no:cacheprovider "$@" > "$out/$part.txt" 2>&1
  grep -E '^(FAILED|ERROR)|^E  |passed|failed' "$out/$part.txt" | head -60
}

case $part in
  tests) tests --maxfail=20 tests/test_*.py tests/checkpoints ;;
  kernels) tests --maxfail=20 tests/kernels ;;
  sanitize)
    for tool in memcheck racecheck; do
      # The launcher asks for parameters until there are no more, which is an error of the driver's interface, and none here.
      compute-sanitizer --tool "$tool" --report-api-errors no --log-file "$out/$tool.txt" python3 tests/sanitize.py || echo "$tool failed"
      tail -3 "$out/$tool.txt"
    done
    ;;
  launches) python3 benchmarks/launches.py | tee "$out/launches.txt" ;;
  replay)
    python3 benchmarks/replay.py --threads 1 2 4 8 12 16 --rounds 3 --no-adamw --model --output "$out/replay.json" "$@" |
      tee "$out/replay.txt"
    ;;
  beside) python3 -m benchmarks.beside --output "$out/beside.json" "$@" | tee "$out/beside.txt" ;;
  peers)
    TORCH_CUDA_ARCH_LIST=9.0 python3 -c 'from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()' \
      > "$out/peers.txt" 2>&1 || tail -3 "$out/peers.txt"
    ;;
  soak) python3 benchmarks/soak.py --device cuda --steps 5000 | tee "$out/soak.txt" ;;
  step)
    name=$1
    shift
    step "$PWD" "$name" "$@"
    ;;
  versus) # each beside its own floor: machines differ from run to run
    other=$(cd "$1" && pwd) rounds=$2 name=$3
    shift 3
    (cd "$other" && python3 setup.py -q build_ext --inplace) || exit 1
    for round in $(seq "$rounds"); do
      step "$other" "$name-other-$round" "$@"
      step "$PWD" "$name-this-$round" "$@"
    done
    ;;
  ranks)
    export STALLFREE_RANKS_ON=cuda
    python3 -m pytest -v -n 6 -p no:cacheprovider tests/test_second_device.py tests/distributed/test_training*.py \
      tests/distributed/test_checkpoints.py "$@" 2>&1 |
      tee "$out/ranks.txt" | grep -E '^(FAILED|ERROR|SKIPPED)|^E  |PASSED|FAILED|passed|failed'
    ;;
  fsdp)
    name=$1
    shift
    gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
    python3 -m torch.distributed.run --standalone --nproc-per-node "$gpus" benchmarks/fsdp.py --output "$out/$name.json" "$@"
    ;;
  *) sed -n 2,18p "$0" ;;
esac
echo "$part: $?"
