#!/bin/sh
# Print the last lines of a node's audit trail, the newest last.
#
# Arguments: state directory ("" = ~/.vlaunch), cluster, number of lines (as for `tail -n`).

s=$1 c=$2 count=$3
[ -n "$s" ] || s=$HOME/.vlaunch
f=$s/audit/$c.ndjson
for each in "$s/audit" "$f.1" "$f"; do
  [ ! -e "$each" ] || [ -r "$each" ] || { echo "$each is not readable by this user" >&2; exit 77; }
done
cat "$f.1" "$f" 2>/dev/null | tail -n "$count"
exit 0
