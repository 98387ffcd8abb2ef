#!/bin/sh
# Print a directory in memory for secrets: one that only this user writes to, or one in /dev/shm. If
# none is suitable, print the reason.
#
# Excludes directories that logind removes at the end of a session (RemoveIPC, RuntimeDirectory:
# logind.conf(5)), unless the user lingers.

if [ "$(id -u)" = 0 ]; then set -- /run /dev/shm; else
  set -- "/run/user/$(id -u)" /dev/shm
  if [ -d /run/systemd/seats ] && [ ! -e "/var/lib/systemd/linger/$(id -un)" ]; then
    echo "logind deletes this user's files in memory at logout: lingering is off"; exit 1
  fi
fi
for each; do
  [ -d "$each" ] && [ -w "$each" ] || continue
  case $(stat -f -c %T "$each" 2>/dev/null) in
  tmpfs | ramfs) printf "%s/vlaunch-%s" "$each" "$(id -un)"; exit ;;
  esac
done
echo "neither /run, /run/user nor /dev/shm is a writable file system in memory"
exit 1
