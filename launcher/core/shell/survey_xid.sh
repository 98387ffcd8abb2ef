#!/bin/sh
# Print the kernel's last messages about NVIDIA GPU faults; exit with 9 if the user may not read the
# kernel's log.

log=$(dmesg 2>/dev/null) || log=$(journalctl -k -b -q --no-pager 2>/dev/null) || exit 9
[ -n "$log" ] || exit 9
printf "%s\n" "$log" | grep "NVRM: Xid" | tail -n 20
exit 0
