#!/bin/sh
# List folders on disks of the host's own to which the login may write, and not everybody: programs
# will run what is kept there. For each `@@stock disk KIB PATH`, with what is free.
#
# The kinds of file systems are those of mount(8) and of stat(1). No other is touched: it may hang.
# What belongs to the system or to Docker is no place for more.
#
# shellcheck disable=SC2016 # what is quoted is awk's

kinds='^(ext[234]|xfs|btrfs|zfs|f2fs)$'
taken='^/((boot|etc|run|snap|usr)(/.*)?|var|var/lib/(containerd|docker|kubelet).*)?$'
points=$(
  awk -v kinds="$kinds" -v taken="$taken" '$3 ~ kinds && $2 !~ taken { print $2 }' /proc/mounts
)
for point in $points /data /local /raid /scratch /srv /var/lib; do
  case $(stat -f -c %T "$point" 2>/dev/null) in
    ext*|xfs|btrfs|zfs|f2fs|overlayfs) ;;
    *) continue ;;
  esac
  for folder in "$point/$(id -un)" "$point"; do
    if [ ! -d "$folder" ] || [ ! -w "$folder" ] || [ -L "$folder" ]; then continue; fi
    [ -z "$(find "$folder" -maxdepth 0 -perm -o+w)" ] || continue
    printf '@@stock disk %s %s\n' "$(df -Pk "$folder" | awk 'END { print $4 }')" "$folder"
  done
done
