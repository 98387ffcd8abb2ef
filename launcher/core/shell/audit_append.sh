#!/bin/sh
# Append a line to a node's audit trail, then run the command that it records.
#
# Arguments: state directory ("" = ~/.vlaunch), cluster, line, `strict` (run the command only if the
# line was written) or `lenient`; then the command.
#
# The set-group-ID bit of the directory means that several users share it. One rotated file of 1 MB
# remains.

s=$1 c=$2 line=$3 how=$4
shift 4
[ -n "$s" ] || s=$HOME/.vlaunch
d=$s/audit f=$s/audit/$c.ndjson
(
  umask 022
  [ -d "$s" ] || mkdir -p "$s" || exit
  if [ -g "$d" ]; then umask 007; else umask 077; fi
  mkdir -p "$d" || exit
  size=$(wc -c 2>/dev/null <"$f")
  [ "${size:-0}" -lt 1000000 ] || mv -f "$f" "$f.1"
  printf "%s\n" "$line" >>"$f"
) || [ "$how" = lenient ] || {
  echo "vlaunch: the audit line could not be written to $f" >&2
  exit 73
}
exec "$@"
