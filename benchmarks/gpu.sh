#!/usr/bin/env bash
# All parts of benchmarks/gpu.py on one GPU, within ten minutes, the most telling first; then the tests for a GPU.
#
# Run where a GPU is at hand: uv run bash benchmarks/gpu.sh. Each part is a process of its own with its own limit.
# Results are under $OUT (default: out/gpu): gpu.jsonl has a line a measurement, PART.log what a part printed. The last
# line is one JSON object with the figures of all parts.
# Where there is no network, put the package's wheel (uv build --wheel -o .whl) and what else is missing into .whl.
# With arguments (--device cpu --tiny) every part gets them.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
export PYTHONUNBUFFERED=1 OUT=${OUT:-out/gpu}
mkdir -p "$OUT"
rm -f "$OUT/gpu.jsonl"
python=${PYTHON:-python3}
if compgen -G ".whl/*.whl" >/dev/null; then
    site=$(mktemp -d)
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" .whl/*.whl || exit 1
    export PYTHONPATH=$site
fi

run() {
    local limit=$1 name=$2 started=$SECONDS
    shift 2
    timeout -k 5 "$limit" "$@" >"$OUT/$name.log" 2>&1
    echo "$name: exit status $?, $((SECONDS - started)) s"
}
part() {
    local limit=$1 name=$2
    [[ " ${*} " != *" --tiny "* ]] || limit=600 # Small numbers run on any machine, however slow it is.
    shift 2
    run "$limit" "$name" "$python" benchmarks/gpu.py "$name" --seconds $((limit - 15)) "$@"
}
part 30 facts "$@"
part 120 engine "$@"
part 120 step "$@"
part 50 load "$@"
part 45 exact "$@"
part 45 conv "$@"
if [[ " $* " != *" --tiny "* ]]; then
    run 150 tests "$python" -m pytest tests/gpu --noconftest -o addopts= -o filterwarnings=default -q -p no:cacheprovider
fi
"$python" - "$OUT/gpu.jsonl" <<'END'
import json, sys

rows = [json.loads(line) for line in open(sys.argv[1])]
figures = {key: value for row in rows if row["what"] == "figures" for key, value in row.items()}
failed = [f"{row['part']}: {row['what']}" for row in rows if "failed" in row]
print(json.dumps({k: v for k, v in figures.items() if k not in ("part", "at", "what")} | {"failed": failed}))
END
