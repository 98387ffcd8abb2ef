#!/bin/sh
# List a host's usable assets: Hugging Face homes with their models, AMD GPUs, directories on local
# disks, and vLLM images.
#
# Runs after probe.sh, which sets $hf and leaves the docker command in "$@". Models in a cache are
# `hub/models--OWNER--NAME` (https://huggingface.co/docs/huggingface_hub/guides/manage-cache).
#
# shellcheck disable=SC2016 # quoted awk code
# shellcheck disable=SC2154 # probe.sh sets it
# shellcheck disable=SC2086 # image names contain no blanks

for home in "$hf" /data/huggingface "${HF_HOME:-}" "$HOME/.cache/huggingface"; do
  timeout 5 test -d "${home:-/nonexistent}" || continue
  free=$(timeout 10 df -Pk "$home" 2>/dev/null | awk 'END { print $4 }')
  printf '@@stock home %s %s\n' "$free" "$home"
  for model in "$home"/hub/models--*/; do
    [ -d "$model" ] && printf '@@stock model %s\n' "$(basename "$model")"
  done
done
printf '@@stock amd '
grep -l 'simd_count [1-9]' /sys/class/kfd/kfd/topology/nodes/*/properties 2>/dev/null | wc -l
timeout -k 2 15 sh -c "$(cat ./own_disks.sh)"
names=$(timeout -k 2 15 "$@" images --format '{{.Repository}}:{{.Tag}}' 2>/dev/null |
  grep -i vllm | grep -v '<none>' | head -n 40)
printf '@@stock images\n'
[ -z "$names" ] || timeout -k 2 15 "$@" image inspect $names 2>/dev/null
printf '\n@@stock end\n'
