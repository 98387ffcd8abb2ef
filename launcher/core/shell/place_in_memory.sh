#!/bin/sh
# Print where secrets may lie without a disk, or say why nowhere: in a file system in memory that
# only this login writes to, or in /dev/shm.
#
# What logind removes at the end of a session is no such place (RemoveIPC, RuntimeDirectory:
# logind.conf(5)), unless the login lingers.

if [ "$(id -u)" = 0 ]; then set -- /run /dev/shm; else
  set -- "/run/user/$(id -u)" /dev/shm
  if [ -d /run/systemd/seats ] && [ ! -e "/var/lib/systemd/linger/$(id -un)" ]; then
    echo "files in memory end with the session of a login that does not linger"; exit 1
  fi
fi
for each; do
  [ -d "$each" ] && [ -w "$each" ] || continue
  case $(stat -f -c %T "$each" 2>/dev/null) in
  tmpfs | ramfs) printf "%s/vlaunch-%s" "$each" "$(id -un)"; exit ;;
  esac
done
echo "neither /run, /run/user nor /dev/shm is a file system in memory that the login may write to"
exit 1
