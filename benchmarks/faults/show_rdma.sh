#!/bin/sh
# Add simulated InfiniBand devices to a lab host's /sys, with active ports of 400 Gbit/s.
# Arguments: the device names.

mkdir -p /run/net && mount --bind /sys/class/net /run/net && mount -t tmpfs tmpfs /sys/class &&
  mkdir /sys/class/net /sys/class/infiniband && mount --move /run/net /sys/class/net &&
  cd /sys/class/infiniband || exit
for name in "$@"; do
  mkdir -p "$name/ports/1/gids" && cd "$name" || exit
  echo MT4129 >hca_type; echo 28.39.1002 >fw_ver; echo InfiniBand >ports/1/link_layer
  echo "4: ACTIVE" >ports/1/state; echo "5: LinkUp" >ports/1/phys_state
  echo "400 Gb/sec (4X NDR)" >ports/1/rate
  echo fe80:0000:0000:0000:0002:c903:0000:0001 >ports/1/gids/0
  cd ..
done
