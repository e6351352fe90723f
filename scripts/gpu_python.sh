# Sourced: `python` is the one that runs on a machine with a GPU.
# With .wheels/ (scripts/gpu_bundle.sh) it is one of its own that also has what python3 there has,
# else that of .venv. Engines are started with it, too.
export PYTHONPATH="$PWD"
if [ -d .wheels ]; then
    own=$(mktemp -d)
    theirs=${PYTHON:-python3}
    "$theirs" -m venv --without-pip "$own" || exit
    python=$own/bin/python
    site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    "$theirs" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" .wheels/*.whl || exit
    # Behind these: where that python finds torch, be it an environment itself.
    "$theirs" -c 'import sys; print(*filter(lambda p: p.endswith("-packages"), sys.path), sep="\n")' > "$site/theirs.pth"
    if compgen -G '.wheels/sglang-*.whl' > /dev/null; then
        cp -r scripts/sglang_gpu/. "$site"
        export SGLANG_IS_FLASHINFER_AVAILABLE=false
        # What these wheels lack: kernels of other attention, grammars.
        export RLFLOW_TEST_ENGINE='{"attention_backend": "triton", "args": {"sampling_backend": "pytorch", "grammar_backend": "none"}}'
    fi
else
    python=.venv/bin/python
fi
