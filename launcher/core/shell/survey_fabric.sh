#!/bin/sh
# Tell of NVIDIA's NVSwitches whether there are some, what each GPU says of their fabric, and how the
# service that sets it up is.

for each in /dev/nvidia-nvswitch[0-9]*; do [ ! -e "$each" ] || printf "switch %s\n" "$each"; done
nvidia-smi --query-gpu=fabric.state --format=csv,noheader 2>/dev/null | sed "s/^/state /"
printf "service %s\n" "$(systemctl is-active nvidia-fabricmanager 2>/dev/null)"
exit 0
