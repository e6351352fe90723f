#!/usr/bin/env bash
# Make .venv-sglang: SGLang on a CPU-only x86-64 machine, from wheels alone (about 1.8 GB, 90 s).
# Usage: scripts/sglang_cpu.sh [DIRECTORY]. It does nothing where the directory is up to date.
# Some packages are installed without what they depend on: that is a CUDA torch, triton, flashinfer.
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${1:-.venv-sglang}
PYTHON=${PYTHON:-python3}
STAMP="$VENV/.ready"
RECIPE=$(find scripts/sglang_cpu scripts/sglang_cpu.sh -name '*.py' -o -name '*.sh' | LC_ALL=C sort |
  xargs sha256sum | sha256sum | cut -d' ' -f1)
if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$RECIPE" ]; then exit 0; fi

[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
PIP=("$VENV/bin/python" -m pip install --quiet --disable-pip-version-check)
"${PIP[@]}" torch==2.13.0 transformers==5.19.0 tokenizers==0.23.2 sentencepiece==0.2.1 \
  openai==2.8.0 apache-tvm-ffi==0.1.11 'uvicorn>=0.51' \
  aiohttp cffi dill distro einops fastapi gguf ipython jsonschema loguru msgspec numpy orjson \
  partial_json_parser pillow prometheus-client psutil pybase64 pydantic python-multipart pyzmq \
  requests safetensors scipy setproctitle tiktoken uvloop watchfiles zstandard
"${PIP[@]}" --no-deps sglang==0.5.23 xgrammar==0.2.7 compressed-tensors==0.18.0 \
  soundfile==0.13.1 openai-harmony==0.0.4
# The wheel of torchvision is built for CUDA: beside a CPU torch it breaks transformers, so that
# it lies outside site-packages, where only an engine on a CPU sees it; beside it lie stand-ins for
# what SGLang imports and no wheel has for a CPU.
rm -rf "$VENV/cpu"
"${PIP[@]}" --no-deps --target "$VENV/cpu" torchvision==0.28.0
cp -r scripts/sglang_cpu/. "$VENV/cpu"
printf '%s\n' "$RECIPE" > "$STAMP"
