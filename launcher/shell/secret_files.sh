#!/bin/sh
# List the files with secrets of a cluster: place, mode, owner, time and path of each.
#
# Arguments: the cluster, its state directory ("" = ~/.vlaunch). Names that start with a dot are what
# a launcher left that was killed while it wrote.

dir=${2:-$HOME/.vlaunch}/$1
in_memory() {
. ./folders_in_memory.sh
}
printf '\n@@secrets %s %s\n' "$(date +%s)" "$(id -u)"
for each in "$dir" $(in_memory "$1"); do
  [ -d "$each/secrets" ] || continue
  place=memory; [ "$each" != "$dir" ] || place=disk
  for file in "$each/secrets" "$each/secrets"/* "$each/secrets"/.[!.]*; do
    [ ! -e "$file" ] || timeout 5 stat -c "$place %a %u %Y %n" "$file"
  done
done
printf '@@secrets end\n'
