#!/bin/sh
# Create a cluster's directories, after a check that other users cannot change them.
#
# Arguments: the cluster's directory; the other directories that its containers write to.
#
# The SSH user creates `server` and the compile cache, to be able to remove them: Docker would create
# them as root. Engine logs contain prompts, so `server` is private; a set-group-ID directory has
# been shared with a group (hand_over.sh).
#
# Directories that other users could change are refused before anything is written: those of another
# owner, world-writable ones, and links. The parent directory may be a link of the SSH user, or
# sticky like /tmp. A network file system may map the SSH user to another one, such as root to
# nobody: the owner of a new file tells which.
#
# shellcheck disable=SC2086 # $own has several words

d=$1; shift
in=${d%/*}
umask 022
mkdir -p "$in" || exit
new=$in/.owner.$(uname -n).$$
me=$(set -C; exec 2>/dev/null 9>"$new" && stat -L -c %u /dev/fd/9 && rm "$new")
own="( -user 0 -o -user $(id -u) -o -user ${me:-0} )"
bad=$(
  find "$in" "$in/." -maxdepth 0 ! "(" $own "(" -type l -o ! -perm -2 -o -perm -1000 ")" ")" \
    -exec ls -ld {} +
  find "$d" "$d/payload" "$d/secrets" "$d/server" "$@" -maxdepth 0 \
    ! "(" $own -type d ! -perm -2 ")" -exec ls -ld {} + 2>/dev/null
)
[ -z "$bad" ] || {
  echo "$bad: another user could change what is kept there: correct it, or set another state_dir" \
    "or cache_dir" >&2
  exit 1
}
mkdir -p "$d/server" "$@" && chmod 711 "$d" || exit
[ -g "$d/server" ] || chmod 700 "$d/server" || :
