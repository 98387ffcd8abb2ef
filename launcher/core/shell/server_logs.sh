#!/bin/sh
# Print, inside a container, the end of every server's log with the server's name before each line,
# and of the newest logs of batch jobs: drivers as `batch:NAME`, engines as `batch:NAME:PID`.
#
# Arguments: a server or its group ("" = all servers and batch jobs), number of lines, `-F` (follow) or `-q`.
#
# shellcheck disable=SC2011,SC2012 # Ray names these files

lines=$2 how=$3
show() { tail -n "$lines" "$how" "$2" | sed -u "s|^|$1 |" & }
cd "${VLAUNCH_STATE:-/var/lib/vlaunch}" 2>/dev/null && for log in */engine.log; do
  name=${log%/*}
  case ${1:-$name} in "$name" | "${name%%.*}") [ ! -f "$log" ] || show "$name" "$log" ;; esac
done
if [ -z "$1" ] && cd "${VLAUNCH_RAY_LOGS:-/tmp/ray/session_latest/logs}" 2>/dev/null; then
  for log in $(ls -t job-driver-batch-*.log 2>/dev/null | head -n 3); do
    name=${log#job-driver-batch-}
    show "batch:${name%-*.log}" "$log"
  done
  mark='vlaunch: an engine of batch job '
  for log in $(ls -t worker-*.out 2>/dev/null | xargs -r grep -l "^$mark" | head -n 8); do
    pid=${log##*-}
    show "batch:$(sed -n "s|^$mark||p" "$log" | tail -n 1):${pid%.out}" "$log"
  done
fi
wait
