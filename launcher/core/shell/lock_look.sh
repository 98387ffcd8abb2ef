#!/bin/sh
# Print the state of a cluster's lock: `free`, or `held` and the owner's line.
#
# Arguments: state directory ("" = ~/.vlaunch), cluster.
#
# Acquires the lock for a moment to learn whether it is free; lock_hold.sh waits longer than that.

s=$1 c=$2
. ./lock_begin.sh

[ -e "$f" ] || { echo free; exit 0; }
exec 9>>"$f" || exit 77
take && { echo free; exit 0; }
[ "$?" = 1 ] || exit 71
printf "held %s\n" "$(said "$f")"
