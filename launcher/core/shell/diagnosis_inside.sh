#!/bin/sh
# Print, inside a container, the newest logs of Ray jobs (one per batch job), of Ray's workers
# (vLLM's ranks), of Ray itself, and NCCL's warnings.
#
# Arguments: mark, maximum lines and bytes per log.
#
# shellcheck disable=SC2012 # Ray names these files

mark=$1 lines=$2 bytes=$3
# As in diagnosis.sh.
last() { tail -c "$1" | sed 1d; }
show() {
  printf '\n%s %s\n' "$mark" "$1"
  { echo; tail -n "$3" "$2" 2>&1; } | last "$4"
  printf '\n%s rc 0\n' "$mark"
}
printf '\n%s zone\n' "$mark"; date +%z; printf '\n%s rc 0\n' "$mark"
n=0
# Log names end in the number of the run; print the last run of each job.
for file in $(ls -t /tmp/ray/session_2*/logs/job-driver-*.log 2>/dev/null |
  awk '{ job = $0; sub(/.*job-driver-/, "", job); sub(/-[0-9]+\.log$/, "", job) } !n[job]++' |
  head -n 3); do
  n=$((n + 1)); show "driver-$n" "$file" "$lines" "$bytes"
done
n=0
for file in $(ls -t /tmp/ray/session_2*/logs/worker-*.err /tmp/ray/session_2*/logs/worker-*.out \
  2>/dev/null | head -n 12); do
  n=$((n + 1)); [ ! -s "$file" ] || show "worker-$n" "$file" 300 60000
done
n=0
for file in /tmp/ray/session_latest/logs/raylet.err /tmp/ray/session_latest/logs/raylet.out \
  /tmp/ray/session_latest/logs/gcs_server.out; do
  n=$((n + 1)); [ ! -s "$file" ] || show "ray-$n" "$file" 300 60000
done
printf '\n%s nccl\n' "$mark"
{ echo; cat /tmp/vlaunch-nccl.*.log 2>/dev/null |
  grep -aE 'WARN|No device found|, retrying|undefined symbol' | tail -n 200; } | last 60000
printf '\n%s rc 0\n' "$mark"
