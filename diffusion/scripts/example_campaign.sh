#!/usr/bin/env bash
# Records a short campaign on qknorm_rope by a scripted agent, about four minutes on an H200; without a GPU it verifies.
#
#   diffusion/scripts/example_campaign.sh OUT [REPOSITORY]
#
# REPOSITORY: the repository to clone for the campaign; this checkout if not given. For a machine that has only a copy
# of the files, make one with `git clone --bare --depth 1 file://CHECKOUT FOLDER`. PYTHON: the interpreter, python3 if
# not set. BUDGET_S: no iteration begins after so many seconds (190). This checkout is not changed. Afterwards:
#
#   cp OUT/iterations.jsonl diffusion/k03_qknorm_rope/docs/
#   git fetch OUT/campaign.bundle 'refs/heads/campaign/*:refs/heads/campaign/*'     # its commits and the best version
#   kda publish                                                                     # the page, the plot
set -euo pipefail
out=${1:?usage: example_campaign.sh OUT [REPOSITORY]}
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
repository=${2:-$root}
python=${PYTHON:-python3}
name=k03_h200_qknorm_rope
task=diffusion/k03_qknorm_rope
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

git clone -q "$repository" "$work/checkout"
cd "$work/checkout"
base=$(git rev-parse HEAD)
cat >$task/campaign.toml <<'RULES'
tries = 8
hours = 1.0
stall = 4
RULES
git switch -q -c example
git add $task/campaign.toml
git -c user.name="kda campaign" -c user.email=campaign@kda.invalid commit -q -m "Rules of the example's campaign"

# If set, these variables would name another checkout.
unset KDA_ROOT KDA_GIT_COMMIT KDA_GIT_DIRTY KDA_NO_CLAUDE
PYTHONPATH=$(printf '%s:' "$PWD"/core/*/src)${PYTHONPATH:-}
export PYTHONPATH PYTHONDONTWRITEBYTECODE=1 KDA_WORKTREES=$work/trees KDA_CACHE=${KDA_CACHE:-$root/.cache/upstream}
"$python" -m kda_tools campaign launch qknorm_rope --target h200 --agent command \
  --command "$python $PWD/diffusion/scripts/scripted_agent.py" 2>&1 | tee "$out/campaign.log"
cp "$work/trees/$name/$task/docs/iterations.jsonl" "$out/"
git bundle create -q "$out/campaign.bundle" "campaign/$name/work" "campaign/$name/best" "^$base"
echo "ended after $SECONDS s: iterations.jsonl, campaign.bundle and campaign.log are in $out"
