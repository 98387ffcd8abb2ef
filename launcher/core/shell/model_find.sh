#!/bin/sh
# Find the folder of a model ($dir).
#
# Arguments: the model (a name or a path), the Hugging Face home. Ends with 3 where there is no such
# path, with 4 where it is not in the cache, whose layout is hub/models--ORG--NAME/refs/main, which
# names the folder below snapshots/, and with 6 where a copy of ours has begun and not ended
# (distribute/node/store.py): a folder may be a mixture then, while what is in the cache is not
# touched until the end.

begun() { [ -n "$(ls -A "$1/.vlaunch/parts" 2>/dev/null)" ]; }
case $1 in
/*) [ -e "$1" ] || exit 3; dir=$1; ! begun "$dir" || exit 6 ;;
*)
  repo=${HF_HUB_CACHE:-$2/hub}/models--$(printf %s "$1" | sed 's|/|--|g')
  ref=$(cat "$repo/refs/main" 2>/dev/null) && dir=$repo/snapshots/$ref && [ -d "$dir" ] || {
    ! begun "$repo" || exit 6
    exit 4
  }
  ;;
esac
