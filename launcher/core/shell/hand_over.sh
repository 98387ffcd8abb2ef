#!/bin/sh
# Let the group of an image's user read the secrets and write the other directories. Runs as root in
# a container of that image.
#
# Arguments: the image's user (name or number, optionally `:GROUP`); the directory of the secrets;
# the other directories. The SSH user still owns the files, and can replace and remove them.

user=${1%%:*} group=${1#"${1%%:*}"} secrets=$2; shift 2
group=${group#:}
if [ -z "$group" ] && ! group=$(id -g "$user" 2>/dev/null); then
  case $user in *[!0-9]*) echo "the image has no user $user" >&2; exit 1 ;; esac
  group=0 # as Docker does with a number that has no name
fi
chgrp -R "$group" "$secrets" "$@" && chmod 750 "$secrets" && chmod 640 "$secrets"/* || exit 1
for each; do
  chmod -R g+rwX "$each" && chmod g+s "$each" || exit 1
  for inside in "$each"/*/ "$each"/.front/; do [ ! -d "$inside" ] || chmod g+s "$inside" || exit 1; done
done
