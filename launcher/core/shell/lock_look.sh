#!/bin/sh
# Say who holds a cluster's lock: `free`, or `held` and the owner's line.
#
# Arguments: state directory ("" = ~/.vlaunch), cluster.
#
# It is taken for a moment to see whether it is free; lock_hold.sh is patient enough for that.

s=$1 c=$2
. ./lock_begin.sh

[ -e "$f" ] || { echo free; exit 0; }
exec 9>>"$f" || exit 77
take && { echo free; exit 0; }
[ "$?" = 1 ] || exit 71
printf "held %s\n" "$(said "$f")"
