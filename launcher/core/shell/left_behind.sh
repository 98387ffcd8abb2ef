#!/bin/sh
# Print what is left of a cluster on a node: containers, and folders on disk and in memory.
#
# Arguments: the folder on disk, the cluster, what lists the ids of its containers.
#
# shellcheck disable=SC2086 # ids are words

dir=$1 cluster=$2; shift 2
ids=$("$@") || exit 1
[ -z "$ids" ] || printf 'container %.12s\n' $ids
[ ! -e "$dir" ] || printf 'directory %s\n' "$dir"
set -- "$cluster"
{
. ./folders_in_memory.sh
} | sed 's/^/directory /'
