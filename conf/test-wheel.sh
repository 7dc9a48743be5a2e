#!/bin/sh
# Build the wheel and run the fast tests against it, where the source can't be imported by accident.
# Usage: conf/test-wheel.sh <python of the development environment>
set -eu
root=$(pwd)
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m build --quiet --wheel --outdir "$work/dist" "$root"
# The environment's packages are used, all but dbx_tf itself, which comes from the wheel.
"$python" -m pip install --quiet --no-deps --target "$work/site" "$work"/dist/*.whl
cp -r "$root/tests" "$root/conf" "$root/notebooks" "$root/README.md" "$root/Makefile" "$root/pyproject.toml" "$work/"
cd "$work"
PYTHONPATH="$work/site" "$python" -P -c "import dbx_tf, sys; sys.exit(not dbx_tf.__file__.startswith('$work'))"
PYTHONPATH="$work/site" "$python" -P -m pytest -m 'not slow' -p no:cacheprovider tests
