#!/bin/sh
# Print the output of probe.sh, then the node's hardware and settings. Changes nothing.
#
# Arguments: as for probe.sh. Standard input: the launcher's clock when it sent this, in seconds
# since 1970. It is read first, because it ages; the rest of standard input is closed to all
# programs.
#
# One `grep` per group prints files of sysfs as `path:value`: a node has hundreds of them, and a
# process for every file is slow.
#
# shellcheck disable=SC2016 # the quoted code runs in a part's own shell
# shellcheck disable=SC2086,SC2154 # addresses contain no blanks; probe.sh sets the variables

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
  # Fields: `nvidia-smi --help-query-gpu`.
  fields=index,ecc.errors.uncorrected.volatile.total,display_active,mig.mode.current
  part gpustate nvidia-smi "--query-gpu=$fields" --format=csv,noheader,nounits
  # Do not query a hung GPU three more times.
  if [ "$answers" != 124 ]; then
    part topo nvidia-smi topo -m
    sh_c fabric "$(cat ./survey_fabric.sh)"
    sh_c imex 'ls /dev/nvidia-caps-imex-channels 2>/dev/null; :'
  fi
fi
sh_c logind "$(cat ./survey_logind.sh)"
sh_c boot "$(cat ./survey_boot.sh)"
part survey true
