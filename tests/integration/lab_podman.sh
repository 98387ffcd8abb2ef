#!/bin/sh
# Run another Debian's podman on a lab host. Run this in the host's network, UTS and PID namespaces:
# it makes that Debian the root file system, with the host's containers, /run and models.
# usage: lab_podman.sh ROOT HOST_FILES MODELS ARG…
set -eu
root=$1 own=$2 models=$3
shift 3

mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mkdir -p "$own/var/lib/containers" "$root/var/lib/containers" "$root$models" "$root/old"
mount --bind "$own/var/lib/containers" "$root/var/lib/containers"
mount --bind "$own/run" "$root/run"
mount --bind "$own$models" "$root$models"
! test -e "$own/run/names" || mount --bind "$own/run/names" "$root/etc/hosts"
cd "$root"
pivot_root . old # after chroot(1), `podman exec` would see the machine's files
umount --lazy /old
export PODMAN_IGNORE_CGROUPSV1_WARNING=1
exec podman --cgroup-manager=cgroupfs --events-backend=none --runtime=runc "$@"
