"""One question to a node about what went wrong: its containers, servers, their logs, its kernel,
and what the keeper says.

The script only reads, and every part of it is bounded: a node may have gigabytes of logs, and what
reads them may hang. Parts stand between lines that begin with a mark that is new for each question,
so that no log can pretend to be another part.
"""

from __future__ import annotations

from launcher.model import Argv
from launcher.tools.docker import CLUSTER, ROLE

# What can be asked for, in the order in which it is answered.
STATE, RECORD, KERNEL, INSPECT, LOGS, INSIDE = (
    "state",
    "record",
    "kernel",
    "inspect",
    "logs",
    "inside",
)
ENGINES = "engines"
DIAGNOSIS = (STATE, RECORD, KERNEL, ENGINES, LOGS, INSIDE)

# In a container: the newest logs of Ray jobs (batch jobs: Ray keeps one for each), of Ray's
# workers, which vLLM's ranks are, of Ray itself, and what NCCL warns of. Arguments: mark, lines and
# bytes of each log.
_INSIDE = r"""
mark=$1 lines=$2 bytes=$3
show() {
  printf '\n%s %s\n' "$mark" "$1"; tail -n "$3" "$2" 2>&1 | tail -c "$4"; printf '\n%s rc 0\n' "$mark"
}
printf '\n%s zone\n' "$mark"; date +%z; printf '\n%s rc 0\n' "$mark"
n=0
for file in $(ls -t /tmp/ray/session_2*/logs/job-driver-*.log 2>/dev/null | head -n 3); do
  n=$((n + 1)); show "driver-$n" "$file" "$lines" "$bytes"
done
n=0
for file in $(ls -t /tmp/ray/session_2*/logs/worker-*.err /tmp/ray/session_2*/logs/worker-*.out 2>/dev/null | head -n 12); do
  n=$((n + 1)); [ ! -s "$file" ] || show "worker-$n" "$file" 300 60000
done
n=0
for file in /tmp/ray/session_latest/logs/raylet.err /tmp/ray/session_latest/logs/raylet.out \
  /tmp/ray/session_latest/logs/gcs_server.out; do
  n=$((n + 1)); [ ! -s "$file" ] || show "ray-$n" "$file" 300 60000
done
printf '\n%s nccl\n' "$mark"
cat /tmp/vlaunch-nccl.*.log 2>/dev/null | grep -aE 'WARN|No device found|, retrying|undefined symbol' |
  tail -n 200 | tail -c 60000
printf '\n%s rc 0\n' "$mark"
"""

# Arguments: mark, cluster, state directory ("" = ~/.vlaunch), lines and bytes of each log, how far
# back ("" = all), the parts, the script above, what starts docker.
_SCRIPT = r"""
mark=$1 cluster=$2 state=$3 lines=$4 bytes=$5 since=$6 parts=$7 inside=$8; shift 8
[ -n "$state" ] || state=$HOME/.vlaunch
part() {
  name=$1 cut=$2; shift 2
  printf '\n%s %s\n' "$mark" "$name"
  { timeout -k 2 30 "$@" 2>&1 </dev/null; printf '\n%s rc %s\n' "$mark" "$?"; } | "$cut"
}
last() { tail -n "$((lines + 2))" | tail -c "$((bytes + 100))"; }
all() { cat; }
wanted() { case " $parts " in *" $1 "*) return 0 ;; esac; return 1; }
kept() { part "$1" all head -c "$bytes" "$state/$cluster/server/$2"; }
part clock all date +%s
# A server's folder changes whenever a file in it is replaced: those that live come first.
names=$(cd "$state/$cluster/server" 2>/dev/null && ls -dt */ 2>/dev/null | sed 's#/$##' | head -n 5)
part servers all printf '%s\n' $names
! wanted record || kept members members.json
n=0
for of in $names; do
  n=$((n + 1))
  if wanted record; then
    for each in desired observed history; do kept "$each-$n" "$of/$each.json"; done
  fi
  log=$state/$cluster/server/$of/engine.log
  ! wanted engines || part "engine-$n" last sh -c 'cat "$1.1" "$1" 2>/dev/null; :' engine "$log"
done
! wanted kernel || part kernel last sh -c '
  log=$(dmesg --time-format=iso 2>/dev/null) || log=$(journalctl -k -b -q --no-pager -o short-iso 2>/dev/null) || exit 9
  [ -n "$log" ] || exit 9
  printf "%s\n" "$log" | grep -aiE "oom-kill|out of memory|NVRM: Xid" | tail -n 200; exit 0'
part ids all "$@" ps --all --quiet --no-trunc --filter "label=@CLUSTER@=$cluster"
ids=$(timeout -k 2 30 "$@" ps --all --quiet --no-trunc --filter "label=@CLUSTER@=$cluster" 2>/dev/null </dev/null | head -n 4)
[ -n "$ids" ] || exit 0
form='{"name":{{json .Name}},"role":{{json (index .Config.Labels "@ROLE@")}}'
form=$form',"state":{{json .State}},"restarts":{{.RestartCount}}}'
part state all "$@" inspect --type container --format "$form" $ids
! wanted inspect || part inspect all "$@" inspect --type container $ids
n=0
for id in $ids; do
  n=$((n + 1))
  ! wanted logs || part "log-$n" last "$@" logs --timestamps --tail "$lines" ${since:+--since=$since} "$id"
done
wanted inside || exit 0
for id in $ids; do
  [ "$(timeout -k 2 30 "$@" inspect --format '{{.State.Running}}' "$id" 2>/dev/null </dev/null)" = true ] || continue
  timeout -k 2 60 "$@" exec "$id" timeout 50 sh -c "$inside" inside "$mark" "$lines" "$bytes" 2>/dev/null </dev/null
done
exit 0
""".replace("@CLUSTER@", CLUSTER).replace("@ROLE@", ROLE)


def ask(
    docker: Argv,
    *,
    mark: str,
    cluster: str,
    state_dir: str,
    parts: tuple[str, ...] = DIAGNOSIS,
    lines: int = 2000,
    size: int = 500_000,
    since: float | None = None,
) -> Argv:
    """Ask a node for some parts; it changes nothing.

    Args:
        docker: what starts docker there.
        mark: begins the lines between parts; nobody may be able to guess it.
        cluster: whose containers.
        state_dir: where the launcher's folder is on the node, when not in the login's home.
        parts: what to tell; the containers' states always come.
        lines: the last of each log.
        size: bytes of each log, at most.
        since: seconds that the containers' logs go back, or all of it.
    """
    back = "" if since is None else f"{since:.0f}s"
    return (
        "sh",
        "-c",
        _SCRIPT,
        "doctor",
        mark,
        cluster,
        state_dir,
        str(lines),
        str(size),
        back,
        " ".join(parts),
        _INSIDE,
        *docker,
    )
