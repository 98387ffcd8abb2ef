#!/bin/sh
# Terminate the process that holds a cluster's lock.
#
# Arguments: state directory ("" = ~/.vlaunch), cluster, PID of the holder, its recorded line.
# Standard input: one line about who breaks the lock.
#
# Terminates a process only if /proc shows that it has the file open; for another user's process,
# /proc does not show it. A waiting command may acquire the lock first: the recorded line differs
# then.

s=$1 c=$2 p=$3 was=$4
. ./lock_begin.sh

IFS= read -r me || exit 64
[ "$p" -gt 1 ] || exit 64
[ -e "$f" ] || { echo free; exit 0; }
exec 9>>"$f" || exit 77
take && { echo free; exit 0; }
[ "$(said "$f")" = "$was" ] || { echo changed; exit 0; }
if [ -r "/proc/$p/fd" ] && ! [ "/proc/$p/fd/9" -ef "$f" ]; then echo stranger; exit 0; fi
umask 077
[ ! -g "$d" ] || umask 007
printf "%s\n" "$me" >"$f.broken"
kill -TERM "$p" || { rm -f "$f.broken"; exit 77; }
tried=0
while ! take; do
  [ "$(said "$f")" = "$was" ] || break
  tried=$((tried + 1))
  [ "$tried" != 25 ] || kill -KILL "$p"
  [ "$tried" -lt 50 ] || exit 1
  sleep 0.2
done
echo freed
