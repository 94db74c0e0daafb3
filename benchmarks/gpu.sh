#!/usr/bin/env bash
# Everything that needs a GPU, in parts that each fit ten minutes; no network.
#
#   benchmarks/gpu.sh [--part build|info|test|bits|memcheck|bench|models] ...   default: all
#
# Results: $OUT, or benchmarks/results: gpu.json and gpu.md (measurements), junit_gpu.xml (tests),
# info.json, and a log of each part. A part that fails does not stop the next; the exit code is the
# worst of all, 3 without a GPU. Not yet run on a GPU.
set -u
cd "$(dirname "$0")/.." || exit 2
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || command -v python3)}
RESULTS=${OUT:-benchmarks/results}
export PYTHONUNBUFFERED=1

parts=()
while [ $# -gt 0 ]; do
  case "$1" in
    --part) parts+=("${2:?--part needs a name}"); shift 2 ;;
    *) echo "InvalidInput: $1: expected --part NAME. See the head of benchmarks/gpu.sh." >&2; exit 2 ;;
  esac
done
[ ${#parts[@]} -gt 0 ] || parts=(build info test bits memcheck bench models)

"$PYTHON" -c 'import torch, sys; sys.exit(0 if torch.cuda.is_available() else 3)' || {
  echo "BackendError: GPU: expected a CUDA device and a CUDA build of torch, got neither." \
    "Run benchmarks/gpu.sh on a machine with a GPU; nothing was measured." >&2
  exit 3
}
mkdir -p "$RESULTS"

build() {
  local capability
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d '. ')
  DPKERN_CUDA=on DPKERN_CUDA_ARCHS="${capability:-90}-real" \
    "$PYTHON" -m pip install --quiet -e . --no-build-isolation --no-deps
}
info() { "$PYTHON" -m dpkern info --json | tee "$RESULTS/info.json"; }
tests() { # what is marked gpu, then every op on every backend
  "$PYTHON" -m pytest -q -m gpu -p no:cacheprovider --junitxml="$RESULTS/junit_gpu.xml" tests
  local marked=$?
  "$PYTHON" -m pytest -q -p no:cacheprovider --junitxml="$RESULTS/junit_ops.xml" \
    tests/test_ops.py tests/test_golden.py tests/test_precision.py tests/test_sensitivity.py \
    tests/test_update_noise.py tests/test_ghost_*.py tests/test_coef*.py
  local ops=$?
  return $((marked > ops ? marked : ops))
}
bits() { "$PYTHON" -m benchmarks.gpu_bits; }
memcheck() {
  command -v compute-sanitizer > /dev/null || { echo "compute-sanitizer is not installed"; return 0; }
  local tool worst=0
  for tool in memcheck racecheck; do
    compute-sanitizer --tool "$tool" --error-exitcode 1 \
      "$PYTHON" -m benchmarks.gpu_bits --scale 0.00001 || worst=1
  done
  return $worst
}
bench() { "$PYTHON" -m benchmarks.gpu; }
models() { "$PYTHON" -m benchmarks.gpu_models; }

worst=0
for part in "${parts[@]}"; do
  case "$part" in
    build | info | bits | memcheck | bench | models) run=$part ;;
    test) run=tests ;;
    *) echo "InvalidInput: part: expected one of those at the head of this file, got $part." >&2
       exit 2 ;;
  esac
  started=$SECONDS
  "$run" 2>&1 | tee "$RESULTS/$part.log"
  code=${PIPESTATUS[0]}
  echo "part $part: exit $code after $((SECONDS - started)) s"
  [ "$code" -gt "$worst" ] && worst=$code
done
exit "$worst"
