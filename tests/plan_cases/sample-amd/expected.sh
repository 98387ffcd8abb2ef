#!/usr/bin/env bash
# vlaunch up: cluster mi300x, 2 nodes, from inventory.yaml
# Each `on NODE …` is one command of the run. The run also sets a deadline for it, here and on the node.
set -euo pipefail
{  # read completely before it starts, so that it can be piped into bash

# Quotes each word for any POSIX shell, in any locale; `%q` of printf does not.
quoted() { local q="'"; for word; do printf "'%s' " "${word//$q/$q\\$q$q}"; done; }

on() {
  local node=$1; shift
  case $node in
    mi01) ssh ops@mi01 "$(quoted "$@")" ;;
    mi02) ssh ops@mi02 "$(quoted "$@")" ;;
  esac
}

# Waits for all background jobs; a failed one ends the script.
all() { local job; for job in $(jobs -p); do wait "$job"; done; }

# The run uses the head's token, or creates one; hashes in container labels include it.
: "${RAY_AUTH_TOKEN:=$(openssl rand -hex 32)}"

# The run issues the agents' certificates in memory. Here, the authority's key is in a temporary
# folder, and removed after the last signature.
certificates=$(mktemp -d)
trap 'rm -rf "$certificates"' EXIT
signer=()
issue() {
  local file=$certificates/$1 name=$2; shift 2
  openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$file.key"
  openssl req -x509 -new -key "$file.key" ${signer[@]+"${signer[@]}"} -days 1825 -out "$file.pem" \
    -subj "/O=mi300x/CN=$name" -config <(printf '%s\n' '[req]' distinguished_name=name \
    x509_extensions=more '[name]' '[more]' "$@")
}
issue .ca vlaunch basicConstraints=critical,CA:TRUE,pathlen:0 keyUsage=critical,keyCertSign \
  subjectKeyIdentifier=hash
signer=(-CA "$certificates"/.ca.pem -CAkey "$certificates"/.ca.key)
node() {
  issue "$1" "$1" basicConstraints=critical,CA:FALSE keyUsage=critical,digitalSignature \
    extendedKeyUsage=serverAuth,clientAuth authorityKeyIdentifier=keyid \
    subjectAltName=DNS:"$1",IP:"$2"
  cat "$certificates/$1.key" >>"$certificates/$1.pem"
}
node mi01 10.0.4.1
node mi02 10.0.4.2
rm "$certificates"/.ca.key

# == Pull missing images
on mi01 docker pull --quiet vllm/vllm-openai-rocm:v0.33.0 &
on mi02 docker pull --quiet vllm/vllm-openai-rocm:v0.33.0 &
all

# == Add Ray 2.60.0 to the image
# gate ray-version: all nodes' images run the same Ray and Python

# == Write node programs and secrets
vlaunch payload | on mi01 sh -c 'd=$1; shift
in=${d%/*}
umask 022
mkdir -p "$in" || exit
new=$in/.owner.$(uname -n).$$
me=$(set -C; exec 2>/dev/null 9>"$new" && stat -L -c %u /dev/fd/9 && rm "$new")
own="( -user 0 -o -user $(id -u) -o -user ${me:-0} )"
bad=$(
  find "$in" "$in/." -maxdepth 0 ! "(" $own "(" -type l -o ! -perm -2 -o -perm -1000 ")" ")" \
    -exec ls -ld {} +
  find "$d" "$d/payload" "$d/secrets" "$d/server" "$@" -maxdepth 0 \
    ! "(" $own -type d ! -perm -2 ")" -exec ls -ld {} + 2>/dev/null
)
[ -z "$bad" ] || {
  echo "$bad: another user could change what is kept there: correct it, or set another state_dir" \
    "or cache_dir" >&2
  exit 1
}
mkdir -p "$d/server" "$@" && chmod 711 "$d" || exit
[ -g "$d/server" ] || chmod 700 "$d/server" || :

mkdir -p "$d/payload" && tar -xf - -C "$d/payload"
' unpack /home/ops/.vlaunch/mi300x /home/ops/.vlaunch/cache/mi300x /home/ops/.vlaunch/cache/mi300x/made-for-the-image &
vlaunch payload | on mi02 sh -c 'd=$1; shift
in=${d%/*}
umask 022
mkdir -p "$in" || exit
new=$in/.owner.$(uname -n).$$
me=$(set -C; exec 2>/dev/null 9>"$new" && stat -L -c %u /dev/fd/9 && rm "$new")
own="( -user 0 -o -user $(id -u) -o -user ${me:-0} )"
bad=$(
  find "$in" "$in/." -maxdepth 0 ! "(" $own "(" -type l -o ! -perm -2 -o -perm -1000 ")" ")" \
    -exec ls -ld {} +
  find "$d" "$d/payload" "$d/secrets" "$d/server" "$@" -maxdepth 0 \
    ! "(" $own -type d ! -perm -2 ")" -exec ls -ld {} + 2>/dev/null
)
[ -z "$bad" ] || {
  echo "$bad: another user could change what is kept there: correct it, or set another state_dir" \
    "or cache_dir" >&2
  exit 1
}
mkdir -p "$d/server" "$@" && chmod 711 "$d" || exit
[ -g "$d/server" ] || chmod 700 "$d/server" || :

mkdir -p "$d/payload" && tar -xf - -C "$d/payload"
' unpack /home/ops/.vlaunch/mi300x /home/ops/.vlaunch/cache/mi300x /home/ops/.vlaunch/cache/mi300x/made-for-the-image &
all
printf %s "${RAY_AUTH_TOKEN:?}" | on mi01 sh -c 'umask 077
mkdir -p "$1/secrets" || exit
[ "$3" = disk ] || for d in "${1%/*}" "$1" "$1/secrets"; do
  [ -O "$d" ] && [ ! -L "$d" ] || { echo "$d belongs to another user" >&2; exit 1; }
done
chmod 711 "$1" && chmod 700 "$1/secrets" || exit
new=$1/secrets/.$2.$(uname -n).$$

cat >"$new" && mv "$new" "$1/secrets/$2"
' store /home/ops/.vlaunch/mi300x RAY_AUTH_TOKEN disk &
printf %s "${RAY_AUTH_TOKEN:?}" | on mi02 sh -c 'umask 077
mkdir -p "$1/secrets" || exit
[ "$3" = disk ] || for d in "${1%/*}" "$1" "$1/secrets"; do
  [ -O "$d" ] && [ ! -L "$d" ] || { echo "$d belongs to another user" >&2; exit 1; }
done
chmod 711 "$1" && chmod 700 "$1/secrets" || exit
new=$1/secrets/.$2.$(uname -n).$$

cat >"$new" && mv "$new" "$1/secrets/$2"
' store /home/ops/.vlaunch/mi300x RAY_AUTH_TOKEN disk &
all

# == Write certificates
cat "$certificates"/mi01.pem | on mi01 sh -c 'umask 077
mkdir -p "$1/secrets" || exit
[ "$3" = disk ] || for d in "${1%/*}" "$1" "$1/secrets"; do
  [ -O "$d" ] && [ ! -L "$d" ] || { echo "$d belongs to another user" >&2; exit 1; }
done
chmod 711 "$1" && chmod 700 "$1/secrets" || exit
new=$1/secrets/.$2.$(uname -n).$$

cat >"$new" && mv "$new" "$1/secrets/$2"
' store /home/ops/.vlaunch/mi300x AGENT_CERTIFICATE disk &
cat "$certificates"/mi02.pem | on mi02 sh -c 'umask 077
mkdir -p "$1/secrets" || exit
[ "$3" = disk ] || for d in "${1%/*}" "$1" "$1/secrets"; do
  [ -O "$d" ] && [ ! -L "$d" ] || { echo "$d belongs to another user" >&2; exit 1; }
done
chmod 711 "$1" && chmod 700 "$1/secrets" || exit
new=$1/secrets/.$2.$(uname -n).$$

cat >"$new" && mv "$new" "$1/secrets/$2"
' store /home/ops/.vlaunch/mi300x AGENT_CERTIFICATE disk &
all

# == Trust only the new certificate authority
cat "$certificates"/.ca.pem | on mi01 sh -c 'umask 077
mkdir -p "$1/secrets" || exit
[ "$3" = disk ] || for d in "${1%/*}" "$1" "$1/secrets"; do
  [ -O "$d" ] && [ ! -L "$d" ] || { echo "$d belongs to another user" >&2; exit 1; }
done
chmod 711 "$1" && chmod 700 "$1/secrets" || exit
new=$1/secrets/.$2.$(uname -n).$$

cat >"$new" && mv "$new" "$1/secrets/$2"
' store /home/ops/.vlaunch/mi300x AGENT_CA disk &
cat "$certificates"/.ca.pem | on mi02 sh -c 'umask 077
mkdir -p "$1/secrets" || exit
[ "$3" = disk ] || for d in "${1%/*}" "$1" "$1/secrets"; do
  [ -O "$d" ] && [ ! -L "$d" ] || { echo "$d belongs to another user" >&2; exit 1; }
done
chmod 711 "$1" && chmod 700 "$1/secrets" || exit
new=$1/secrets/.$2.$(uname -n).$$

cat >"$new" && mv "$new" "$1/secrets/$2"
' store /home/ops/.vlaunch/mi300x AGENT_CA disk &
all

# == Start the Ray head
on mi01 docker run --detach --name vlaunch-mi300x-mi01 --network host --ipc private --tmpfs /dev/shm --restart always --device /dev/kfd --device /dev/dri --device /dev/infiniband --cap-add IPC_LOCK --cap-add SYS_PTRACE --group-add video --security-opt seccomp=unconfined --ulimit memlock=-1 --ulimit stack=67108864 --log-opt max-file=5 --log-opt max-size=20m --volume /home/ops/.vlaunch/mi300x/payload:/opt/vlaunch:ro --volume /home/ops/.vlaunch/mi300x/secrets:/run/vlaunch/secrets:ro --volume /home/ops/.vlaunch/mi300x/server:/var/lib/vlaunch --volume /home/ops/.vlaunch/cache/mi300x/made-for-the-image:/var/cache/vlaunch --volume /data/huggingface:/data/huggingface --env AUTOSCALER_UPDATE_INTERVAL_S=1 --env CUDA_CACHE_PATH=/var/cache/vlaunch/cuda --env DG_JIT_CACHE_DIR=/var/cache/vlaunch/deep_gemm --env FLASHINFER_WORKSPACE_BASE=/var/cache/vlaunch/flashinfer --env GLOO_SOCKET_IFNAME=ens51f0np0 --env HF_HOME=/data/huggingface --env NCCL_IB_HCA==rdma0,rdma1,rdma2,rdma3,rdma4,rdma5,rdma6,rdma7 --env NCCL_SOCKET_IFNAME==ens51f0np0 --env RAY_ADDRESS=10.0.4.1:6379 --env RAY_AUTH_MODE=token --env RAY_AUTH_TOKEN_PATH=/run/vlaunch/secrets/RAY_AUTH_TOKEN --env RAY_ROTATION_BACKUP_COUNT=1 --env RAY_ROTATION_MAX_BYTES=67108864 --env RAY_USAGE_STATS_ENABLED=0 --env RAY_gcs_rpc_server_reconnect_timeout_s=15 --env RAY_health_check_failure_threshold=5 --env RAY_health_check_period_ms=1000 --env RAY_memory_monitor_refresh_ms=0 --env RAY_process_group_cleanup_enabled=1 --env RAY_worker_niceness=0 --env TILELANG_CACHE_DIR=/var/cache/vlaunch/tilelang --env TORCHINDUCTOR_CACHE_DIR=/var/cache/vlaunch/inductor --env TP_SOCKET_IFNAME=ens51f0np0 --env TRITON_CACHE_DIR=/var/cache/vlaunch/triton --env UCX_NET_DEVICES=rdma0:1,rdma1:1,rdma2:1,rdma3:1,rdma4:1,rdma5:1,rdma6:1,rdma7:1,ens51f0np0 --env VLLM_CACHE_ROOT=/var/cache/vlaunch/vllm --env VLLM_HOST_IP=10.0.4.1 --label vlaunch.cluster=mi300x --label vlaunch.node=mi01 --label vlaunch.role=head --label vlaunch.secrets=735b158c79f8 --label vlaunch.spec=78f8a1ebe25b --entrypoint /bin/sh vllm/vllm-openai-rocm:v0.33.0 /opt/vlaunch/entry.sh agent --node mi01 --head 10.0.4.1 --port 29560 --lead --metrics-port 29580 --private-shm -- ray start --head --block --node-ip-address 10.0.4.1 --port 6379 --dashboard-host 127.0.0.1 --dashboard-port 8265 --ray-client-server-port 10001 --num-gpus 8 --node-manager-port 6380 --object-manager-port 6381 --runtime-env-agent-port 6382 --dashboard-agent-grpc-port 6383 --dashboard-agent-listen-port 52365 --metrics-export-port 6384 --min-worker-port 10002 --max-worker-port 19999 --disable-usage-stats
# gate head: the Ray head listens

# == Start the Ray workers
on mi02 docker run --detach --name vlaunch-mi300x-mi02 --network host --ipc private --tmpfs /dev/shm --restart always --device /dev/kfd --device /dev/dri --device /dev/infiniband --cap-add IPC_LOCK --cap-add SYS_PTRACE --group-add video --security-opt seccomp=unconfined --ulimit memlock=-1 --ulimit stack=67108864 --log-opt max-file=5 --log-opt max-size=20m --volume /home/ops/.vlaunch/mi300x/payload:/opt/vlaunch:ro --volume /home/ops/.vlaunch/mi300x/secrets:/run/vlaunch/secrets:ro --volume /home/ops/.vlaunch/mi300x/server:/var/lib/vlaunch --volume /home/ops/.vlaunch/cache/mi300x/made-for-the-image:/var/cache/vlaunch --volume /data/huggingface:/data/huggingface --env AUTOSCALER_UPDATE_INTERVAL_S=1 --env CUDA_CACHE_PATH=/var/cache/vlaunch/cuda --env DG_JIT_CACHE_DIR=/var/cache/vlaunch/deep_gemm --env FLASHINFER_WORKSPACE_BASE=/var/cache/vlaunch/flashinfer --env GLOO_SOCKET_IFNAME=ens51f0np0 --env HF_HOME=/data/huggingface --env NCCL_IB_HCA==rdma0,rdma1,rdma2,rdma3,rdma4,rdma5,rdma6,rdma7 --env NCCL_SOCKET_IFNAME==ens51f0np0 --env RAY_ADDRESS=10.0.4.1:6379 --env RAY_AUTH_MODE=token --env RAY_AUTH_TOKEN_PATH=/run/vlaunch/secrets/RAY_AUTH_TOKEN --env RAY_ROTATION_BACKUP_COUNT=1 --env RAY_ROTATION_MAX_BYTES=67108864 --env RAY_USAGE_STATS_ENABLED=0 --env RAY_gcs_rpc_server_reconnect_timeout_s=15 --env RAY_health_check_failure_threshold=5 --env RAY_health_check_period_ms=1000 --env RAY_memory_monitor_refresh_ms=0 --env RAY_process_group_cleanup_enabled=1 --env RAY_worker_niceness=0 --env TILELANG_CACHE_DIR=/var/cache/vlaunch/tilelang --env TORCHINDUCTOR_CACHE_DIR=/var/cache/vlaunch/inductor --env TP_SOCKET_IFNAME=ens51f0np0 --env TRITON_CACHE_DIR=/var/cache/vlaunch/triton --env UCX_NET_DEVICES=rdma0:1,rdma1:1,rdma2:1,rdma3:1,rdma4:1,rdma5:1,rdma6:1,rdma7:1,ens51f0np0 --env VLLM_CACHE_ROOT=/var/cache/vlaunch/vllm --env VLLM_HOST_IP=10.0.4.2 --label vlaunch.cluster=mi300x --label vlaunch.node=mi02 --label vlaunch.role=worker --label vlaunch.secrets=735b158c79f8 --label vlaunch.spec=2e0aa1f31aa7 --entrypoint /bin/sh vllm/vllm-openai-rocm:v0.33.0 /opt/vlaunch/entry.sh agent --node mi02 --head 10.0.4.1 --port 29560 --private-shm -- ray start --block --address 10.0.4.1:6379 --node-ip-address 10.0.4.2 --num-gpus 8 --node-manager-port 6380 --object-manager-port 6381 --runtime-env-agent-port 6382 --dashboard-agent-grpc-port 6383 --dashboard-agent-listen-port 52365 --metrics-export-port 6384 --min-worker-port 10002 --max-worker-port 19999 --disable-usage-stats

# == Verify the Ray cluster
# gate ray-nodes: Ray has exactly 2 nodes with 16 GPUs

# == Verify the agents
# gate agents: all agents are connected to the head

exit
} </dev/null
