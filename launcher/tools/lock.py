"""The lock of a cluster: a kernel lock on a file of the head, held by a process that lives as long
as its launcher listens.

Whoever dies or disconnects frees it, so that no lock outlives its owner; the file only tells who
holds it. Where the head's sshd still holds a connection that is dead, the holder's process is ended
by `break_`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.errors import UnreadableAnswer
from launcher.model import Answer, Argv

FILE = "locks"  # {state_dir}/locks/{cluster}
# exit codes: somebody else holds it, and there is neither `flock` nor Python
BUSY, MISSING = 75, 69
_TEXT = 1000
# characters; in JSON each may take twelve, and the line of an owner is read up to 4000
_COMMAND = 250

# `flock` is part of util-linux, and of busybox; the lock belongs to the open file, so that a child
# may take it for its parent.
_BEGIN = r"""
[ -n "$s" ] || s=$HOME/.vlaunch
d=$s/locks f=$s/locks/$c
said() { head -n 1 "$1" 2>/dev/null | head -c 4000; }
if command -v flock >/dev/null 2>&1; then
  take() { flock -n 9; }
elif command -v python3 >/dev/null 2>&1; then
  take() {
    python3 -c "import errno, fcntl, sys
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError as error:
    sys.exit(1 if error.errno in (errno.EAGAIN, errno.EACCES) else 71)"
  }
else
  echo "neither flock nor python3 is there" >&2
  exit 69
fi
"""
# Arguments: state directory ("" = ~/.vlaunch), cluster, seconds to wait. Standard input: one line,
# what is said of the owner, without its opening brace. A command that has just ended, or somebody
# who looks, may hold the lock for a moment: that is waited for in any case. The folder's
# set-group-ID bit says that several logins share it. The empty lines are for sshd: only who sends
# something learns that the other side is not there any more.
_HOLD = (
    "s=$1 c=$2 w=$3"
    + _BEGIN
    + r"""
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
printf "{\"pid\": %s, \"since\": \"%s\", %s\n" "$$" "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$me" >"$f" 2>/dev/null
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
"""
)
# It is taken for a moment to see whether it is free; `_HOLD` is patient enough for that.
_LOOK = (
    "s=$1 c=$2"
    + _BEGIN
    + r"""
[ -e "$f" ] || { echo free; exit 0; }
exec 9>>"$f" || exit 77
take && { echo free; exit 0; }
[ "$?" = 1 ] || exit 71
printf "held %s\n" "$(said "$f")"
"""
)
# Arguments: state directory, cluster, the holder's process, what was said of it. Standard input:
# who breaks the lock. A process is ended only when the kernel says that it has the file open; of
# another login's, the kernel does not say it. Who waits for the lock may have it before us: then
# another line is there.
_BREAK = (
    "s=$1 c=$2 p=$3 was=$4"
    + _BEGIN
    + r"""
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
"""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who holds a lock, as they said themselves.

    `since` is the head's clock; `pid` the holder there; `launcher` tells the launcher's process
    from all others, in words of its own machine; `raw` is the line that is there.
    """

    who: str = ""
    host: str = ""
    since: str = ""
    command: str = ""
    pid: int = 0
    launcher: str = ""
    raw: str = ""

    @property
    def words(self) -> str:
        """Who it is and what they do, in a few words."""
        if not self.who:
            return "somebody who left no name"
        return f"{self.who}@{self.host} since {self.since} (`{self.command}`)"


def hold(state_dir: str, cluster: str, wait: float = 0.0) -> Argv:
    """Take the lock and keep it until standard input ends.

    Prints `held OWNER` while another one has it, then `locked`.
    """
    return ("sh", "-c", _HOLD, "lock", state_dir, cluster, f"{wait:.0f}")


def look(state_dir: str, cluster: str) -> Argv:
    """Print `free`, or `held OWNER`."""
    return ("sh", "-c", _LOOK, "lock-look", state_dir, cluster)


def break_(state_dir: str, cluster: str, owner: Owner) -> Argv:
    """End the process of `owner`, if it still is the one that holds the lock.

    Prints `freed`; `free` when nobody holds it, `changed` when somebody else does, `stranger` when
    the process is another one.
    """
    return ("sh", "-c", _BREAK, "lock-break", state_dir, cluster, str(owner.pid), owner.raw)


def said(who: str, host: str, command: str, launcher: str = "") -> bytes:
    """Return what `hold` and `break_` read: the owner's line without what only the head knows."""
    text = json.dumps(
        {"who": who, "host": host, "command": command[:_COMMAND], "launcher": launcher}
    )
    return (text[1:] + "\n").encode()


def owner(text: str) -> Owner:
    """Read the line of an owner; whoever could write it is a stranger, so that nothing is believed
    but its form.
    """
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        return Owner(raw=text)
    if not isinstance(found, Mapping):
        return Owner(raw=text)
    pid = found.get("pid")
    return Owner(
        who=_text(found, "who"),
        host=_text(found, "host"),
        since=_text(found, "since"),
        command=_text(found, "command"),
        launcher=_text(found, "launcher"),
        pid=pid if isinstance(pid, int) and not isinstance(pid, bool) and 1 < pid < 1 << 31 else 0,
        raw=text,
    )


def breaker(text: str) -> Owner:
    """Read the line of who broke a lock, as `said` wrote it."""
    return owner("{" + text)


def parse_look(answer: Answer) -> Owner | None:
    """Read the answer of `look`: the owner, or None when nobody holds the lock.

    Raises:
        UnreadableAnswer: the head could not say.
    """
    word, _, rest = answer.out.strip().partition(" ")
    if answer.ok and word == "free":
        return None
    if answer.ok and word == "held":
        return owner(rest)
    raise UnreadableAnswer(f"{answer.node}: does not say who holds the lock", evidence=answer.tail)


def _text(found: Mapping[str, Any], key: str) -> str:
    value = found.get(key)
    return value[:_TEXT] if isinstance(value, str) else ""
