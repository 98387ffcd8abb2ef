#!/bin/sh
# Remove a cluster's compile cache from a node; exit with 1 if files remain.
#
# Arguments: the directory; its parent, to be removed if empty ("": leave it); an image on the node
# ("": none); the docker command. Root in the containers wrote the files: if the SSH user may not
# remove them, root in another container does.

dir=$1 around=$2 image=$3; shift 3
rm -rf "$dir" 2>/dev/null || [ -z "$image" ] ||
  "$@" run --rm --pull never --network none --user 0:0 --volume "$dir:/cache" --entrypoint sh \
    "$image" -c 'rm -rf /cache/*' || exit 1
rm -rf "$dir" || exit 1
[ -z "$around" ] || rmdir "$around" "${around%/*}" 2>/dev/null || true
