#!/usr/bin/env bash
# Wheels for a machine with a GPU, torch and transformers, and without internet: .wheels/, some 50 MB.
# `make test-gpu` there finds them. PYTHON_VERSION is that machine's.
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
for name in pydantic pydantic-core annotated-types typing-inspection tensordict pyvers graphviz pygraphviz ray; do
    wanted=$(pinned "$name")
    "${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
        --python-version "$version" --implementation cp "${platforms[@]}" \
        --platform manylinux2014_x86_64 -d .wheels "$wanted"
done
# Ray without what a run never loads: half of it.
"${PYTHON:-python3}" - <<'PY'
import zipfile
from pathlib import Path

LEFT_OUT = ("ray/jars/", "ray/rllib/", "ray/tune/", "ray/serve/", "ray/dashboard/client/", "ray/data/")
(wheel,) = Path(".wheels").glob("ray-*.whl")
slim = wheel.with_suffix(".slim")
with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(slim, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as made:
    for entry in whole.infolist():
        if not entry.filename.startswith(LEFT_OUT):
            made.writestr(entry, whole.read(entry))
slim.replace(wheel)
PY
du -sh .wheels
