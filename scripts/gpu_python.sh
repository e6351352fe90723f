# Sourced: `python` is the one that runs on a machine with a GPU.
# With .wheels/ (scripts/gpu_bundle.sh) it is the python3 that is there, else that of .venv.
if [ -d .wheels ]; then
    python=${PYTHON:-python3}
    site=$(mktemp -d)
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" .wheels/*.whl || exit
    export PYTHONPATH="$site:$PWD"
else
    python=.venv/bin/python
    export PYTHONPATH="$PWD"
fi
