#!/usr/bin/env bash
# The tests of a GPU, part by part; each part is a process of its own, so that its memory is.
# With .wheels/ (scripts/gpu_bundle.sh) they run by the python3 that is there, else by .venv.
set -uo pipefail
cd "$(dirname "$0")/.."
if [ -d .wheels ]; then
    python=${PYTHON:-python3}
    site=$(mktemp -d)
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" .wheels/*.whl || exit
    export PYTHONPATH="$site:$PWD"
else
    python=.venv/bin/python
fi
export RLFLOW_TEST_DEVICE=${RLFLOW_TEST_DEVICE:-cuda:0} HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
export RLFLOW_GPU_RESULTS=${RLFLOW_GPU_RESULTS:-$PWD/build/gpu-results.json}
mkdir -p "$(dirname "$RLFLOW_GPU_RESULTS")"
failed=()
for part in ${PARTS:-compute attention decoding memory weights sharded runs throughput}; do
    echo "== $part"
    timeout --kill-after=10 "${SECONDS_A_PART:-590}" \
        "$python" -m pytest -p no:cacheprovider -rs "tests/gpu/test_$part.py" || failed+=("$part")
done
[ -f "$RLFLOW_GPU_RESULTS" ] && cat "$RLFLOW_GPU_RESULTS"
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}"; exit 1; }
