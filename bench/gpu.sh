#!/bin/sh
# All that needs a GPU, in one call and within ten minutes: build, GPU tests, benchmarks, compute-sanitizer.
#
#   bench/gpu.sh [FOLDER]    figures as JSON, and each step's output, go to FOLDER (default: bench/results)
#
# In an environment with torch, numpy, Triton, pybind11, cmake, ninja, setuptools, tqdm, pytest and hypothesis; PYTHON
# names its interpreter. A step that fails does not stop the next; the exit status is 1 if any failed.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${1:-bench/results}
mkdir -p "$out"
failed=

step() {  # name, seconds, command...
    name=$1 limit=$2
    shift 2
    echo "== $name: $*"
    if timeout -k 10 "$limit" "$@" >"$out/gpu-$name.txt" 2>&1; then
        echo "   ok"
    else
        echo "   FAILED with $?; the end of $out/gpu-$name.txt:"
        tail -n 25 "$out/gpu-$name.txt"
        failed="$failed $name"
    fi
}

export SHARDCOMM_CUDA=on
step build 180 "$python" -m pip install -q --no-build-isolation --no-deps -e .
step doctor 90 "$python" -m shardcomm doctor
cat "$out/gpu-doctor.txt"
step tests 150 "$python" -m pytest -q -m gpu -p no:cacheprovider
step kernels 60 "$python" bench/gpu_kernels.py --json "$out/gpu_kernels.json" --check
step engine 200 "$python" bench/gpu_engine.py --json "$out/gpu_engine.json" --check
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
if [ -x "$sanitizer" ]; then
    for tool in memcheck racecheck; do
        step "$tool" 50 "$sanitizer" --tool "$tool" --error-exitcode 9 \
            "$python" -m pytest -q -m gpu -p no:cacheprovider tests/test_copy_cuda.py
    done
else
    echo "== memcheck, racecheck: not run, there is no compute-sanitizer"
fi
echo
[ -z "$failed" ] && echo "all passed" || { echo "failed:$failed"; exit 1; }
