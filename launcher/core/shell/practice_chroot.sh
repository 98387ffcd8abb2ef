#!/bin/sh
# Run a program in a root file system with the mounts that it needs; run with `sh -euc` in a mount
# namespace of its own, so that a crash leaves no mount behind.
#
# Arguments: the root file system, the folder to show as /wheels, the program as text, its words.

mount --bind /dev "$1/dev"
mount -t proc proc "$1/proc"
mount -t tmpfs tmpfs "$1/tmp"
if [ -d "$1/wheels" ]; then mount --bind "$2" "$1/wheels"; fi
root=$1 program=$3
shift 3
exec chroot "$root" sh -euc "$program" sh "$@"
