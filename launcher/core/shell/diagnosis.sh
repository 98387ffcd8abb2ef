#!/bin/sh
# Print a node's logs and records for `vlaunch doctor`. Changes nothing; every part has a timeout.
#
# Arguments: mark, cluster, state directory ("" = ~/.vlaunch), Hugging Face home, maximum lines and
# bytes per log, oldest time for `docker logs --since` ("" = all), parts, text of
# diagnosis_inside.sh, docker command. The mark starts the lines between the parts.
#
# shellcheck disable=SC2016 # the quoted code runs in a part's own shell
# shellcheck disable=SC2086,SC2012,SC2035 # server names and ids contain no blanks
# shellcheck disable=SC2329 # `part` calls `last` and `all`

mark=$1 cluster=$2 state=$3 hf=$4 lines=$5 bytes=$6 since=$7 parts=$8 inside=$9; shift 9
. ./state_folder.sh
part() {
  name=$1 cut=$2; shift 2
  printf '\n%s %s\n' "$mark" "$name"
  { echo; timeout -k 2 30 "$@" 2>&1 </dev/null; printf '\n%s rc %s\n' "$mark" "$?"; } | "$cut"
}
# Omit the first line: it is empty, or the rest of a line that may hold part of a secret.
last() { tail -n "$((lines + 3))" | tail -c "$((bytes + 100))" | sed 1d; }
all() { sed 1d; }
wanted() { case " $parts " in *" $1 "*) return 0 ;; esac; return 1; }
kept() { part "$1" all head -c "$bytes" "$state/$cluster/server/$2"; }
part clock all date +%s
# Replacing a file updates the time of a server's directory: running servers come first.
names=$(cd "$state/$cluster/server" 2>/dev/null && ls -dt */ 2>/dev/null | sed 's#/$##' | head -n 5)
part servers all printf '%s\n' $names
n=0
for of in $names; do
  n=$((n + 1))
  if wanted record; then
    for each in desired observed history; do kept "$each-$n" "$of/$each.json"; done
  fi
  log=$state/$cluster/server/$of/engine.log
  ! wanted engines || part "engine-$n" last sh -c 'cat "$1.1" "$1" 2>/dev/null; :' engine "$log"
  # The newest files of vLLM's watchdog, oldest first.
  ! wanted stacks || part "stacks-$n" last sh -c 'cd "$1" 2>/dev/null || exit 0
    for file in $(ls -tr VLLM_STACK_DUMP_for_*.log 2>/dev/null | tail -n 6); do
      echo "==> $file"; tail -c 30000 "$file"
    done' stacks "$state/$cluster/server/$of"
done
! wanted models || part models last sh -c "$(cat ./models_unfinished.sh)" models "$hf"
! wanted kernel || part kernel last sh -c "$(cat ./diagnosis_kernel.sh)"
ours=label=vlaunch.cluster=$cluster
part ids all "$@" ps --all --quiet --no-trunc --filter "$ours"
ids=$(timeout -k 2 30 "$@" ps --all --quiet --no-trunc --filter "$ours" 2>/dev/null </dev/null |
  head -n 4)
[ -n "$ids" ] || exit 0
form='{"name":{{json .Name}},"role":{{json (index .Config.Labels "vlaunch.role")}}'
form=$form',"state":{{json .State}},"restarts":{{.RestartCount}}}'
part state all "$@" inspect --type container --format "$form" $ids
! wanted inspect || part inspect all "$@" inspect --type container $ids
n=0
for id in $ids; do
  n=$((n + 1))
  ! wanted logs || part "log-$n" last \
    "$@" logs --timestamps --tail "$lines" ${since:+--since=$since} "$id"
done
wanted inside || exit 0
for id in $ids; do
  running=$(timeout -k 2 30 "$@" inspect --format '{{.State.Running}}' "$id" 2>/dev/null </dev/null)
  [ "$running" = true ] || continue
  timeout -k 2 60 "$@" exec "$id" timeout 50 sh -c "$inside" inside "$mark" "$lines" "$bytes" \
    2>/dev/null </dev/null
done
exit 0
