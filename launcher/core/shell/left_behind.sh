#!/bin/sh
# Print the remains of a cluster on a node: containers, and directories on disk and in memory.
#
# Arguments: the directory on disk, the cluster, the command that lists the ids of its containers.
#
# shellcheck disable=SC2086 # ids contain no blanks

dir=$1 cluster=$2; shift 2
ids=$("$@") || exit 1
[ -z "$ids" ] || printf 'container %.12s\n' $ids
[ ! -e "$dir" ] || printf 'directory %s\n' "$dir"
set -- "$cluster"
{
. ./folders_in_memory.sh
} | sed 's/^/directory /'
