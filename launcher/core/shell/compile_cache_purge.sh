#!/bin/sh
# Remove what the engines of a cluster compiled on a node; ends with 1 where some of it is left.
#
# Arguments: the folder; the one around it, which goes when nothing else is in it ("": it stays); an
# image that is there ("": none); what starts docker. Root in the containers wrote the files: what
# the login may not remove, root in another container does.

dir=$1 around=$2 image=$3; shift 3
rm -rf "$dir" 2>/dev/null || [ -z "$image" ] ||
  "$@" run --rm --pull never --network none --user 0:0 --volume "$dir:/cache" --entrypoint sh \
    "$image" -c 'rm -rf /cache/*' || exit 1
rm -rf "$dir" || exit 1
[ -z "$around" ] || rmdir "$around" "${around%/*}" 2>/dev/null || true
