#!/bin/sh
# Print all files of a model with their sizes, an empty line, and its config.json.
#
# Arguments: the model (name or path), the Hugging Face home. The cache's layout is
# hub/models--ORG--NAME/refs/main, which names the directory below snapshots/.
#
# Exit status: 3 if the path does not exist; 4 if the model is not in the cache; 5 without a
# config.json; 6 during or after an incomplete copy by distribute/node/store.py (the directory may
# mix two versions, while a cache entry does not change before the copy completes); 7 if required
# files are missing, with the first one's name in place of config.json.

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
# Files of a snapshot are links to blobs/; `find -L` follows them and prints `l` for a link whose
# blob is missing. A last line `?` means that find is not GNU's or cannot read a directory.
if [ -d "$dir" ]; then find -L "$dir" ! -type d -printf '%y %s %P\n'
else find -L "$dir" -printf 'f %s %f\n'; fi || echo '?'
echo
for path in "$dir"/*; do
  # A link to a missing blob: the download was interrupted.
  [ ! -L "$path" ] || [ -e "$path" ] || lacks "${path##*/}"
done
# The only index that vLLM reads (vllm/model_executor/model_loader/default_loader.py).
index=$dir/model.safetensors.index.json
for shard in $(grep -o '"[^" ]*\.safetensors"' "$index" 2>/dev/null | tr -d '"' | sort -u); do
  [ -e "$dir/$shard" ] || lacks "$shard"
done
[ -f "$dir/config.json" ] || exit 5
exec cat "$dir/config.json"
