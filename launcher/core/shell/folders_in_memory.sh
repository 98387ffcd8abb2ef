#!/bin/sh
# Print a cluster's directories in memory that this user owns, including locations that
# place_in_memory.sh would no longer choose. Argument: the cluster.
#
# shellcheck disable=SC3067 # dash, bash and busybox support `-O`

for each in /run "/run/user/$(id -u)" /dev/shm; do
  own=$each/vlaunch-$(id -un)
  [ ! -O "$own" ] || [ -L "$own" ] || [ ! -d "$own/$1" ] || printf "%s\n" "$own/$1"
done
