#!/bin/sh
# Print a model's config.json; ends with 5 where it has none, and with 7 where files are missing
# that must be there, whose first one's name is printed then. Arguments: as for model_find.sh.

. ./model_find.sh

lacks() { printf %s "$1"; exit 7; }
for each in "$dir"/*; do
  # A link into the cache whose file is not there: a download was interrupted.
  [ ! -L "$each" ] || [ -e "$each" ] || lacks "${each##*/}"
done
# The only index that vLLM reads (vllm/model_executor/model_loader/default_loader.py).
index=$dir/model.safetensors.index.json
for each in $(grep -o '"[^" ]*\.safetensors"' "$index" 2>/dev/null | tr -d '"' | sort -u); do
  [ -e "$dir/$each" ] || lacks "$each"
done
[ -f "$dir/config.json" ] || exit 5
exec cat "$dir/config.json"
