#!/bin/sh
# Print everything about a node that is needed before the first change. Changes nothing.
#
# Arguments: cluster, state directory ("" = ~/.vlaunch), Hugging Face home, accelerator, addresses
# of the nodes (one argument), number of images, the images, docker command. Images that vlaunch
# derived are added by their label.
#
# Every part is printed between a line with its name and a line with its exit status. `timeout`
# bounds every part, so that a hung NFS mount or Docker daemon does not delay the others.
#
# shellcheck disable=SC2016 # the quoted code runs in a part's own shell
# shellcheck disable=SC2034 # survey.sh resolves the addresses
# shellcheck disable=SC3067 # dash, bash and busybox support `-O`
# shellcheck disable=SC2086 # images, ids and users' directories contain no blanks

in_memory="$(cat ./folders_in_memory.sh)"
cluster=$1 state=$2 hf=$3 accelerator=$4 peers=$5 words=$6; shift 6
images=; while [ "$words" -gt 0 ]; do images="$images $1"; words=$((words - 1)); shift; done
. ./part.sh
sh_c() { name=$1; text=$2; shift 2; part "$name" sh -c "$text" probe "$@"; }
. ./state_folder.sh
dir=$state/$cluster
memory="$(cat ./place_in_memory.sh)"
mem=$(timeout -k 2 15 sh -c "$memory") || mem=
# Do not read a directory that another user created.
if [ -e "$mem" ] || [ -L "$mem" ]; then { [ -O "$mem" ] && [ ! -L "$mem" ]; } || mem=; fi
[ -z "$mem" ] || mem=$mem/$cluster
part home printf %s "$HOME"
part base printf %s "$state"
part user id -un
part hostname uname -n
part addr ip -j addr
sh_c listen 'ss -ltnH 2>/dev/null || netstat -ltn'
sh_c disk 'd=$1; while [ ! -d "$d" ]; do d=$(dirname "$d"); done; df -Pk "$d"' "$hf"
sh_c state '
  d=$1; while [ ! -e "$d" ]; do d=$(dirname "$d"); done
  point=$(df -P "$d" | awk "END { print \$NF }")
  if [ -d "$d" ] && [ -w "$d" ] && [ -x "$d" ]; then echo writable
  elif grep -q "^[^ ]* $point [^ ]* ro[, ]" /proc/mounts; then echo read-only
  else echo closed; fi
  df -Pk "$d"
' "$dir"
# With the labels of mounted directories, which SELinux may deny to containers.
sh_c selinux '
  cat /sys/fs/selinux/enforce 2>/dev/null || exit
  for each; do [ ! -e "$each" ] || stat -c "%C %n" "$each"; done
' "$hf" "$state"
part infiniband ls /dev/infiniband
sh_c toolkit 'command -v nvidia-container-runtime-hook nvidia-container-toolkit'
if [ "$accelerator" = nvidia ]; then
  query=index,name,memory.total,memory.used,driver_version,uuid
  part gpus nvidia-smi "--query-gpu=$query" --format=csv,noheader,nounits
  # Do not query a hung driver again.
  [ "$answers" = 124 ] || sh_c gpuapps "$(cat ./gpu_processes.sh)"
elif [ "$accelerator" = amd ]; then
  sh_c gpus '
    found=$(grep -l "simd_count [1-9]" /sys/class/kfd/kfd/topology/nodes/*/properties) || exit
    for each in $found; do echo "$each $(grep drm_render_minor "$each")"; done
  '
fi
# Without the engines' logs and stacks, which are large. The supervisor replaces files concurrently:
# ignore a file that disappears.
sh_c files '
  cd "$1" 2>/dev/null || exit
  find . -type f ! -path "./secrets/*" ! -path "./server/*/engine.log*" \
    ! -name 'VLLM_STACK_DUMP_*' \
    -exec sha256sum {} + 2>/dev/null
  :
' "$dir"
part memory sh -c "$memory"
sh_c kept '[ -d "$1" ] && ls "$1/secrets"' "$mem"
sh_c folders "$in_memory" "$cluster"
# Include former locations in memory: running containers use the token there and reject a new one.
places=$(timeout -k 2 15 sh -c "$in_memory" probe "$cluster")
sh_c token 'for each; do cat "$each/secrets/RAY_AUTH_TOKEN" 2>/dev/null && break; done' \
  "$dir" ${mem:+"$mem"} $places
sh_c secrets 'ls "$1/secrets" 2>/dev/null' "$dir"
sh_c certificates "$(cat ./certificates.sh)" "$dir" ${mem:+"$mem"} $places
# Its first certificate, without its authorities'.
sh_c front '
  for each; do
    [ ! -e "$each/front/tls.pem" ] || exec sed -n "/-BEGIN CERTIFICATE-/,/-END CERTIFICATE-/p
      /-END CERTIFICATE-/q" "$each/front/tls.pem"
  done
' ${mem:+"$mem"} "$dir" $places
part docker "$@" version --format '{{json .Server}}'
docker=$answers
# Do not query a daemon five more times after it failed once: the result must arrive before the
# deadline.
if [ "$docker" = 0 ]; then
  part info "$@" info --format '{{json .}}'
  made=$(timeout -k 2 15 "$@" images --filter label=vlaunch.image.content \
    --format '{{.Repository}}:{{.Tag}}' 2>/dev/null)
  for image in $images $made; do part "image $image" "$@" image inspect "$image"; done
  root=$(timeout -k 2 15 "$@" info --format '{{.DockerRootDir}}' 2>/dev/null)
  sh_c dockerdisk 'df -Pk "$1"' "$root"
fi
if [ "$docker" = 0 ] && [ "$accelerator" = nvidia ]; then
  ids=$(timeout -k 2 15 "$@" ps --quiet --no-trunc --filter label=vlaunch.cluster 2>/dev/null)
  asked='{{json (index .Config.Labels "vlaunch.cluster")}}, {{json .HostConfig.DeviceRequests}}'
  [ -z "$ids" ] || part given "$@" inspect --format "[{{json .Name}}, $asked]" $ids
fi
printf '\n@@vlaunch containers\n'
if [ "$docker" = 0 ]; then
  ids=$(timeout -k 2 15 "$@" ps --all --quiet --no-trunc \
    --filter "label=vlaunch.cluster=$cluster" 2>/dev/null)
  [ -z "$ids" ] || timeout -k 2 15 "$@" inspect $ids 2>&1
fi
printf '\n@@vlaunch rc 0\n'
