#!/usr/bin/env bash
# The comparisons of a GPU, part by part; each is a process of its own, so that its memory is.
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/gpu_python.sh
device=${DEVICE:-cuda:0}
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# The others take what they are given on a CPU: `make bench` has them.
parts="vs_torch vs_generate vs_head"
[ "$device" = cpu ] || parts="$parts vs_sglang vs_trl"
failed=()
for part in ${PARTS:-$parts}; do
    echo "== $part"
    # Words after it, as --quick, are for all of them.
    timeout --kill-after=10 "${SECONDS_A_PART:-590}" \
        "$python" "benchmarks/$part.py" --device "$device" "$@" || failed+=("$part")
done
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}"; exit 1; }
