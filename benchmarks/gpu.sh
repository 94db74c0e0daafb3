#!/usr/bin/env bash
# Everything that needs a GPU, in parts that can be run in separate calls; no network.
#
#   benchmarks/gpu.sh --call 1 .. 5                 one call of the campaign: parts, and 9 minutes
#                     [--part smoke|first|test|models|tiles|bench|memcheck|bits] ...   default: all
#                     [--backends cuda,triton,cupy]   what must be there; nothing runs without
#                     [--minutes 9]                   for all parts together; default: no limit
#                     [--wheels .wheels]              packages that travelled here, none is fetched
#
# Every call makes sure of its build: of the compiled module in a wheel of these very sources, or by
# the compilers that are here. So a call on a bare machine either measures everything or fails.
#
# Results: $OUT, or benchmarks/results, seven files: log.txt (as it goes), summary.txt, info.json,
# gpu.json and gpu.md (measurements), junit_gpu.xml (tests), build.txt. A part that fails does not
# stop the next; the exit code is the worst of all, 3 without a GPU, 4 where a backend is missing or
# a part was not run or not finished. Not yet run on a GPU.
set -u
cd "$(dirname "$0")/.." || exit 2
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || command -v python3)}
RESULTS=${OUT:-benchmarks/results}
export PYTHONUNBUFFERED=1 PATH="$PATH:/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer"

backends=cuda,triton,cupy minutes=0 wheels=.wheels parts=()
while [ $# -gt 0 ]; do
  case "$1" in
    --part) parts+=("${2:?--part needs a name}") ;;
    --call)
      minutes=9
      case "${2:?--call needs a number}" in
        1) parts+=(smoke first) ;;
        2) parts+=(test) ;;
        3) parts+=(models) ;;
        4) parts+=(tiles bench) ;;
        5) parts+=(memcheck bits) ;;
        *) echo "InvalidInput: --call: expected 1 to 5, got $2." >&2; exit 2 ;;
      esac ;;
    --backends) backends=${2:?--backends needs names} ;;
    --minutes) minutes=${2:?--minutes needs a number} ;;
    --wheels) wheels=${2:?--wheels needs a folder} ;;
    *) echo "InvalidInput: $1: expected an option at the head of benchmarks/gpu.sh." >&2; exit 2 ;;
  esac
  shift 2
done
case "$minutes" in *[!0-9]*)
  echo "InvalidInput: --minutes: expected a whole number, got $minutes." >&2; exit 2 ;;
esac
[ ${#parts[@]} -gt 0 ] || parts=(smoke first test models tiles bench memcheck bits)
for part in "${parts[@]}"; do
  case "$part" in
    smoke | first | test | models | tiles | bench | memcheck | bits) ;;
    *) echo "InvalidInput: part: expected one at the head of benchmarks/gpu.sh, got $part." >&2
       exit 2 ;;
  esac
done

left() { # seconds
  [ "$minutes" = 0 ] && echo 86400 || echo $((minutes * 60 - SECONDS))
}
check() { "$PYTHON" -m benchmarks.gpu_ready check "$backends"; }
build() { # by an unknown compiler: its warnings are its own
  local capability
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d '. ')
  DPKERN_WERROR=off DPKERN_CUDA=on DPKERN_CUDA_ARCHS="${capability:-90}-real" \
    NVCC_APPEND_FLAGS="${NVCC_APPEND_FLAGS:---allow-unsupported-compiler}" \
    "$PYTHON" -m pip install -e . --no-build-isolation --no-deps
}
others() { # packages that are not here, such as Opacus; never another dpkern
  local found=()
  for wheel in "$wheels"/*.whl; do
    case "$wheel" in */dpkern-* | *'*'*) ;; *) found+=("$wheel") ;; esac
  done
  [ ${#found[@]} -eq 0 ] || "$PYTHON" -m pip install --no-index --no-deps --no-compile \
    --disable-pip-version-check --upgrade --target "$PWD/build/gpu-packages" "${found[@]}"
}
ready() {
  others || return 4
  "$PYTHON" -m benchmarks.gpu_ready unpack "$wheels" && check && return 0
  build || { echo "BackendError: build: expected compiled kernels, got the errors above." \
    "Carry a wheel of these sources in $wheels; nothing was measured." >&2; return 4; }
  check
}

"$PYTHON" -m benchmarks.gpu_ready check "" || exit $?
mkdir -p "$RESULTS"
export PYTHONPATH="$PWD/build/gpu-packages${PYTHONPATH:+:$PYTHONPATH}"
ready 2>&1 | tee "$RESULTS/build.txt"
[ "${PIPESTATUS[0]}" -eq 0 ] || exit 4
"$PYTHON" -m dpkern info --json > "$RESULTS/info.json"

smoke() { "$PYTHON" -m benchmarks.gpu_smoke; }
first() { "$PYTHON" -m benchmarks.gpu_first; }
tests() { # those of a device, every op on every backend among them
  "$PYTHON" -m tests.gpu_run --require "$backends" --seconds "$(($(left) - 20))" \
    --junit "$RESULTS/junit_gpu.xml"
}
bits() { "$PYTHON" -m benchmarks.gpu_bits; }
memcheck() { # torch's caching allocator would hide what is beyond a tensor in the same block
  command -v compute-sanitizer > /dev/null || {
    echo "BackendError: compute-sanitizer: expected on PATH, found none. Leave the part out."
    return 4
  }
  local tool worst=0
  for tool in memcheck racecheck; do
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 1 \
      "$PYTHON" -m benchmarks.gpu_smoke --scale 0.5 || worst=1
  done
  return $worst
}
bench() { "$PYTHON" -m benchmarks.gpu; }
models() { "$PYTHON" -m benchmarks.gpu_models; }
tiles() { "$PYTHON" -m benchmarks.gpu_tiles; }
export -f smoke first tests bits memcheck bench models tiles left
export PYTHON RESULTS backends minutes
: > "$RESULTS/log.txt"
: > "$RESULTS/summary.txt"
worst=0
for part in "${parts[@]}"; do
  started=$SECONDS
  seconds=$(left)
  if [ "$seconds" -lt 30 ]; then
    code=4 said="not run, no time was left"
  else
    run=$part
    [ "$part" = test ] && run=tests
    echo "== $part" | tee -a "$RESULTS/log.txt"
    timeout --kill-after=5 "$((seconds - 10))" bash -c "SECONDS=$SECONDS; $run" 2>&1 |
      tee -a "$RESULTS/log.txt"
    code=${PIPESTATUS[0]}
    said="exit $code after $((SECONDS - started)) s"
    [ "$code" -eq 124 ] && code=4 said="stopped after $((SECONDS - started)) s, not finished"
  fi
  echo "part $part: $said" | tee -a "$RESULTS/summary.txt" "$RESULTS/log.txt"
  [ "$code" -gt "$worst" ] && worst=$code
done
exit "$worst"
