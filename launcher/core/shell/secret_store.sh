#!/bin/sh
# Write a secret from standard input. mv replaces files atomically, so that containers never read
# incomplete ones.
#
# Arguments: as for secret_begin.sh.

. ./secret_begin.sh

cat >"$new" && mv "$new" "$1/secrets/$2"
