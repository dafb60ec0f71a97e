#!/usr/bin/env bash
# The launcher that every script in */scripts/launch_kernels/ calls: it finds kda and runs `kda campaign launch`.
#   launch_kernel.sh TASK TARGET [options of kda campaign launch]
# It runs in any Bash; `kda campaign launch` refuses a Bash older than 4 and says what to do.
set -eu
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"
task="$1" target="$2"
shift 2
cd -- "$root"
for kda in "$root"/.nox/shared/*/bin/kda "$(command -v kda || true)"; do
  if [ -x "$kda" ]; then
    exec "$kda" campaign launch "$task" --target "$target" "$@"
  fi
done
echo "launch_kernel.sh: no kda here: run 'nox -s doctor' once in $root, or put kda on PATH" >&2
exit 3
