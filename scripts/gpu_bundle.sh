#!/usr/bin/env bash
# Wheels for a machine with a GPU, torch 2.11, and no internet: .wheels/, under 60 MB.
# `make test-gpu` and `make bench-gpu` there find them. PYTHON_VERSION is that machine's.
# Usage: scripts/gpu_bundle.sh          with Ray: all parts but SGLang's (some 50 MB)
#        scripts/gpu_bundle.sh sglang   with SGLang instead of Ray (some 46 MB): PARTS=sglang
set -euo pipefail
cd "$(dirname "$0")/.."
version=${PYTHON_VERSION:-3.12}
rm -rf .wheels
mkdir -p .wheels
platforms=()
for minor in 5 12 14 17 24 26 27 28 31 34; do
    platforms+=(--platform "manylinux_2_${minor}_x86_64")
done
# A name's - is a _ in some of the lines.
pinned() { grep -ixE "${1//-/[-_]}==[^ ]+" constraints.txt || { echo "constraints.txt names no version of $1" >&2; exit 2; }; }
fetch() {
    "${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
        --python-version "$version" --implementation cp --abi "cp${version/./}" --abi abi3 --abi none \
        "${platforms[@]}" --platform manylinux2014_x86_64 -d .wheels "$@"
}
# What the wheels have but for files that begin so, packed by LZMA, which pip reads, too.
pack() {
    "${PYTHON:-python3}" - "$@" <<'PY'
import sys
import zipfile
from pathlib import Path

for wheel in Path(".wheels").glob("*.whl"):
    packed = wheel.with_suffix(".packed")
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(packed, "w", zipfile.ZIP_LZMA) as made:
        for name in whole.namelist():
            if not name.startswith(tuple(sys.argv[1:])):
                made.writestr(name, whole.read(name))
    packed.replace(wheel)
PY
}
names=(pydantic pydantic-core annotated-types typing-inspection tensordict pyvers graphviz)
[ "${1:-}" = sglang ] || names+=(pygraphviz ray)
wanted=()
for name in "${names[@]}"; do wanted+=("$(pinned "$name")"); done
fetch "${wanted[@]}"
if [ "${1:-}" = sglang ]; then
    # The last SGLang for torch 2.11 whose wheel is small, with the transformers that it works with.
    # What it imports besides and never asks has stand-ins in scripts/sglang_gpu.
    fetch sglang==0.5.16 sglang-kernel==0.4.5 torch-memory-saver==0.0.10 \
        transformers==5.12.1 tokenizers==0.22.2 apache-tvm-ffi==0.1.11 compressed-tensors==0.18.0 \
        loguru==0.7.3 gguf==0.19.0 msgspec==0.22.0 openai==2.8.0 jiter distro==1.9.0 sniffio==1.3.1 \
        orjson==3.13.0 partial-json-parser==0.2.1.1.post7 pybase64==1.5.1 python-multipart==0.0.34 \
        pyzmq==27.3.0 setproctitle==1.3.8 soundfile==0.13.1 cffi==2.1.1 pycparser dill==0.4.1 \
        fastapi==0.165.0 starlette==1.10.0 uvicorn==0.54.0 watchfiles==1.3.0 zstandard==0.25.0
    # Kernels of Hopper alone; attention is Triton's, so that FlashAttention 3 (1.1 GB) is not asked.
    pack sgl_kernel/flash_ops sgl_kernel/infllm_ops sgl_kernel/flashmla_ops sgl_kernel/sm100/ \
        sglang/multimodal_gen/ sglang/srt/multimodal/_core sglang/srt/grpc/_core
else
    # Without what a run never loads.
    pack ray/jars/ ray/rllib/ ray/tune/ ray/serve/ ray/dashboard/client/ ray/data/
fi
du -sh .wheels
