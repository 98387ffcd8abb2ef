#!/bin/sh
# List directories on local disks that the user may write and other users may not: programs stored
# in them will run. Output: `@@stock disk KIB PATH`, with the free space.
#
# File system types are those of mount(8) and stat(1). Other types are not accessed: they may hang.
# Directories of the system and of Docker are excluded.
#
# shellcheck disable=SC2016 # quoted awk code

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
