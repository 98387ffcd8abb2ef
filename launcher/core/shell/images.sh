#!/bin/sh
# Print a node's Docker images, how Docker stores them, and the free space. Changes nothing.
#
# Arguments: staging directory of image copies, cluster, node, docker command.
#
# shellcheck disable=SC2086 # ids contain no blanks

. ./part.sh
base=$1 cluster=$2 node=$3; shift 3
user=$(id -u)
part user printf %s "$user"
part python python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])'
there=$base; while [ ! -d "$there" ]; do there=$(dirname "$there"); done
part disk df -Pk "$there"
part device stat -c %d "$there"
part unfinished du -sk "$base/vlaunch-$user/$cluster/$node"
part docker "$@" version --format '{{json .Server}}'
if [ "$answers" = 0 ]; then
  part info "$@" info --format '{{json .}}'
  ids=$(timeout -k 2 15 "$@" images --quiet --no-trunc 2>/dev/null | sort -u)
  printf '\n@@vlaunch images\n'
  [ -z "$ids" ] || timeout -k 2 60 "$@" image inspect $ids 2>&1
  printf '\n@@vlaunch rc %s\n' "$?"
  root=$(timeout -k 2 15 "$@" info --format '{{.DockerRootDir}}' 2>/dev/null)
  part dockerdisk df -Pk "$root"
  part dockerdevice stat -c %d "$root"
fi
printf '\n@@vlaunch end\n\n@@vlaunch rc 0\n'
