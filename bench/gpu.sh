#!/usr/bin/env bash
# What needs a GPU, in three stages that each end within ten minutes; docs/gpu-day.md says what they show.
#
#   bench/gpu.sh a OUT    build, tests of the kernels and of thread ranks, figures of the kernels, memcheck
#   bench/gpu.sh b OUT    build, tests of the nccl transport, host time of an engine with peers
#   bench/gpu.sh c OUT    build, the engine against FSDP2
#
# OUT gets the stage's log and figures. The log ends with the output of the steps that failed; so does what is printed.
# PYTHON names the interpreter (default: python3). The exit status is 1 if a step failed, or a figure fell short.
set -u
usage() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" >&2; exit 2; }
[[ $# -eq 2 && $1 == [abc] ]] || usage
stage=$1
mkdir -p "$2" || exit
out=$(cd "$2" && pwd)
cd "$(dirname "$0")/.." || exit
work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
log=$out/gpu-$stage.log
: >"$log"

python=${PYTHON:-python3}
# cmake and ninja may be the interpreter's, and nvcc need not be on the PATH.
PATH=$(dirname "$("$python" -c 'import sys; print(sys.executable)')"):$PATH:/usr/local/cuda/bin
export PATH PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
export SHARDCOMM_CUDA=on
ulimit -c 0

say() { echo "$@" | tee -a "$log"; }

running=() failed=() limits=0 longest=0

begin() {  # NAME SECONDS COMMAND...: starts a step
    local name=$1 limit=$2
    shift 2
    : >"$work/$name.txt"  # here: finish may read it before the step has started
    # What outlives its limit is aborted, so that Python says where it was.
    timeout -s ABRT -k 5 "$limit" "$@" >>"$work/$name.txt" 2>&1 </dev/null &
    running+=("$! $SECONDS $name $limit $*")
    ((limit <= longest)) || longest=$limit
}

finish() {  # waits for the steps begun; 1 if one of them failed
    local step pid began name rest status result=0
    for step in "${running[@]}"; do
        read -r pid began name rest <<<"$step"
        say "== $name: at most ${rest/ / s: }"
        tail -f -n +1 -s 0.2 --pid="$pid" "$work/$name.txt" | tee -a "$log"
        wait "$pid"
        status=$?
        if ((status == 0)); then
            say "   $name: ok, $((SECONDS - began)) s"
        else
            say "   $name: FAILED with $status, $((SECONDS - began)) s"
            failed+=("$name")
            result=1
        fi
    done
    ((limits += longest)) || true
    running=() longest=0
    return $result
}

step() { begin "$@" && finish; }

end() {
    local name
    for name in "${failed[@]}"; do
        say
        say "== the end of $name"
        tail -n 60 "$work/$name.txt" | tee -a "$log"
    done
    say
    say "stage $stage: $SECONDS s (limits: $limits s)${failed[*]:+; failed: ${failed[*]}}"
    ((${#failed[@]} == 0))
    exit
}

pytest() {  # NAME SECONDS ARGUMENTS...: begins GPU tests
    local name=$1 limit=$2
    shift 2
    begin "$name" "$limit" "$python" -m pytest -v --maxfail 10 -m gpu -p no:cacheprovider "$@"
}

build() {  # for this machine's GPU alone, while torch is loaded for the first time
    begin machine 100 "$python" -c '
import importlib, subprocess
for name in ("pybind11", "setuptools", "numpy", "tqdm", "triton", "pytest", "hypothesis", "torch"):
    print(name, importlib.import_module(name).__version__)
import torch
print(torch.cuda.get_device_name(), "of", torch.cuda.device_count(), "NCCL", torch.cuda.nccl.version())
subprocess.run(["nvidia-smi"], check=True)'
    CUDAARCHS=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)-real
    export CUDAARCHS
    begin build 150 "$python" -m pip --disable-pip-version-check install -v --no-index --no-build-isolation \
        --no-deps -e .
    finish || end
    # The backend of torch.distributed is compiled when it is first used: here, and not within a test's deadline.
    step backend 90 "$python" -c 'from shardcomm.interop import backend; backend.load()' || end
}

gpu_tests() { grep -lr --include='test_*.py' 'mark\.gpu' tests; }
kernel_tests() { gpu_tests | grep -E 'copy|reduce|nonfinite' | grep -v triton; }

a() {
    build
    begin doctor 65 "$python" -m shardcomm doctor
    pytest kernels 90 $(kernel_tests)
    pytest local 65 $(gpu_tests | grep -Ev 'copy|reduce|nonfinite|nccl|bench|jax')
    # Not for a GPU alone: elsewhere these run on a machine of the tests' own.
    begin triton 150 "$python" -m pytest -v --maxfail 10 -p no:cacheprovider tests/copy/test_*_triton.py
    finish
    step figures 70 "$python" bench/gpu_kernels.py --json "$out/gpu_kernels.json" --check
    # Only the examples that the tests name, and each tensor an allocation of its own, whose ends memcheck knows.
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    begin memcheck 60 compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 \
        --target-processes application-only \
        "$python" -m pytest -v -m gpu -p no:cacheprovider --hypothesis-profile examples --seed 0 \
        -k 'gpu_copies or gpu_reduces or on_a_gpu' $(kernel_tests)
    finish
}

b() {
    build
    export NCCL_DEBUG=WARN NCCL_DEBUG_FILE=$work/nccl.%p
    local tests test
    pytest smoke 75 tests/comm/test_nccl_gpu.py::test_smoke_two_ranks_gather_and_sum
    pytest smoke-of-torch 75 tests/comm/test_nccl_gpu.py::test_smoke_torchs_own_group_sums
    finish
    if [[ " ${failed[*]} " == *" smoke "* ]]; then
        keep_nccl_log
        tail -n 60 "$out/nccl.txt" | tee -a "$log"
        end
    fi
    pytest bench 100 tests/cli/test_bench.py
    if XLA_PYTHON_CLIENT_PREALLOCATE=false "$python" -c 'import jax; jax.devices("cuda")' >/dev/null 2>&1; then
        pytest jax 110 tests/interop/test_jax.py
    else
        say "== jax: left out, there is no JAX for GPUs here"
    fi
    tests=$(sed -n 's/^def \(test_[a-z0-9_]*\).*/\1/p' tests/comm/test_nccl_gpu.py | grep -v smoke)
    for test in $tests; do
        pytest "${test#test_}" 70 "tests/comm/test_nccl_gpu.py::$test"
        ((${#running[@]} < 5)) || finish
    done
    finish
    keep_nccl_log
    step overhead 90 "$python" bench/overhead.py --device=cuda --rounds 50 --json "$out/gpu_overhead.json" --check
}

keep_nccl_log() { cat "$work"/nccl.* >"$out/nccl.txt" 2>/dev/null; }

c() {
    build
    local part
    for part in alone offloaded 'threads --rounds 5'; do  # a round of thread ranks takes 5 s
        set -- $part
        step "$1" 110 "$python" bench/gpu_engine.py "$@" --json "$out/gpu_engine_$1.json" --check
    done
}

"$stage"
end
