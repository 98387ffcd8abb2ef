#!/bin/sh
# Tell what went wrong on a node, as far as it knows; it changes nothing, and each part is bounded.
#
# Arguments: mark, cluster, state directory ("" = ~/.vlaunch), Hugging Face home, lines and bytes of
# each log, how far back ("" = all), the parts, diagnosis_inside.sh as text, what starts docker. The
# mark begins the lines between parts.
#
# shellcheck disable=SC2016 # what is quoted is for the shell of a part
# shellcheck disable=SC2086,SC2012,SC2035 # names of servers, and ids, are words
# shellcheck disable=SC2329 # `part` calls `last` and `all`

mark=$1 cluster=$2 state=$3 hf=$4 lines=$5 bytes=$6 since=$7 parts=$8 inside=$9; shift 9
[ -n "$state" ] || state=$HOME/.vlaunch
part() {
  name=$1 cut=$2; shift 2
  printf '\n%s %s\n' "$mark" "$name"
  { echo; timeout -k 2 30 "$@" 2>&1 </dev/null; printf '\n%s rc %s\n' "$mark" "$?"; } | "$cut"
}
# The first line goes: it is empty, or what is left of one may be a part of a secret.
last() { tail -n "$((lines + 3))" | tail -c "$((bytes + 100))" | sed 1d; }
all() { sed 1d; }
wanted() { case " $parts " in *" $1 "*) return 0 ;; esac; return 1; }
kept() { part "$1" all head -c "$bytes" "$state/$cluster/server/$2"; }
part clock all date +%s
# A server's folder changes whenever a file in it is replaced: those that live come first.
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
