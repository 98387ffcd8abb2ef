#!/bin/sh
# Init process of a lab host, in its own namespaces: mounts the file system of a fresh server.
# /usr and similar directories are the machine's, read-only; writable ones (/etc, /var, /run, /root,
# ...) are below $1/fs.
# If they exist, $1/programs overlays /usr/local/bin and $1/class overlays /sys/class; $1/devices
# lists the device files of the host's /dev, as lines `NAME MAJOR MINOR`.
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
    mount -o remount,bind,ro "$new/dev" # devices can still be opened
fi
if [ -d "$1/programs" ]; then
    cd "$1" # colons and commas in its path are special in mount options
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
