#!/bin/sh
# The first process of a practice host, already in namespaces of its own: give it a file system like
# a fresh server's. The machine lends /usr and its like, to be read only; everything a server writes
# to (/etc, /var, /run, /root, ...) lies below $1/fs.
# What lies in $1/programs, where there is such a folder, comes before the machine's own programs,
# and $1/class before its /sys/class; $1/devices has lines `NAME MAJOR MINOR`, nodes of a /dev of
# its own.
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
# Of this network namespace; a new one comes without the cgroup mounts.
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
# Orphans come to the first process; with the signal ignored the kernel buries them.
exec env --ignore-signal=CHLD sleep infinity
