#!/bin/sh
# Print every RDMA device's model, ports, GIDs, NUMA node and network interfaces.
#
# shellcheck disable=SC2035 # no device name begins with a dash

cd /sys/class/infiniband 2>/dev/null || exit 0
grep -H "" */hca_type */board_id */device/numa_node */ports/*/state */ports/*/phys_state \
  */ports/*/rate */ports/*/link_layer 2>/dev/null
grep -H "" */ports/*/gids/* 2>/dev/null | grep -v 0000:0000:0000:0000:0000:0000:0000:0000
grep -H "" */ports/*/gid_attrs/types/* */ports/*/gid_attrs/ndevs/* 2>/dev/null
for each in */device/net/*; do [ ! -e "$each" ] || printf "%s:\n" "$each"; done
