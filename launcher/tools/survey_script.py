"""The shell text that asks a node what it is made of; it only reads, and goes with the probe's
script (`launcher.tools.host`).

Sysfs files are printed as `path:value` by one `grep` a group, because a node has hundreds of them
and a process each is slow.
"""

from __future__ import annotations

# Before anything else: the launcher's clock is on standard input and ages. After it no program may
# read what is left there.
CLOCK = r"""
sent=$(timeout -k 1 2 head -n1) now=$(date +%s.%N)
exec </dev/null
"""

# nvidia-smi's fields: `nvidia-smi --help-query-gpu` and `--help-query-compute-apps`.
PARTS = r"""
printf '\n@@vlaunch clock\n%s %s\n@@vlaunch rc 0\n' "$sent" "$now"
sh_c system '
  . /etc/os-release 2>/dev/null; printf "system=%s\n" "$PRETTY_NAME"
  printf "kernel=%s\nuid=%s\ncpus=%s\n" "$(uname -r)" "$(id -u)" "$(nproc 2>/dev/null)"
  printf "boot_id=%s\n" "$(cat /proc/sys/kernel/random/boot_id 2>/dev/null)"
  set -- /sys/devices/system/node/node[0-9]*; [ ! -d "$1" ] || printf "numa_nodes=%s\n" $#
  sed -n "s/^MemTotal: *\([0-9]*\) kB/memory=\1/p" /proc/meminfo
  printf "python=%s\n" "$(python3 --version 2>/dev/null)"
'
part shm df -Pk /dev/shm
sh_c own 'getent ahosts "$(uname -n)"'
sh_c synced 'timedatectl show --property NTPSynchronized 2>/dev/null || chronyc -n tracking'
part link ip -j -d link
part route ip -j route show default
sh_c net '
  cd /sys/class/net || exit
  grep -H "" */speed */mtu */operstate */device/numa_node 2>/dev/null
  for each in */device; do
    [ -e "$each" ] || continue
    printf "%s/pci:%s\n%s/driver:%s\n" "$each" "$(readlink -f "$each")" "$each" "$(readlink "$each/driver")"
  done
'
sh_c rdma '
  cd /sys/class/infiniband 2>/dev/null || exit 0
  grep -H "" */hca_type */board_id */fw_ver */device/numa_node */ports/*/state */ports/*/phys_state */ports/*/rate \
    */ports/*/link_layer 2>/dev/null
  grep -H "" */ports/*/gids/* 2>/dev/null | grep -v 0000:0000:0000:0000:0000:0000:0000:0000
  grep -H "" */ports/*/gid_attrs/types/* */ports/*/gid_attrs/ndevs/* 2>/dev/null
  for each in */device; do [ ! -e "$each" ] || printf "%s/pci:%s\n" "$each" "$(readlink -f "$each")"; done
  for each in */device/net/*; do [ ! -e "$each" ] || printf "%s:\n" "$each"; done
'
sh_c modules '
  [ ! -r /proc/modules ] || grep -oE "^(nvidia|nv_peer|gdrdrv|mlx|ib_|rdma|irdma|bnxt|efa|iw_|amdgpu|peer)[^ ]*" /proc/modules
'
sh_c xid '
  log=$(dmesg 2>/dev/null) || log=$(journalctl -k -b -q --no-pager 2>/dev/null) || exit 9
  [ -n "$log" ] || exit 9
  printf "%s\n" "$log" | grep "NVRM: Xid" | tail -n 20; exit 0
'
if command -v nvidia-smi >/dev/null 2>&1; then
  fields=index,uuid,pci.bus_id,ecc.errors.uncorrected.volatile.total
  part gpustate nvidia-smi "--query-gpu=$fields" --format=csv,noheader,nounits
  # The card may be wedged: what has not answered once is not asked three times more.
  if [ "$answers" != 124 ]; then
    sh_c cuda 'said=$(nvidia-smi --version 2>/dev/null | grep CUDA) || said=$(nvidia-smi | grep CUDA); printf "%s\n" "$said"'
    part topo nvidia-smi topo -m
    sh_c gpunuma 'cd /sys/bus/pci/drivers/nvidia && grep -H "" *:*/numa_node'
    sh_c gpuapps '
      apps=$(nvidia-smi --query-compute-apps=gpu_uuid,pid,process_name,used_memory --format=csv,noheader,nounits) || exit
      printf "%s\n" "$apps"
      for pid in $(printf "%s\n" "$apps" | awk -F ", *" "{print \$2}"); do
        [ -d "/proc/$pid" ] || continue
        printf "@%s %s %s\n" "$pid" "$(ps -o user= -p "$pid" 2>/dev/null || stat -c %U "/proc/$pid")" \
          "$(tr "\n" " " <"/proc/$pid/cgroup")"
      done
    '
  fi
fi
sh_c models 'cd "$1/hub" 2>/dev/null && for each in models--*; do [ ! -d "$each" ] || du -sk "$each"; done' "$hf"
sh_c logind '
  command -v loginctl >/dev/null || exit 127
  for each in /usr/lib/systemd/logind.conf /etc/systemd/logind.conf /usr/lib/systemd/logind.conf.d/*.conf \
    /run/systemd/logind.conf.d/*.conf /etc/systemd/logind.conf.d/*.conf; do
    [ ! -f "$each" ] || sed -n "s/^ *\(RemoveIPC\) *= */\1=/p" "$each"
  done
  user=$(id -un)
  loginctl show-user "$user" --property Linger 2>/dev/null && exit
  [ -e "/var/lib/systemd/linger/$user" ] && echo Linger=yes || echo Linger=no
'
sh_c boot '
  newest=$(ls /boot/vmlinuz-* 2>/dev/null | grep -v rescue | sort -V | tail -n 1); newest=${newest##*/vmlinuz-}
  [ -n "$newest" ] || exit 0
  printf "next=%s\n" "$newest"
  [ -d "/lib/modules/$newest" ] || exit 0
  [ -n "$(find "/lib/modules/$newest" -name "nvidia.ko*" 2>/dev/null | head -n 1)" ] && echo driver=yes || echo driver=no
'
part survey true
"""
