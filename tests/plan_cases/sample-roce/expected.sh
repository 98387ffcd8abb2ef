#!/usr/bin/env bash
# vlaunch up: cluster roce, 4 nodes, from inventory.yaml
# Each `on NODE …` is one command of the run. The run also sets a deadline for it, here and on the node.
set -euo pipefail
{  # read completely before it starts, so that it can be piped into bash

# Quotes each word for any POSIX shell, in any locale; `%q` of printf does not.
quoted() { local q="'"; for word; do printf "'%s' " "${word//$q/$q\\$q$q}"; done; }

on() {
  local node=$1; shift
  case $node in
    node1) ssh -J bastion.example ops@node1 "$(quoted "$@")" ;;
    node2) ssh -J bastion.example ops@node2 "$(quoted "$@")" ;;
    node3) ssh -J bastion.example ops@node3 "$(quoted "$@")" ;;
    node4) ssh -J bastion.example ops@node4 "$(quoted "$@")" ;;
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
    -subj "/O=roce/CN=$name" -config <(printf '%s\n' '[req]' distinguished_name=name \
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
node node1 10.10.0.1
node node2 10.10.0.2
node node3 10.10.0.3
node node4 10.10.0.4
rm "$certificates"/.ca.key

# == Pull missing images
on node1 sudo -n docker pull --quiet vllm/vllm-openai:v0.33.0 &
on node2 sudo -n docker pull --quiet vllm/vllm-openai:v0.33.0 &
on node3 sudo -n docker pull --quiet vllm/vllm-openai:v0.33.0 &
on node4 sudo -n docker pull --quiet vllm/vllm-openai:v0.33.0 &
all

# == Add Ray 2.60.0 to the image
# gate ray-version: all nodes' images run the same Ray and Python

# == Write node programs and secrets
vlaunch payload | on node1 sh -c 'd=$1; shift
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
' unpack /home/ops/.vlaunch/roce /home/ops/.vlaunch/cache/roce /home/ops/.vlaunch/cache/roce/made-for-the-image &
vlaunch payload | on node2 sh -c 'd=$1; shift
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
' unpack /home/ops/.vlaunch/roce /home/ops/.vlaunch/cache/roce /home/ops/.vlaunch/cache/roce/made-for-the-image &
vlaunch payload | on node3 sh -c 'd=$1; shift
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
' unpack /home/ops/.vlaunch/roce /home/ops/.vlaunch/cache/roce /home/ops/.vlaunch/cache/roce/made-for-the-image &
vlaunch payload | on node4 sh -c 'd=$1; shift
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
' unpack /home/ops/.vlaunch/roce /home/ops/.vlaunch/cache/roce /home/ops/.vlaunch/cache/roce/made-for-the-image &
all
printf %s "${RAY_AUTH_TOKEN:?}" | on node1 sh -c 'umask 077
mkdir -p "$1/secrets" || exit
[ "$3" = disk ] || for d in "${1%/*}" "$1" "$1/secrets"; do
  [ -O "$d" ] && [ ! -L "$d" ] || { echo "$d belongs to another user" >&2; exit 1; }
done
chmod 711 "$1" && chmod 700 "$1/secrets" || exit
new=$1/secrets/.$2.$(uname -n).$$

cat >"$new" && mv "$new" "$1/secrets/$2"
' store /home/ops/.vlaunch/roce RAY_AUTH_TOKEN disk &
printf %s "${RAY_AUTH_TOKEN:?}" | on node2 sh -c 'umask 077
mkdir -p "$1/secrets" || exit
[ "$3" = disk ] || for d in "${1%/*}" "$1" "$1/secrets"; do
  [ -O "$d" ] && [ ! -L "$d" ] || { echo "$d belongs to another user" >&2; exit 1; }
done
chmod 711 "$1" && chmod 700 "$1/secrets" || exit
new=$1/secrets/.$2.$(uname -n).$$

cat >"$new" && mv "$new" "$1/secrets/$2"
' store /home/ops/.vlaunch/roce RAY_AUTH_TOKEN disk &
printf %s "${RAY_AUTH_TOKEN:?}" | on node3 sh -c 'umask 077
mkdir -p "$1/secrets" || exit
[ "$3" = disk ] || for d in "${1%/*}" "$1" "$1/secrets"; do
  [ -O "$d" ] && [ ! -L "$d" ] || { echo "$d belongs to another user" >&2; exit 1; }
done
chmod 711 "$1" && chmod 700 "$1/secrets" || exit
new=$1/secrets/.$2.$(uname -n).$$

cat >"$new" && mv "$new" "$1/secrets/$2"
' store /home/ops/.vlaunch/roce RAY_AUTH_TOKEN disk &
printf %s "${RAY_AUTH_TOKEN:?}" | on node4 sh -c 'umask 077
mkdir -p "$1/secrets" || exit
[ "$3" = disk ] || for d in "${1%/*}" "$1" "$1/secrets"; do
  [ -O "$d" ] && [ ! -L "$d" ] || { echo "$d belongs to another user" >&2; exit 1; }
done
chmod 711 "$1" && chmod 700 "$1/secrets" || exit
new=$1/secrets/.$2.$(uname -n).$$

cat >"$new" && mv "$new" "$1/secrets/$2"
' store /home/ops/.vlaunch/roce RAY_AUTH_TOKEN disk &
all

# == Write certificates
cat "$certificates"/node1.pem | on node1 sh -c 'umask 077
mkdir -p "$1/secrets" || exit
[ "$3" = disk ] || for d in "${1%/*}" "$1" "$1/secrets"; do
  [ -O "$d" ] && [ ! -L "$d" ] || { echo "$d belongs to another user" >&2; exit 1; }
done
chmod 711 "$1" && chmod 700 "$1/secrets" || exit
new=$1/secrets/.$2.$(uname -n).$$

cat >"$new" && mv "$new" "$1/secrets/$2"
' store /home/ops/.vlaunch/roce AGENT_CERTIFICATE disk &
cat "$certificates"/node2.pem | on node2 sh -c 'umask 077
mkdir -p "$1/secrets" || exit
[ "$3" = disk ] || for d in "${1%/*}" "$1" "$1/secrets"; do
  [ -O "$d" ] && [ ! -L "$d" ] || { echo "$d belongs to another user" >&2; exit 1; }
done
chmod 711 "$1" && chmod 700 "$1/secrets" || exit
new=$1/secrets/.$2.$(uname -n).$$

cat >"$new" && mv "$new" "$1/secrets/$2"
' store /home/ops/.vlaunch/roce AGENT_CERTIFICATE disk &
cat "$certificates"/node3.pem | on node3 sh -c 'umask 077
mkdir -p "$1/secrets" || exit
[ "$3" = disk ] || for d in "${1%/*}" "$1" "$1/secrets"; do
  [ -O "$d" ] && [ ! -L "$d" ] || { echo "$d belongs to another user" >&2; exit 1; }
done
chmod 711 "$1" && chmod 700 "$1/secrets" || exit
new=$1/secrets/.$2.$(uname -n).$$

cat >"$new" && mv "$new" "$1/secrets/$2"
' store /home/ops/.vlaunch/roce AGENT_CERTIFICATE disk &
cat "$certificates"/node4.pem | on node4 sh -c 'umask 077
mkdir -p "$1/secrets" || exit
[ "$3" = disk ] || for d in "${1%/*}" "$1" "$1/secrets"; do
  [ -O "$d" ] && [ ! -L "$d" ] || { echo "$d belongs to another user" >&2; exit 1; }
done
chmod 711 "$1" && chmod 700 "$1/secrets" || exit
new=$1/secrets/.$2.$(uname -n).$$

cat >"$new" && mv "$new" "$1/secrets/$2"
' store /home/ops/.vlaunch/roce AGENT_CERTIFICATE disk &
all

# == Trust only the new certificate authority
cat "$certificates"/.ca.pem | on node1 sh -c 'umask 077
mkdir -p "$1/secrets" || exit
[ "$3" = disk ] || for d in "${1%/*}" "$1" "$1/secrets"; do
  [ -O "$d" ] && [ ! -L "$d" ] || { echo "$d belongs to another user" >&2; exit 1; }
done
chmod 711 "$1" && chmod 700 "$1/secrets" || exit
new=$1/secrets/.$2.$(uname -n).$$

cat >"$new" && mv "$new" "$1/secrets/$2"
' store /home/ops/.vlaunch/roce AGENT_CA disk &
cat "$certificates"/.ca.pem | on node2 sh -c 'umask 077
mkdir -p "$1/secrets" || exit
[ "$3" = disk ] || for d in "${1%/*}" "$1" "$1/secrets"; do
  [ -O "$d" ] && [ ! -L "$d" ] || { echo "$d belongs to another user" >&2; exit 1; }
done
chmod 711 "$1" && chmod 700 "$1/secrets" || exit
new=$1/secrets/.$2.$(uname -n).$$

cat >"$new" && mv "$new" "$1/secrets/$2"
' store /home/ops/.vlaunch/roce AGENT_CA disk &
cat "$certificates"/.ca.pem | on node3 sh -c 'umask 077
mkdir -p "$1/secrets" || exit
[ "$3" = disk ] || for d in "${1%/*}" "$1" "$1/secrets"; do
  [ -O "$d" ] && [ ! -L "$d" ] || { echo "$d belongs to another user" >&2; exit 1; }
done
chmod 711 "$1" && chmod 700 "$1/secrets" || exit
new=$1/secrets/.$2.$(uname -n).$$

cat >"$new" && mv "$new" "$1/secrets/$2"
' store /home/ops/.vlaunch/roce AGENT_CA disk &
cat "$certificates"/.ca.pem | on node4 sh -c 'umask 077
mkdir -p "$1/secrets" || exit
[ "$3" = disk ] || for d in "${1%/*}" "$1" "$1/secrets"; do
  [ -O "$d" ] && [ ! -L "$d" ] || { echo "$d belongs to another user" >&2; exit 1; }
done
chmod 711 "$1" && chmod 700 "$1/secrets" || exit
new=$1/secrets/.$2.$(uname -n).$$

cat >"$new" && mv "$new" "$1/secrets/$2"
' store /home/ops/.vlaunch/roce AGENT_CA disk &
all

# == Start the Ray head
on node1 sudo -n docker run --detach --name vlaunch-roce-node1 --network host --ipc private --tmpfs /dev/shm --restart always --gpus 8 --device /dev/infiniband --cap-add IPC_LOCK --ulimit memlock=-1 --ulimit stack=67108864 --log-opt max-file=5 --log-opt max-size=20m --volume /home/ops/.vlaunch/roce/payload:/opt/vlaunch:ro --volume /home/ops/.vlaunch/roce/secrets:/run/vlaunch/secrets:ro --volume /home/ops/.vlaunch/roce/server:/var/lib/vlaunch --volume /home/ops/.vlaunch/cache/roce/made-for-the-image:/var/cache/vlaunch --volume /data/huggingface:/data/huggingface --env AUTOSCALER_UPDATE_INTERVAL_S=1 --env CUDA_CACHE_PATH=/var/cache/vlaunch/cuda --env CUDA_DEVICE_ORDER=PCI_BUS_ID --env DG_JIT_CACHE_DIR=/var/cache/vlaunch/deep_gemm --env FLASHINFER_WORKSPACE_BASE=/var/cache/vlaunch/flashinfer --env GLOO_SOCKET_IFNAME=bond0 --env HF_HOME=/data/huggingface --env NCCL_IB_HCA==mlx5_0,mlx5_3 --env NCCL_IB_TC=106 --env NCCL_SOCKET_IFNAME==bond0 --env NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME==bond0 --env NVSHMEM_HCA_LIST=mlx5_0,mlx5_3 --env RAY_ADDRESS=10.10.0.1:6379 --env RAY_AUTH_MODE=token --env RAY_AUTH_TOKEN_PATH=/run/vlaunch/secrets/RAY_AUTH_TOKEN --env RAY_ROTATION_BACKUP_COUNT=1 --env RAY_ROTATION_MAX_BYTES=67108864 --env RAY_USAGE_STATS_ENABLED=0 --env RAY_gcs_rpc_server_reconnect_timeout_s=15 --env RAY_health_check_failure_threshold=5 --env RAY_health_check_period_ms=1000 --env RAY_memory_monitor_refresh_ms=0 --env RAY_process_group_cleanup_enabled=1 --env RAY_worker_niceness=0 --env TILELANG_CACHE_DIR=/var/cache/vlaunch/tilelang --env TORCHINDUCTOR_CACHE_DIR=/var/cache/vlaunch/inductor --env TP_SOCKET_IFNAME=bond0 --env TRITON_CACHE_DIR=/var/cache/vlaunch/triton --env UCX_NET_DEVICES=mlx5_0:1,mlx5_3:1,bond0 --env VLLM_CACHE_ROOT=/var/cache/vlaunch/vllm --env VLLM_HOST_IP=10.10.0.1 --label vlaunch.cluster=roce --label vlaunch.node=node1 --label vlaunch.role=head --label vlaunch.secrets=735b158c79f8 --label vlaunch.spec=571248be38c1 --entrypoint /bin/sh vllm/vllm-openai:v0.33.0 /opt/vlaunch/entry.sh agent --node node1 --head 10.10.0.1 --port 29560 --lead --metrics-port 29580 --private-shm -- ray start --head --block --node-ip-address 10.10.0.1 --port 6379 --dashboard-host 127.0.0.1 --dashboard-port 8265 --ray-client-server-port 10001 --num-gpus 8 --node-manager-port 6380 --object-manager-port 6381 --runtime-env-agent-port 6382 --dashboard-agent-grpc-port 6383 --dashboard-agent-listen-port 52365 --metrics-export-port 6384 --min-worker-port 10002 --max-worker-port 19999 --disable-usage-stats
# gate head: the Ray head listens

# == Start the Ray workers
on node2 sudo -n docker run --detach --name vlaunch-roce-node2 --network host --ipc private --tmpfs /dev/shm --restart always --gpus 8 --device /dev/infiniband --cap-add IPC_LOCK --ulimit memlock=-1 --ulimit stack=67108864 --log-opt max-file=5 --log-opt max-size=20m --volume /home/ops/.vlaunch/roce/payload:/opt/vlaunch:ro --volume /home/ops/.vlaunch/roce/secrets:/run/vlaunch/secrets:ro --volume /home/ops/.vlaunch/roce/server:/var/lib/vlaunch --volume /home/ops/.vlaunch/cache/roce/made-for-the-image:/var/cache/vlaunch --volume /data/huggingface:/data/huggingface --env AUTOSCALER_UPDATE_INTERVAL_S=1 --env CUDA_CACHE_PATH=/var/cache/vlaunch/cuda --env CUDA_DEVICE_ORDER=PCI_BUS_ID --env DG_JIT_CACHE_DIR=/var/cache/vlaunch/deep_gemm --env FLASHINFER_WORKSPACE_BASE=/var/cache/vlaunch/flashinfer --env GLOO_SOCKET_IFNAME=bond0 --env HF_HOME=/data/huggingface --env NCCL_IB_HCA==mlx5_0,mlx5_3 --env NCCL_IB_TC=106 --env NCCL_SOCKET_IFNAME==bond0 --env NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME==bond0 --env NVSHMEM_HCA_LIST=mlx5_0,mlx5_3 --env RAY_ADDRESS=10.10.0.1:6379 --env RAY_AUTH_MODE=token --env RAY_AUTH_TOKEN_PATH=/run/vlaunch/secrets/RAY_AUTH_TOKEN --env RAY_ROTATION_BACKUP_COUNT=1 --env RAY_ROTATION_MAX_BYTES=67108864 --env RAY_USAGE_STATS_ENABLED=0 --env RAY_gcs_rpc_server_reconnect_timeout_s=15 --env RAY_health_check_failure_threshold=5 --env RAY_health_check_period_ms=1000 --env RAY_memory_monitor_refresh_ms=0 --env RAY_process_group_cleanup_enabled=1 --env RAY_worker_niceness=0 --env TILELANG_CACHE_DIR=/var/cache/vlaunch/tilelang --env TORCHINDUCTOR_CACHE_DIR=/var/cache/vlaunch/inductor --env TP_SOCKET_IFNAME=bond0 --env TRITON_CACHE_DIR=/var/cache/vlaunch/triton --env UCX_NET_DEVICES=mlx5_0:1,mlx5_3:1,bond0 --env VLLM_CACHE_ROOT=/var/cache/vlaunch/vllm --env VLLM_HOST_IP=10.10.0.2 --label vlaunch.cluster=roce --label vlaunch.node=node2 --label vlaunch.role=worker --label vlaunch.secrets=735b158c79f8 --label vlaunch.spec=beab48f5e9a2 --entrypoint /bin/sh vllm/vllm-openai:v0.33.0 /opt/vlaunch/entry.sh agent --node node2 --head 10.10.0.1 --port 29560 --private-shm -- ray start --block --address 10.10.0.1:6379 --node-ip-address 10.10.0.2 --num-gpus 8 --node-manager-port 6380 --object-manager-port 6381 --runtime-env-agent-port 6382 --dashboard-agent-grpc-port 6383 --dashboard-agent-listen-port 52365 --metrics-export-port 6384 --min-worker-port 10002 --max-worker-port 19999 --disable-usage-stats &
on node3 sudo -n docker run --detach --name vlaunch-roce-node3 --network host --ipc private --tmpfs /dev/shm --restart always --gpus 8 --device /dev/infiniband --cap-add IPC_LOCK --ulimit memlock=-1 --ulimit stack=67108864 --log-opt max-file=5 --log-opt max-size=20m --volume /home/ops/.vlaunch/roce/payload:/opt/vlaunch:ro --volume /home/ops/.vlaunch/roce/secrets:/run/vlaunch/secrets:ro --volume /home/ops/.vlaunch/roce/server:/var/lib/vlaunch --volume /home/ops/.vlaunch/cache/roce/made-for-the-image:/var/cache/vlaunch --volume /data/huggingface:/data/huggingface --env AUTOSCALER_UPDATE_INTERVAL_S=1 --env CUDA_CACHE_PATH=/var/cache/vlaunch/cuda --env CUDA_DEVICE_ORDER=PCI_BUS_ID --env DG_JIT_CACHE_DIR=/var/cache/vlaunch/deep_gemm --env FLASHINFER_WORKSPACE_BASE=/var/cache/vlaunch/flashinfer --env GLOO_SOCKET_IFNAME=bond0 --env HF_HOME=/data/huggingface --env NCCL_IB_HCA==mlx5_0,mlx5_3 --env NCCL_IB_TC=106 --env NCCL_SOCKET_IFNAME==bond0 --env NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME==bond0 --env NVSHMEM_HCA_LIST=mlx5_0,mlx5_3 --env RAY_ADDRESS=10.10.0.1:6379 --env RAY_AUTH_MODE=token --env RAY_AUTH_TOKEN_PATH=/run/vlaunch/secrets/RAY_AUTH_TOKEN --env RAY_ROTATION_BACKUP_COUNT=1 --env RAY_ROTATION_MAX_BYTES=67108864 --env RAY_USAGE_STATS_ENABLED=0 --env RAY_gcs_rpc_server_reconnect_timeout_s=15 --env RAY_health_check_failure_threshold=5 --env RAY_health_check_period_ms=1000 --env RAY_memory_monitor_refresh_ms=0 --env RAY_process_group_cleanup_enabled=1 --env RAY_worker_niceness=0 --env TILELANG_CACHE_DIR=/var/cache/vlaunch/tilelang --env TORCHINDUCTOR_CACHE_DIR=/var/cache/vlaunch/inductor --env TP_SOCKET_IFNAME=bond0 --env TRITON_CACHE_DIR=/var/cache/vlaunch/triton --env UCX_NET_DEVICES=mlx5_0:1,mlx5_3:1,bond0 --env VLLM_CACHE_ROOT=/var/cache/vlaunch/vllm --env VLLM_HOST_IP=10.10.0.3 --label vlaunch.cluster=roce --label vlaunch.node=node3 --label vlaunch.role=worker --label vlaunch.secrets=735b158c79f8 --label vlaunch.spec=42250bfad769 --entrypoint /bin/sh vllm/vllm-openai:v0.33.0 /opt/vlaunch/entry.sh agent --node node3 --head 10.10.0.1 --port 29560 --private-shm -- ray start --block --address 10.10.0.1:6379 --node-ip-address 10.10.0.3 --num-gpus 8 --node-manager-port 6380 --object-manager-port 6381 --runtime-env-agent-port 6382 --dashboard-agent-grpc-port 6383 --dashboard-agent-listen-port 52365 --metrics-export-port 6384 --min-worker-port 10002 --max-worker-port 19999 --disable-usage-stats &
on node4 sudo -n docker run --detach --name vlaunch-roce-node4 --network host --ipc private --tmpfs /dev/shm --restart always --gpus 8 --device /dev/infiniband --cap-add IPC_LOCK --ulimit memlock=-1 --ulimit stack=67108864 --log-opt max-file=5 --log-opt max-size=20m --volume /home/ops/.vlaunch/roce/payload:/opt/vlaunch:ro --volume /home/ops/.vlaunch/roce/secrets:/run/vlaunch/secrets:ro --volume /home/ops/.vlaunch/roce/server:/var/lib/vlaunch --volume /home/ops/.vlaunch/cache/roce/made-for-the-image:/var/cache/vlaunch --volume /data/huggingface:/data/huggingface --env AUTOSCALER_UPDATE_INTERVAL_S=1 --env CUDA_CACHE_PATH=/var/cache/vlaunch/cuda --env CUDA_DEVICE_ORDER=PCI_BUS_ID --env DG_JIT_CACHE_DIR=/var/cache/vlaunch/deep_gemm --env FLASHINFER_WORKSPACE_BASE=/var/cache/vlaunch/flashinfer --env GLOO_SOCKET_IFNAME=bond1 --env HF_HOME=/data/huggingface --env NCCL_IB_GID_INDEX=3 --env NCCL_IB_HCA==mlx5_bond_0 --env NCCL_IB_TC=106 --env NCCL_SOCKET_IFNAME==bond1 --env NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME==bond1 --env NVSHMEM_HCA_LIST=mlx5_bond_0 --env RAY_ADDRESS=10.10.0.1:6379 --env RAY_AUTH_MODE=token --env RAY_AUTH_TOKEN_PATH=/run/vlaunch/secrets/RAY_AUTH_TOKEN --env RAY_ROTATION_BACKUP_COUNT=1 --env RAY_ROTATION_MAX_BYTES=67108864 --env RAY_USAGE_STATS_ENABLED=0 --env RAY_gcs_rpc_server_reconnect_timeout_s=15 --env RAY_health_check_failure_threshold=5 --env RAY_health_check_period_ms=1000 --env RAY_memory_monitor_refresh_ms=0 --env RAY_process_group_cleanup_enabled=1 --env RAY_worker_niceness=0 --env TILELANG_CACHE_DIR=/var/cache/vlaunch/tilelang --env TORCHINDUCTOR_CACHE_DIR=/var/cache/vlaunch/inductor --env TP_SOCKET_IFNAME=bond1 --env TRITON_CACHE_DIR=/var/cache/vlaunch/triton --env UCX_NET_DEVICES=mlx5_bond_0:1,bond1 --env VLLM_CACHE_ROOT=/var/cache/vlaunch/vllm --env VLLM_HOST_IP=10.10.0.4 --label vlaunch.cluster=roce --label vlaunch.node=node4 --label vlaunch.role=worker --label vlaunch.secrets=735b158c79f8 --label vlaunch.spec=93421c1139b7 --entrypoint /bin/sh vllm/vllm-openai:v0.33.0 /opt/vlaunch/entry.sh agent --node node4 --head 10.10.0.1 --port 29560 --private-shm -- ray start --block --address 10.10.0.1:6379 --node-ip-address 10.10.0.4 --num-gpus 8 --node-manager-port 6380 --object-manager-port 6381 --runtime-env-agent-port 6382 --dashboard-agent-grpc-port 6383 --dashboard-agent-listen-port 52365 --metrics-export-port 6384 --min-worker-port 10002 --max-worker-port 19999 --disable-usage-stats &
all

# == Verify the Ray cluster
# gate ray-nodes: Ray has exactly 4 nodes with 32 GPUs

# == Verify the agents
# gate agents: all agents are connected to the head

exit
} </dev/null
