#!/bin/sh
# Print the type of the file system of a compile cache and, if the directory exists, its size in
# KiB.
#
# Argument: the directory. If it does not exist, its nearest existing parent decides the type.

at=$1; while [ ! -d "$at" ]; do at=$(dirname "$at"); done
kind=$(findmnt -n -o FSTYPE -T "$at" 2>/dev/null) || kind=$(stat -f -c %T "$at")
printf '%s\n' "$kind" | tail -n 1
[ ! -d "$1" ] || du -sk "$1" 2>/dev/null | cut -f 1
