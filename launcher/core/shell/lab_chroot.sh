#!/bin/sh
# Run a program in a root file system with the mounts that it needs. Run this with `sh -euc` in a
# separate mount namespace, so that a crash leaves no mounts behind.
#
# Arguments: root file system, directory to mount as /wheels, text of the program, its arguments.

mount --bind /dev "$1/dev"
mount -t proc proc "$1/proc"
mount -t tmpfs tmpfs "$1/tmp"
if [ -d "$1/wheels" ]; then mount --bind "$2" "$1/wheels"; fi
root=$1 program=$3
shift 3
exec chroot "$root" sh -euc "$program" sh "$@"
