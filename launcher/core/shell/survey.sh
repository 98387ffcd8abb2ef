#!/bin/sh
# Tell what probe.sh tells, and then what the node is made of; it changes nothing.
#
# Arguments: as for probe.sh. Standard input: the launcher's clock as it sent this, in seconds since
# 1970. That is read before anything else, for it ages, and after it no program may read what is
# left there.
#
# Files of sysfs are printed as `path:value` by one `grep` a group, because a node has hundreds of
# them, and a process for each is slow.
#
# shellcheck disable=SC2016 # what is quoted is for the shell of a part
# shellcheck disable=SC2086,SC2154 # addresses are words; probe.sh sets them

sent=$(timeout -k 1 2 head -n1) now=$(date +%s.%N)
exec </dev/null
. ./probe.sh

printf '\n@@vlaunch clock\n%s %s\n@@vlaunch rc 0\n' "$sent" "$now"
sh_c system "$(cat ./survey_system.sh)"
part shm df -Pk /dev/shm
sh_c names "$(cat ./survey_names.sh)" $peers
sh_c synced 'timedatectl show --property NTPSynchronized 2>/dev/null || chronyc -n tracking'
part link ip -j -d link
part route ip -j route show default
sh_c net "$(cat ./survey_net.sh)"
sh_c rdma "$(cat ./survey_rdma.sh)"
modules='^(nvidia|nv_peer|gdrdrv|mlx|ib_|rdma|irdma|bnxt|efa|iw_|amdgpu|peer)[^ ]*'
sh_c modules '[ ! -r /proc/modules ] || grep -oE "$1" /proc/modules' "$modules"
sh_c xid "$(cat ./survey_xid.sh)"
if command -v nvidia-smi >/dev/null 2>&1; then
  # Its fields: `nvidia-smi --help-query-gpu`.
  fields=index,ecc.errors.uncorrected.volatile.total,display_active,mig.mode.current
  part gpustate nvidia-smi "--query-gpu=$fields" --format=csv,noheader,nounits
  # The card may be wedged: what has not answered once is not asked three times more.
  if [ "$answers" != 124 ]; then
    part topo nvidia-smi topo -m
    sh_c fabric "$(cat ./survey_fabric.sh)"
    sh_c imex 'ls /dev/nvidia-caps-imex-channels 2>/dev/null; :'
  fi
fi
sh_c logind "$(cat ./survey_logind.sh)"
sh_c boot "$(cat ./survey_boot.sh)"
part survey true
