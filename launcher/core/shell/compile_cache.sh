#!/bin/sh
# Print the kind of file system that holds a folder of compiled code, and, where it is there, its
# size in KiB.
#
# Argument: the folder. Where it is not there yet, the nearest folder above it tells the kind.

at=$1; while [ ! -d "$at" ]; do at=$(dirname "$at"); done
kind=$(findmnt -n -o FSTYPE -T "$at" 2>/dev/null) || kind=$(stat -f -c %T "$at")
printf '%s\n' "$kind" | tail -n 1
[ ! -d "$1" ] || du -sk "$1" 2>/dev/null | cut -f 1
