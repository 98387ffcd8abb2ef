#!/bin/sh
# Append a line to a node's audit trail, then become the command that it tells of.
#
# Arguments: state directory ("" = ~/.vlaunch), cluster, the line, `strict` (no line, no command)
# or `lenient`; then the command.
#
# The folder's own set-group-ID bit says that several logins share it. One old file of a megabyte
# is kept.

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
