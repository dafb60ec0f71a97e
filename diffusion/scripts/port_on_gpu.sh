#!/usr/bin/env bash
# Ports every task to an SGLang tree on a machine with a GPU. First it runs the grid and SGLang's own tests, for a few
# tasks at a time. Then it times the ported arms, one task after another. The records go to OUT/ports.tar.gz. A task that
# has no place in the release is refused, as its log says.
#
#   diffusion/scripts/port_on_gpu.sh TREE OUT [TASK...]
#
# TREE: a checkout of SGLang, or an unpacked wheel of a pinned release. PYTHON: the interpreter, python3 if not set.
# TASK_S: a task's checks, or its times, end after so many seconds (200). CHECK_S: no row of a task's grid begins after
# so many seconds (60). TIMES_S: no task is timed after so many seconds (250).
set -euo pipefail
tree=${1:?usage: port_on_gpu.sh TREE OUT [TASK...]}
out=${2:?usage: port_on_gpu.sh TREE OUT [TASK...]}
shift 2
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
PYTHONPATH=$(printf '%s:' "$root"/core/*/src)${PYTHONPATH:-}
export PYTHONPATH KDA_ROOT=$root
python=${PYTHON:-python3}
mkdir -p "$out"
out=$(cd "$out" && pwd)
if [ $# -eq 0 ]; then
  for folder in diffusion/k*/ llm/l*/; do name=$(basename "$folder"); set -- "$@" "${name#*_}"; done
fi

# Options for the rows that are timed: the first and the last production row of each op.
rows() {
  "$python" - "$1" <<'PYTHON'
import sys
from kda_judge.contract.tasks import find_task

of = {}
for row in find_task(sys.argv[1]).workloads:
    if row.production:
        of.setdefault(row.op, []).append(row.id)
print(*dict.fromkeys(f"--rows={one}" for ids in of.values() for one in (ids[0], ids[-1])))
PYTHON
}

port() { op=$1; shift; timeout "${TASK_S:-200}" "$python" -m kda_tools port "$op" --sglang "$tree" --checks "$out/$op.json" --quick "$@"; }

for op in "$@"; do
  while [ "$(jobs -rp | wc -l)" -ge "${JOBS:-3}" ]; do wait -n || true; done
  port "$op" --limit-s "${CHECK_S:-60}" >"$out/$op.patch" 2>"$out/$op.log" &
done
wait || true
echo "checked after $SECONDS s"
for op in "$@"; do
  if [ "$SECONDS" -gt "${TIMES_S:-250}" ]; then
    echo "$op: not timed: $SECONDS s have passed" | tee -a "$out/$op.log"
  elif [ -f "$out/$op.json" ]; then
    # shellcheck disable=SC2046
    port "$op" --record $(rows "$op") >/dev/null 2>>"$out/$op.log" || echo "$op: exit code $?" >>"$out/$op.log"
  fi
  sed "s/^/$op: /" "$out/$op.log"
done
tar -czf "$out/ports.tar.gz" $(ls ./*/*/docs/ports.jsonl 2>/dev/null) -C "$out" $(cd "$out" && ls ./*.log ./*.json)
echo "ended after $SECONDS s: $out/ports.tar.gz"
