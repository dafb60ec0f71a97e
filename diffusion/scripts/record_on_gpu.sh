#!/usr/bin/env bash
# Records benches on a GPU that is available for a limited time: some rows of a task at a time, while they fit into the
# time. Run it again for the rest; `kda publish` joins the parts. The ledgers go to OUT/ledgers.tar.gz; `kda ledger
# merge TASK LEDGER` appends their runs to a checkout's ledger.
#
#   diffusion/scripts/record_on_gpu.sh OUT SECONDS [TASK...]
#
# PYTHON: the interpreter, python3 if not set. ROWS: rows at a time, 8 if not set, because starting workers takes as
# long as two rows. No rows begin if the time left is less than one and a half times that of the last rows. FIRST_S:
# seconds that must be left for the first rows (180). The script goes on to the next task after two failures in a row.
# Run `kda warm` first: it compiles everything in parallel, while a run compiles row by row.
set -euo pipefail
out=${1:?usage: record_on_gpu.sh OUT SECONDS [TASK...]}
limit=${2:?usage: record_on_gpu.sh OUT SECONDS [TASK...]}
shift 2
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$root"
PYTHONPATH=$(printf '%s:' "$root"/core/*/src)${PYTHONPATH:-}
export PYTHONPATH KDA_ROOT=$root
python=${PYTHON:-python3}
if [ $# -eq 0 ]; then
  for folder in diffusion/k*/ llm/l*/; do name=$(basename "$folder"); set -- "$@" "${name#*_}"; done
fi

lines() { { cat ./*/*/docs/ledger.jsonl 2>/dev/null || true; } | wc -l; }

took=$((${FIRST_S:-180} * 2 / 3))
for op in "$@"; do
  failed=0
  while [ "$failed" -lt 2 ]; do
    left=$((limit - SECONDS)) needed=$((took + took / 2))
    [ "$needed" -le "$left" ] || { echo "$op: no rows begun: $left s are left, they may take $needed s"; break; }
    begin=$SECONDS before=$(lines) code=0
    timeout -s INT -k 30 "$left" "$python" -m kda_tools bench "$op" --record --missing "${ROWS:-8}" \
      >>"$out/$op.log" 2>&1 || code=$?
    [ "$(lines)" -gt "$before" ] || break # nothing is missing, or nothing can be measured
    took=$((SECONDS - begin))
    echo "$op: rows in $took s, exit code $code"
    tar -czf "$out/ledgers.tar.gz" ./*/*/docs/ledger.jsonl # keep what is recorded so far, in case the time ends
    failed=$((code == 0 ? 0 : failed + 1)) # the next round repeats rows that failed, with those still missing
  done
  [ ! -f "$out/$op.log" ] || tail -n 3 "$out/$op.log" | sed "s/^/$op: /"
done
echo "ended after $SECONDS s: $out"
