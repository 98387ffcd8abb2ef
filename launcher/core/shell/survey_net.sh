#!/bin/sh
# Print what the kernel says of each network card.
#
# shellcheck disable=SC2035 # no device's name begins with a dash

cd /sys/class/net || exit
grep -H "" */speed 2>/dev/null
for each in */device; do
  [ ! -e "$each" ] || printf "%s/driver:%s\n" "$each" "$(readlink "$each/driver")"
done
