#!/bin/sh
# Print a node's operating system, kernel, CPUs and memory, as `name=value`.

. /etc/os-release 2>/dev/null; printf "system=%s\n" "$PRETTY_NAME"
printf "machine=%s\nkernel=%s\nuid=%s\ncpus=%s\n" "$(uname -m)" "$(uname -r)" "$(id -u)" "$(nproc 2>/dev/null)"
set -- /sys/devices/system/node/node[0-9]*; [ ! -d "$1" ] || printf "numa_nodes=%s\n" $#
sed -n "s/^MemTotal: *\([0-9]*\) kB/memory=\1/p" /proc/meminfo
awk '/^MemTotal:/{t=$2} /^(MemFree|Buffers|Cached|SwapCached|Slab|AnonPages|KernelStack|PageTables|SecPageTables|Percpu|Hugetlb|VmallocUsed):/{u+=$2} END{if(t>u) printf "driver_memory=%d\n", t-u}' /proc/meminfo 2>/dev/null
sed "s/^/port_range=/; s/[[:space:]][[:space:]]*/-/" /proc/sys/net/ipv4/ip_local_port_range
printf "python=%s\n" "$(python3 --version 2>/dev/null)"
