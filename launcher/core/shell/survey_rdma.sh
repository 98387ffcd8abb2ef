#!/bin/sh
# Print what the kernel says of each RDMA device: its ports, their GIDs, where it is plugged in.
#
# shellcheck disable=SC2035 # no device's name begins with a dash

cd /sys/class/infiniband 2>/dev/null || exit 0
grep -H "" */hca_type */board_id */device/numa_node */ports/*/state */ports/*/phys_state \
  */ports/*/rate */ports/*/link_layer 2>/dev/null
grep -H "" */ports/*/gids/* 2>/dev/null | grep -v 0000:0000:0000:0000:0000:0000:0000:0000
grep -H "" */ports/*/gid_attrs/types/* */ports/*/gid_attrs/ndevs/* 2>/dev/null
for each in */device/net/*; do [ ! -e "$each" ] || printf "%s:\n" "$each"; done
