#!/usr/bin/env bash
# The tests of a GPU, part by part; each part is a process of its own, so that its memory is.
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/gpu_python.sh
export RLFLOW_TEST_DEVICE=${RLFLOW_TEST_DEVICE:-cuda:0} HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
export RLFLOW_GPU_RESULTS=${RLFLOW_GPU_RESULTS:-$PWD/build/gpu-results.json}
mkdir -p "$(dirname "$RLFLOW_GPU_RESULTS")"
parts="compute attention decoding memory weights sharded runs throughput"
# A bundle has Ray or SGLang; what is installed may have both.
[ -z "${RLFLOW_TEST_ENGINE:-}" ] || parts=""
if [ -n "${RLFLOW_SGLANG_PYTHON:-}" ] || "$python" -c "import importlib.util as u, sys; sys.exit(not u.find_spec('sglang'))"; then
    parts="$parts sglang"
fi
failed=()
for part in ${PARTS:-$parts}; do
    echo "== $part"
    timeout --kill-after=10 "${SECONDS_A_PART:-590}" \
        "$python" -m pytest -p no:cacheprovider -rs "tests/gpu/test_$part.py" || failed+=("$part")
done
[ -f "$RLFLOW_GPU_RESULTS" ] && cat "$RLFLOW_GPU_RESULTS"
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}"; exit 1; }
