#!/bin/sh
# Print every file of a model with its size. Arguments: as for model_find.sh.
#
# Files of a snapshot are links to ../../blobs; `find -L` follows them and shows one whose blob is
# missing as a link (`l`).

. ./model_find.sh

cd "$dir" 2>/dev/null || exec find -L "$dir" -printf 'f %s %f\n'
find -L . ! -type d -printf '%y %s %P\n'
