#!/bin/sh
# systemd as the first process of namespaces of its own on a practice host, whose files, network and
# name it has; it starts what is enabled below /etc/systemd/system, and nothing of the machine's own.
# usage: practice_systemd.sh GROUP
set -eu

# systemd manages the control groups below its own, which must not be the machine's: first a group of
# every hierarchy, then a namespace that begins there.
for top in /sys/fs/cgroup/*/; do
    at=$top
    for name in $(echo "$1" | tr / ' '); do
        above=$at
        at=$at$name/
        mkdir -p "$at"
        for file in cpuset.cpus cpuset.mems; do # a new group has none, and takes no process then
            if [ -e "$top$file" ] && [ -z "$(cat "$at$file")" ]; then cat "$above$file" >"$at$file"; fi
        done
    done
    echo $$ >"${at}cgroup.procs"
done

# shellcheck disable=SC2016 # for the shell inside
exec unshare --mount --pid --cgroup --fork --kill-child --propagation private sh -euc '
    mount -t proc proc /proc
    mount --bind /proc/sys /proc/sys
    mount -o remount,bind,ro /proc/sys

    groups=$(cd /sys/fs/cgroup && echo *)
    umount --recursive /sys/fs/cgroup
    mount -t tmpfs -o mode=755,size=1m tmpfs /sys/fs/cgroup
    for name in $groups; do
        mkdir "/sys/fs/cgroup/$name"
        case $name in
            unified) mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified ;;
            systemd) mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd ;;
            *) mount -t cgroup -o "$name" cgroup "/sys/fs/cgroup/$name" ;;
        esac
    done
    mount -o remount,bind,ro /sys # or it would manage the devices of the machine

    mkdir -p /run/dev
    mount -t tmpfs -o mode=755,size=1m tmpfs /run/dev
    for name in null zero full random urandom tty; do
        : >"/run/dev/$name"
        mount --bind "/dev/$name" "/run/dev/$name"
    done
    mkdir /run/dev/pts /run/dev/shm /run/dev/mqueue
    mount -t devpts -o newinstance,mode=620,ptmxmode=666 devpts /run/dev/pts
    mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs /run/dev/shm
    ln -s pts/ptmx /run/dev/ptmx
    ln -s /proc/self/fd /run/dev/fd
    mount --move /run/dev /dev

    # What every machine starts: file systems of the kernel, devices, logins.
    for target in sysinit multi-user graphical timers; do
        mount -t tmpfs -o mode=755,size=4k tmpfs "/lib/systemd/system/$target.target.wants"
    done
    exec env -i container=vlaunch PATH="$PATH" /lib/systemd/systemd --unit=multi-user.target
'
