#!/bin/sh
# Print NVIDIA's NVSwitches, the fabric state of every GPU, and the state of the Fabric Manager
# service.

for each in /dev/nvidia-nvswitch[0-9]*; do [ ! -e "$each" ] || printf "switch %s\n" "$each"; done
nvidia-smi --query-gpu=fabric.state --format=csv,noheader 2>/dev/null | sed "s/^/state /"
printf "service %s\n" "$(systemctl is-active nvidia-fabricmanager 2>/dev/null)"
exit 0
