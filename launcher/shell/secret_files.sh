#!/bin/sh
# List the files with secrets of a cluster: place, mode, owner, time and path of each.
#
# Runs behind probe.sh, which sets $dir, the cluster's folder on disk, and $in_memory, which prints
# those in memory. Names that start with a dot are what a launcher left that was killed while it
# wrote.
#
# shellcheck disable=SC2154 # set by probe.sh

printf '\n@@secrets %s %s\n' "$(date +%s)" "$(id -u)"
for each in "$dir" $(sh -c "$in_memory" probe "$cluster"); do
  [ -d "$each/secrets" ] || continue
  place=memory; [ "$each" != "$dir" ] || place=disk
  for file in "$each/secrets" "$each/secrets"/* "$each/secrets"/.[!.]*; do
    [ ! -e "$file" ] || timeout 5 stat -c "$place %a %u %Y %n" "$file"
  done
done
printf '@@secrets end\n'
