#!/bin/sh
# Take a cluster's lock and keep it until standard input ends.
#
# Arguments: state directory ("" = ~/.vlaunch), cluster, seconds to wait. Standard input: one line,
# what is said of the owner, without its opening brace.
#
# A command that has just ended, or somebody who looks, may hold the lock for a moment: that is
# waited for in any case. The folder's set-group-ID bit says that several logins share it. The empty
# lines are for sshd: only who sends something learns that the other side is not there any more.

s=$1 c=$2 w=$3
. ./lock_begin.sh

IFS= read -r me || exit 64
( umask 022; [ -d "$s" ] || mkdir -p "$s" ) || exit 73
if [ -g "$d" ]; then umask 007; else umask 077; fi
mkdir -p "$d" || exit 73
exec 9>>"$f" || exit 73
end=$(($(date +%s) + w)) tried=0 last=
while :; do
  take && break
  code=$?
  [ "$code" = 1 ] || exit 71
  tried=$((tried + 1))
  if [ "$tried" -ge 8 ]; then
    now=$(said "$f")
    [ "$now" = "$last" ] || printf "held %s\n" "$now"
    last=$now
    [ "$(date +%s)" -lt "$end" ] || exit 75
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
