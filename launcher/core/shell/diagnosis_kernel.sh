#!/bin/sh
# Print NVIDIA's driver and models of GPUs, and the kernel's last words about memory that ran out and
# faults of NVIDIA cards; ends with 9 where they may not be read.

grep -h "^NVRM version" /proc/driver/nvidia/version 2>/dev/null
grep -h "^Model:" /proc/driver/nvidia/gpus/*/information 2>/dev/null | sort -u

log=$(dmesg --time-format=iso 2>/dev/null) ||
  log=$(journalctl -k -b -q --no-pager -o short-iso 2>/dev/null) || exit 9
[ -n "$log" ] || exit 9
printf "%s\n" "$log" | grep -aiE "oom-kill|out of memory|NVRM: Xid" | tail -n 200
exit 0
