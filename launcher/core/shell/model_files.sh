#!/bin/sh
# Print every file of a model with its size, and of one in the Hugging Face cache the revision and
# the downloads that are not finished. Arguments: as for model_find.sh.
#
# Files of a snapshot are links to ../../blobs; `find -L` follows them and shows one whose blob is
# missing as a link (`l`).

. ./model_find.sh

printf 'revision %s\n' "$ref"
[ -z "$repo" ] || find "$repo/blobs" -name '*.incomplete' -printf 'incomplete %f\n' 2>/dev/null
cd "$dir" 2>/dev/null || exec find -L "$dir" -printf 'f %s %f\n'
find -L . ! -type d -printf '%y %s %P\n'
