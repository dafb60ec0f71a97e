#!/usr/bin/env bash
# Brings a checkout of AKO4ALL to exactly upstream's state, and refuses if that would lose something.
#
#   diffusion/scripts/ensure_ako4all_clean.sh [base-dir]
#
# The checkout is base-dir/AKO4ALL; the default base-dir is the folder above this repository. The script clones a
# missing checkout and fast-forwards an old one. It refuses a folder that is no checkout, a dirty tree, an unfinished
# merge or rebase, a branch other than upstream's default, commits that upstream lacks, and a remote `upstream` with
# another address. The last line on standard output is the checkout's path.
#
#   AKO4ALL_UPSTREAM_URL  whose state is wanted   (https://github.com/TongmingLAIC/AKO4ALL.git)
#   AKO4ALL_URL           where to clone from     (the same; a fork of yours, for example)
#   AKO4ALL_BRANCH        the branch              (upstream's default)
set -euo pipefail
export GIT_TERMINAL_PROMPT=0

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
upstream_url=${AKO4ALL_UPSTREAM_URL:-https://github.com/TongmingLAIC/AKO4ALL.git}
clone_url=${AKO4ALL_URL:-$upstream_url}

refuse() {
    printf 'ensure_ako4all_clean: %s\n' "$1" >&2
    printf '  %s\n' "$2" >&2
    exit 1
}

base=${1:-$here/../../..}
[ -d "$base" ] || refuse "$base: no such folder" "make it, or name another one"
base=$(cd "$base" && pwd)
tree=$base/AKO4ALL
in_tree() { git -C "$tree" "$@"; }

if [ ! -e "$tree" ]; then
    git clone --quiet "$clone_url" "$tree" >&2 || refuse "$clone_url: cannot be cloned" "check the address and the network"
fi
top=$(git -C "$tree" rev-parse --show-toplevel 2>/dev/null || true)
[ -n "$top" ] && [ "$(cd "$top" && pwd -P)" = "$(cd "$tree" && pwd -P)" ] ||
    refuse "$tree: is there, and is no git checkout of its own" "move it away"

if remote=$(in_tree remote get-url upstream 2>/dev/null); then
    [ "$remote" = "$upstream_url" ] ||
        refuse "$tree: its remote upstream is $remote, expected $upstream_url" \
            "git -C $tree remote set-url upstream $upstream_url, or set AKO4ALL_UPSTREAM_URL"
else
    in_tree remote add upstream "$upstream_url"
fi
in_tree fetch --quiet --prune upstream >&2 || refuse "$upstream_url: cannot be fetched" "check the address and the network"

branch=${AKO4ALL_BRANCH:-$(in_tree ls-remote --symref upstream HEAD | sed -n 's,^ref: refs/heads/\(.*\)[[:space:]]HEAD$,\1,p')}
[ -n "$branch" ] || refuse "$upstream_url: names no default branch" "set AKO4ALL_BRANCH"
in_tree rev-parse --quiet --verify "refs/remotes/upstream/$branch^{commit}" >/dev/null ||
    refuse "$upstream_url: has no branch $branch" "set AKO4ALL_BRANCH to one that it has"

git_dir=$(cd "$tree" && cd "$(git rev-parse --git-dir)" && pwd)
for unfinished in MERGE_HEAD CHERRY_PICK_HEAD REVERT_HEAD rebase-merge rebase-apply BISECT_LOG; do
    [ ! -e "$git_dir/$unfinished" ] ||
        refuse "$tree: something is unfinished there ($unfinished)" "finish it or abort it: git -C $tree status"
done
current=$(in_tree symbolic-ref --quiet --short HEAD || true)
[ "$current" = "$branch" ] ||
    refuse "$tree: is on ${current:-no branch (detached HEAD)}, expected $branch" "git -C $tree switch $branch"
changes=$(in_tree status --porcelain --untracked-files=all)
[ -z "$changes" ] ||
    refuse "$tree: has changes:"$'\n'"$(printf '%s\n' "$changes" | sed 5q)" "commit them on a branch of yours, or git -C $tree stash -u"

theirs=refs/remotes/upstream/$branch
ahead=$(in_tree rev-list --count "$theirs..HEAD")
behind=$(in_tree rev-list --count "HEAD..$theirs")
if [ "$ahead" -gt 0 ]; then
    what="is $ahead commits ahead of upstream/$branch"
    [ "$behind" -eq 0 ] || what="has diverged from upstream/$branch: $ahead commits of its own, $behind of upstream's"
    refuse "$tree: $what" "keep them on a branch: git -C $tree branch mine, then git -C $tree reset --hard upstream/$branch"
fi
if [ "$behind" -gt 0 ]; then
    in_tree merge --quiet --ff-only "$theirs" >&2 || refuse "$tree: cannot be fast-forwarded" "git -C $tree status"
fi

[ "$(in_tree rev-parse HEAD)" = "$(in_tree rev-parse "$theirs")" ] && [ -z "$(in_tree status --porcelain)" ] ||
    refuse "$tree: is not at upstream/$branch" "git -C $tree status"
printf 'AKO4ALL is at %s of upstream/%s\n' "$(in_tree rev-parse --short HEAD)" "$branch" >&2
printf '%s\n' "$tree"
