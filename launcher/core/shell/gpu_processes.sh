#!/bin/sh
# Print the processes on NVIDIA GPUs, with user and cgroup if the process is visible from this PID
# namespace. Fields: `nvidia-smi --help-query-compute-apps`.

fields=gpu_uuid,pid,process_name,used_memory
apps=$(nvidia-smi "--query-compute-apps=$fields" --format=csv,noheader,nounits) || exit
printf "%s\n" "$apps"
for pid in $(printf "%s\n" "$apps" | awk -F ", *" "{print \$2}"); do
  [ -d "/proc/$pid" ] || continue
  user=$(ps -o user= -p "$pid" 2>/dev/null || stat -c %U "/proc/$pid")
  printf "@%s %s %s\n" "$pid" "$user" "$(tr "\n" " " <"/proc/$pid/cgroup")"
done
