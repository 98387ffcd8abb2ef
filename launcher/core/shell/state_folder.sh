#!/bin/sh
# Set $state to the node's own folder if its file system may be shared, such as that of a home on
# NFS: nodes would overwrite each other's certificates. Locks and audit trails stay together.
#
# Requires $state (state directory, "" = ~/.vlaunch).

[ -n "$state" ] || state=$HOME/.vlaunch
at=$state; while [ ! -d "$at" ]; do at=$(dirname "$at"); done
kind=$(timeout 5 findmnt -n -o FSTYPE -T "$at" 2>/dev/null | tail -n 1)  # the topmost of several
[ -n "$kind" ] || kind=$(timeout 5 stat -f -c %T "$at")
case $kind in
  ext[234] | ext2/ext3 | xfs | btrfs | zfs | tmpfs | overlay* | f2fs | bcachefs | ramfs | rootfs) ;;
  *) state=$state/nodes/$(uname -n) ;;
esac
