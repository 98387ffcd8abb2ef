#!/bin/sh
# Acquire a cluster's lock and hold it until standard input ends.
#
# Arguments: state directory ("" = ~/.vlaunch), cluster, seconds to wait. Standard input: one line,
# the owner's record without its opening brace.
#
# A command that is exiting, or lock_look.sh, may hold the lock for a moment: always wait for that.
# The set-group-ID bit of the directory means that several users share it. The empty lines are for
# sshd: a connection must send data to learn that its peer is gone.

s=$1 c=$2 w=$3
. ./lock_begin.sh

IFS= read -r me || exit 64
( umask 022; [ -d "$s" ] || mkdir -p "$s" ) || exit 73
if [ -g "$d" ]; then umask 007; else umask 077; fi
mkdir -p "$d" || exit 73
exec 9>>"$f" || exit 73
read -r up _ </proc/uptime # `date` may be set
end=$((${up%.*} + w)) tried=0 last=
while :; do
  take && break
  code=$?
  [ "$code" = 1 ] || exit 71
  tried=$((tried + 1))
  if [ "$tried" -ge 8 ]; then
    now=$(said "$f")
    [ "$now" = "$last" ] || printf "held %s\n" "$now"
    last=$now
    read -r up _ </proc/uptime
    [ "${up%.*}" -lt "$end" ] || exit 75
  fi
  sleep 0.2
done
printf "{\"pid\": %s, \"since\": \"%s\", %s\n" \
  "$$" "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$me" >"$f" 2>/dev/null
rm -f "$f.broken"
broken() {
  kill "$reader" "$beat" 2>/dev/null
  [ ! -e "$f.broken" ] || printf "broken %s\n" "$(said "$f.broken")"
  exit 143
}
exec 3<&0
cat <&3 >/dev/null 9>&- &
reader=$!
( while sleep 5 >/dev/null 2>&1; do echo; done ) 9>&- 3<&- &
beat=$!
trap broken TERM
echo locked
wait "$reader"
kill "$beat" 2>/dev/null
