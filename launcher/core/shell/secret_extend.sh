#!/bin/sh
# Write a secret from standard input, and keep its old content after the new.
#
# Arguments: as for secret_begin.sh.

. ./secret_begin.sh

{ cat && if [ -f "$1/secrets/$2" ]; then cat "$1/secrets/$2"; fi; } >"$new" &&
  mv "$new" "$1/secrets/$2"
