#!/usr/bin/env bash
# Records benches on a GPU that is lent for a while: some rows of a task at a time, as long as they fit into the time. Run it
# again for the rest; `kda publish` joins the parts. What was recorded goes to OUT/ledgers.tar.gz, from where
# `kda ledger merge TASK LEDGER` appends it.
#
#   diffusion/scripts/record_on_gpu.sh OUT SECONDS [TASK...]
#
# PYTHON: the interpreter, python3 if not set. ROWS: how many at a time, 8 if not set, for starting workers takes as long as
# two rows. No rows are begun where less time is left than the last ones took, and half of that again. FIRST_S: how much must
# be left for the first ones (180). A task is left where rows were wrong twice in a row. `kda warm` before it compiles
# everything side by side, where a run does it row by row.
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
    tar -czf "$out/ledgers.tar.gz" ./*/*/docs/ledger.jsonl # what is there now, should the time end
    failed=$((code == 0 ? 0 : failed + 1)) # rows that are wrong come again, with those that are still missing
  done
  [ ! -f "$out/$op.log" ] || tail -n 3 "$out/$op.log" | sed "s/^/$op: /"
done
echo "ended after $SECONDS s: $out"
