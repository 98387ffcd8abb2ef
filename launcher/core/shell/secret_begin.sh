#!/bin/sh
# Common start of the programs that write a secret: its private directory, and a temporary file
# ($new), whose name includes the node's since nodes may share a home.
#
# Requires the arguments: the directory of the cluster's secrets, the secret's name, its place: `disk`
# or `memory`. Another user may have created a directory of that name in /dev/shm.
#
# shellcheck disable=SC2034,SC3067 # $new is used after this file; dash, bash and busybox have -O

umask 077
mkdir -p "$1/secrets" || exit
[ "$3" = disk ] || for d in "${1%/*}" "$1" "$1/secrets"; do
  [ -O "$d" ] && [ ! -L "$d" ] || { echo "$d belongs to another user" >&2; exit 1; }
done
chmod 711 "$1" && chmod 700 "$1/secrets" || exit
new=$1/secrets/.$2.$(uname -n).$$
