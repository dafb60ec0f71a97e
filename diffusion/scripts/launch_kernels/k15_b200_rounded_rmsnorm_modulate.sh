#!/usr/bin/env bash
# Launch an agent on rounded_rmsnorm_modulate for b200. Written by `kda publish`; docs/campaigns.md says what it does and reads.
exec "${KDA_BASH_BIN:-bash}" "$(dirname -- "${BASH_SOURCE[0]}")/../../../core/tools/launch_kernel.sh" rounded_rmsnorm_modulate b200 "$@"
