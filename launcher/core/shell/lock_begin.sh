#!/bin/sh
# What the programs about a cluster's lock begin with: where it is ($d, $f), who is said to hold it
# (`said`), and how it is taken (`take`).
#
# They have set $s (the state directory, "" = ~/.vlaunch) and $c (the cluster), and open the lock
# as 9. `flock` is part of util-linux, and of busybox; the lock belongs to the open file, so that a
# child may take it for its parent.
#
# shellcheck disable=SC2154,SC2034 # what is set before, and what is used after it

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
