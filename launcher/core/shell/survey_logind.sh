#!/bin/sh
# Print whether logind removes files in /dev/shm at the end of a session, and whether this user
# lingers.

command -v loginctl >/dev/null || exit 127
for each in /usr/lib/systemd/logind.conf /etc/systemd/logind.conf \
  /usr/lib/systemd/logind.conf.d/*.conf /run/systemd/logind.conf.d/*.conf \
  /etc/systemd/logind.conf.d/*.conf; do
  [ ! -f "$each" ] || sed -n "s/^ *\(RemoveIPC\) *= */\1=/p" "$each"
done
user=$(id -un)
loginctl show-user "$user" --property Linger 2>/dev/null && exit
[ -e "/var/lib/systemd/linger/$user" ] && echo Linger=yes || echo Linger=no
