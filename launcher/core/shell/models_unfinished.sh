#!/bin/sh
# Print the incomplete models of a Hugging Face home and of the directories beside its cache, with
# the size so far. Argument: the Hugging Face home.

tell() {
  what=$1 of=$2; shift 2
  kib=$(du -ck "$@" 2>/dev/null | tail -n 1 | cut -f 1)
  printf 'unfinished %s: %s KiB of %s\n' "$what" "$kib" "${of%/}"
}
for each in "$1"/hub/models--*/ "$1"/*/; do
  parts=$each.vlaunch/parts
  [ -z "$(ls -A "$parts" 2>/dev/null)" ] || tell copy "$each" "$parts"
  set -- "$1" "$each"blobs/*.incomplete
  [ ! -e "$2" ] || { home=$1; shift; tell download "$each" "$@"; set -- "$home"; }
done
