#!/bin/sh
# Init process of a lab host, in its own namespaces: mounts a file system like that of a fresh server.
# /usr and the like are the machine's, read-only; everything a server writes to (/etc, /var, /run,
# /root, ...) is below $1/fs.
# $1/programs, if it exists, overlays the machine's own programs, and $1/class its /sys/class;
# $1/devices has lines `NAME MAJOR MINOR`, the nodes of the host's own /dev.
# usage: host.sh DIRECTORY HOSTNAME
set -eu
own=$1/fs
new=$1/root

hostname "$2"
mount --make-rprivate /
mkdir -p "$new"
mount -t tmpfs -o mode=755,size=1m tmpfs "$new"

for path in /bin /sbin /lib /lib32 /lib64 /libx32; do
    if [ -L "$path" ]; then
        cp -P "$path" "$new$path"
    elif [ -d "$path" ]; then
        mkdir "$new$path" && mount --rbind "$path" "$new$path"
    fi
done
for path in /usr /opt /nix; do
    if [ -d "$path" ]; then
        mkdir "$new$path" && mount --rbind "$path" "$new$path"
    fi
done
findmnt --raw --noheadings --output TARGET --submounts "$new" | while read -r path; do
    [ "$path" = "$new" ] || mount -o remount,bind,ro "$path"
done
mkdir "$new/dev"
if [ -s "$1/devices" ]; then
    mount -t tmpfs -o mode=755,size=1m tmpfs "$new/dev"
    for path in /dev/*; do
        case $path in /dev/dri | /dev/kfd | /dev/infiniband) continue ;; esac
        if [ -L "$path" ]; then
            cp -P "$path" "$new$path"
        elif [ -d "$path" ]; then
            mkdir "$new$path" && mount --rbind "$path" "$new$path"
        else
            : >"$new$path" && mount --bind "$path" "$new$path"
        fi
    done
    while read -r name major minor; do
        mkdir -p "$(dirname "$new/dev/$name")"
        mknod -m 666 "$new/dev/$name" c "$major" "$minor"
    done <"$1/devices"
else
    mount --rbind /dev "$new/dev"
    mount -o remount,bind,ro "$new/dev" # devices can be opened all the same
fi
if [ -d "$1/programs" ]; then
    cd "$1" # a colon or comma in its name would mean something among the options
    mount -t overlay -o lowerdir=programs:/usr/local/bin overlay "$new/usr/local/bin"
fi
for path in "$own"/*; do
    mkdir "$new/${path##*/}" && mount --bind "$path" "$new/${path##*/}"
done

mkdir "$new/proc" "$new/sys" "$new/old"
mount -t proc proc "$new/proc"
# sysfs of this network namespace; a new mount lacks the cgroup mounts.
mount -t sysfs sysfs "$new/sys"
if [ -d "$1/class" ]; then
    cd "$1"
    mount -t overlay -o lowerdir=class:root/sys/class overlay "$new/sys/class"
fi
mount --rbind /sys/fs/cgroup "$new/sys/fs/cgroup"
mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs "$new/dev/shm"

cd "$new"
pivot_root . old
umount -l /old
rmdir /old
touch /run/booted
# Orphans become children of init; with the signal ignored, the kernel reaps them.
exec env --ignore-signal=CHLD sleep infinity
