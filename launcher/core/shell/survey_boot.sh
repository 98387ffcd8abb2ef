#!/bin/sh
# Print the kernel that the node will boot next, and whether NVIDIA's driver is built for it.
#
# shellcheck disable=SC2010 # kernel names contain no blanks

newest=$(ls /boot/vmlinuz-* 2>/dev/null | grep -v rescue | sort -V | tail -n 1)
newest=${newest##*/vmlinuz-}
[ -n "$newest" ] || exit 0
printf "next=%s\n" "$newest"
[ -d "/lib/modules/$newest" ] || exit 0
driver=$(find "/lib/modules/$newest" -name "nvidia.ko*" 2>/dev/null | head -n 1)
[ -n "$driver" ] && echo driver=yes || echo driver=no
