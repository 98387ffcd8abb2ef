#!/bin/sh
# Common start of the programs for a cluster's lock: path ($d, $f), recorded owner (`said`), and
# acquisition (`take`).
#
# Requires $s (state directory, "" = ~/.vlaunch) and $c (cluster), and the lock open as file
# descriptor 9. `flock` is part of util-linux and of busybox. The lock belongs to the open file, so
# a child process can acquire it for its parent.
#
# shellcheck disable=SC2154,SC2034 # set before and used after this file

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
  echo "neither flock nor python3 is installed" >&2
  exit 69
fi
