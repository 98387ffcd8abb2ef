#!/bin/sh
# Print a model's config.json; ends with 5 where it has none. Arguments: as for model_find.sh.

. ./model_find.sh

[ -f "$dir/config.json" ] || exit 5
exec cat "$dir/config.json"
