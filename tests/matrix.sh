#!/usr/bin/env bash
# Builds the wheel, installs it with all extras at one corner of what pyproject.toml allows, and runs the quick tests there.
# docs/install.md says which corners were run.
#
#   bash tests/matrix.sh oldest [TESTS AND OPTIONS]   Python 3.11, each direct requirement at its lowest version
#   bash tests/matrix.sh newest [TESTS AND OPTIONS]   the newest versions, on Python 3.14 or, if set, on $PYTHON
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case "${1:-}" in
    oldest) python=3.11 resolution=lowest-direct ;;
    newest) python="${PYTHON:-3.14}" resolution=highest ;;
    *) sed -n '2,6s/^# \?//p' "${BASH_SOURCE[0]}"; exit 2 ;;
esac
shift
if command -v uv >/dev/null && uv --version >/dev/null; then uv=(uv); else uv=(python3 -m uv); fi

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
"${uv[@]}" build --quiet --wheel --out-dir "$place"
wheel=("$place"/*.whl)
"${uv[@]}" venv --quiet --python "$python" "$place/environment"
# The corner is made from pyproject.toml, where the wheel's requirements are direct ones; the tests' own packages are the newest
# that fit.
"${uv[@]}" pip compile --quiet --python "$place/environment" --resolution "$resolution" --extra all --no-annotate \
    --no-header --output-file "$place/corner.txt" pyproject.toml
"${uv[@]}" pip install --quiet --python "$place/environment" --constraints "$place/corner.txt" --extra all --group dev \
    --requirements pyproject.toml
"${uv[@]}" pip install --quiet --python "$place/environment" --no-deps "${wheel[0]}"
grep -E '^(click|datasets|duckdb|huggingface-hub|numpy|pandas|pyarrow|timm|torch|torchvision)==' "$place/corner.txt"

# The clone's tests, on the wheel's package: the clone's own is left out, and the installed one stands in its place.
mkdir "$place/clone"
git ls-files -z -- ':!checkpoints_zoo' | tar --create --null --files-from=- | tar --extract --directory "$place/clone"
"$place/environment/bin/python" - "$place/clone/checkpoints_zoo" <<'PYTHON'
import pathlib, sys, sysconfig
pathlib.Path(sys.argv[1]).symlink_to(pathlib.Path(sysconfig.get_path("purelib"), "checkpoints_zoo"))
PYTHON
cd "$place/clone"
# Other versions warn of other things.
"$place/environment/bin/python" -m pytest --quiet -m "not slow" -n logical -o filterwarnings=default "${@:-tests}"
