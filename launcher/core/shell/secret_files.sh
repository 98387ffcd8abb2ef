#!/bin/sh
# List a cluster's files with secrets (location, mode, owner, time and path), then print the public
# certificates of its agent.
#
# Arguments: the cluster, its state directory ("" = ~/.vlaunch). Names that start with a dot are
# from a launcher that was killed while writing. If the servers' directory has the set-group-ID bit,
# its group may read the secrets too (hand_over.sh); `-`: no group.

state=$2
. ./state_folder.sh
dir=$state/$1
in_memory() {
. ./folders_in_memory.sh
}
group=-; [ ! -g "$dir/server" ] || group=$(stat -c %g "$dir/server")
printf '\n@@secrets %s %s %s\n' "$(date +%s)" "$(id -u)" "$group"
for each in "$dir" $(in_memory "$1"); do
  [ -d "$each/secrets" ] || continue
  place=memory; [ "$each" != "$dir" ] || place=disk
  for file in "$each/secrets" "$each/secrets"/* "$each/secrets"/.[!.]*; do
    [ ! -e "$file" ] || timeout 5 stat -c "$place %a %u %g %Y %n" "$file"
  done
done
printf '@@secrets end\n'
certificates() {
. ./certificates.sh
}
# shellcheck disable=SC2046 # users' directories contain no blanks
certificates "$dir" $(in_memory "$1")
