#!/bin/sh
# Print the NVIDIA driver's version, GPU models, and the kernel's last messages about exhausted
# memory and NVIDIA GPU faults; exit with 9 if the user may not read the kernel's log.

grep -h "^NVRM version" /proc/driver/nvidia/version 2>/dev/null
grep -h "^Model:" /proc/driver/nvidia/gpus/*/information 2>/dev/null | sort -u

log=$(dmesg --time-format=iso 2>/dev/null) ||
  log=$(journalctl -k -b -q --no-pager -o short-iso 2>/dev/null) || exit 9
[ -n "$log" ] || exit 9
printf "%s\n" "$log" | grep -aiE "oom-kill|out of memory|NVRM: Xid" | tail -n 200
exit 0
