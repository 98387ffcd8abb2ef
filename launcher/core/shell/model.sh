#!/bin/sh
# Print every file of a model with its size, an empty line, and its config.json.
#
# Arguments: the model (a name or a path), the Hugging Face home. Ends with 3 where there is no such
# path, with 4 where it is not in the cache, whose layout is hub/models--ORG--NAME/refs/main, which
# names the folder below snapshots/, and with 6 where a copy of ours has begun and not ended
# (distribute/node/store.py): a folder may be a mixture then, while what is in the cache is not
# touched until the end. Ends with 5 where it has no config.json, and with 7 where files are missing
# that must be there, whose first one's name is printed in place of config.json.

begun() { [ -n "$(ls -A "$1/.vlaunch/parts" 2>/dev/null)" ]; }
lacks() { printf %s "$1"; exit 7; }
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
# Files of a snapshot are links to blobs/; `find -L` follows them and shows one whose blob is
# missing as a link (`l`). A last line `?`: this find is not GNU's, or a folder is unreadable.
if [ -d "$dir" ]; then find -L "$dir" ! -type d -printf '%y %s %P\n'
else find -L "$dir" -printf 'f %s %f\n'; fi || echo '?'
echo
for path in "$dir"/*; do
  # A link into the cache whose file is not there: a download was interrupted.
  [ ! -L "$path" ] || [ -e "$path" ] || lacks "${path##*/}"
done
# The only index that vLLM reads (vllm/model_executor/model_loader/default_loader.py).
index=$dir/model.safetensors.index.json
for shard in $(grep -o '"[^" ]*\.safetensors"' "$index" 2>/dev/null | tr -d '"' | sort -u); do
  [ -e "$dir/$shard" ] || lacks "$shard"
done
[ -f "$dir/config.json" ] || exit 5
exec cat "$dir/config.json"
