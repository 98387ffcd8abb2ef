#!/bin/sh
# List the files with secrets of a cluster: place, mode, owner, time and path of each; then print the
# public certificates of its agent.
#
# Arguments: the cluster, its state directory ("" = ~/.vlaunch). Names that start with a dot are what
# a launcher left that was killed while it wrote. A folder of servers with the set-group-ID bit tells
# whose group may read the secrets besides (hand_over.sh); `-`: none's.

dir=${2:-$HOME/.vlaunch}/$1
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
# shellcheck disable=SC2046 # folders of logins, without blanks
certificates "$dir" $(in_memory "$1")
