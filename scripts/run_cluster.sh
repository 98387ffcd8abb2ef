#!/usr/bin/env bash
# One node of a Ray cluster for vLLM, with the arguments of vLLM's own examples/online_serving/run_cluster.sh.
# Needs bash 4.4, Docker and iproute2. Writes nothing to this machine except the container.
set -euo pipefail

usage() {
  cat <<'HELP'
Usage: run_cluster.sh [OPTIONS] IMAGE HEAD_IP --head|--worker HF_HOME [ARGS...]
       run_cluster.sh [--name NAME] --stop

Start this machine's node of a Ray cluster for vLLM, in a detached container
that Docker restarts. HF_HOME is mounted at /root/.cache/huggingface. ARGS go to
`docker run`; `-e VLLM_HOST_IP=IP` selects another address of this machine.

  --accelerator KIND  nvidia, amd or cpu (default: nvidia)
  --name NAME         name of the container (default: vllm-ray)
  --port PORT         Ray's port on the head (default: 6379)
  --rdma              expose InfiniBand or RoCE devices; unlimited locked memory
  --secrets DIR       mount a folder with a file of mode 0600 per secret, named
                      HF_TOKEN, VLLM_API_KEY, RAY_AUTH_TOKEN or after a variable
  --wait SECONDS      time for Ray to list this node (default: 180)
  --stop              remove the container
  -h, --help          show this help

Example (add --rdma if the nodes have it):
  run_cluster.sh IMAGE 10.0.0.1 --head   /data/huggingface   # on 10.0.0.1
  run_cluster.sh IMAGE 10.0.0.1 --worker /data/huggingface   # on other nodes
HELP
}

# The version that `vlaunch up` adds to images without Ray.
readonly RAY='ray[default,data,serve]==2.60.0'

# The first process of the container. Ray and Hugging Face read their tokens from the files themselves.
# shellcheck disable=SC2016
readonly ENTRY='
for file in /run/secrets/*; do
  case ${file##*/} in "*" | RAY_AUTH_TOKEN | HF_TOKEN) continue ;; esac
  export "${file##*/}=$(cat "$file")"
done
rm -f /tmp/ray/ray_current_cluster  # the address of a cluster from before a restart
exec "$@"'

readonly LIST_NODES='
import ray
ray.init(logging_level="ERROR", log_to_driver=False)
print(*sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]))'

# fail STATUS MESSAGE [HINT [EVIDENCE]]
fail() {
  printf 'error: %s\n' "$2" >&2
  [ -z "${4:-}" ] || printf '%s\n' "$4" | sed 's/^/  /' >&2
  [ -z "${3:-}" ] || printf 'hint: %s\n' "$3" >&2
  exit "$1"
}

usage_error() { fail 2 "$1" "${2:-run_cluster.sh --help}"; }

accelerator=nvidia name=vllm-ray port=6379 rdma='' secrets='' wait_seconds=180 stop=''
image='' head_ip='' role='' hf_home='' host_ip='' docker_args=()

parse_arguments() {
  local option value
  while (($#)); do
    option=$1
    shift
    case $option in
      -h | --help) usage; exit 0 ;;
      --rdma) rdma=yes; continue ;;
      --stop) stop=yes; continue ;;
      --head | --worker) usage_error "$option must follow IMAGE and HEAD_IP" ;;
      --*=*) value=${option#*=} option=${option%%=*} ;;
      -*) (($#)) || usage_error "$option needs a value"; value=$1; shift ;;
      *) set -- "$option" "$@"; break ;;
    esac
    case $option in
      --accelerator) accelerator=$value ;;
      --name) name=$value ;;
      --port) port=$value ;;
      --secrets) secrets=$value ;;
      --wait) wait_seconds=$value ;;
      *) usage_error "unknown option $option" "options of \`docker run\` follow HF_HOME" ;;
    esac
  done
  [[ $name =~ ^[A-Za-z0-9][A-Za-z0-9_.-]+$ ]] || usage_error "--name is not a container name: $name"
  if [ -n "$stop" ]; then
    (($# == 0)) || usage_error "--stop takes no IMAGE" "run_cluster.sh --name NAME --stop"
    return
  fi
  (($# >= 4)) || usage_error "expected IMAGE HEAD_IP --head|--worker HF_HOME, got $# arguments"
  image=$1 head_ip=$2 role=${3#--} hf_home=$4
  docker_args=("${@:5}")
  [[ $3 == --head || $3 == --worker ]] || usage_error "the third argument is --head or --worker, not $3"
  [[ $head_ip =~ ^[0-9]+(\.[0-9]+){3}$ ]] || usage_error "HEAD_IP is not an IPv4 address: $head_ip"
  [[ $accelerator =~ ^(nvidia|amd|cpu)$ ]] || usage_error "--accelerator is nvidia, amd or cpu, not $accelerator"
  [[ $port =~ ^[1-9][0-9]{0,4}$ && $port -le 65535 ]] || usage_error "--port is not a port: $port"
  [[ $wait_seconds =~ ^[0-9]{1,6}$ ]] || usage_error "--wait is not a number of seconds: $wait_seconds"
  [ -z "$rdma" ] || [ -d /dev/infiniband ] ||
    usage_error "--rdma: this machine has no /dev/infiniband" "load the driver of the network card, or omit --rdma"
  [ -d "$hf_home" ] || usage_error "HF_HOME is not a directory: $hf_home" "mkdir -p '$hf_home'"
  hf_home=$(cd "$hf_home" && pwd)
  check_docker_args
  [ -z "$secrets" ] || check_secrets
}

check_docker_args() {
  local arg
  for arg in "${docker_args[@]}"; do
    case $arg in
      --name | --name=* | --accelerator* | --port* | --rdma | --secrets* | --wait* | --stop)
        usage_error "${arg%%=*} must precede IMAGE" "run_cluster.sh ${arg%%=*} … $image $head_ip --$role $hf_home" ;;
      --network* | --net | --net=* | --restart* | --entrypoint* | --rm)
        usage_error "${arg%%=*} is set by this script" ;;
    esac
    # `-e NAME=VALUE` in one word or two; a name without a value is copied from docker's environment.
    arg=${arg#--env=} arg=${arg#-e}
    if [[ $arg =~ ^[A-Za-z_]*(TOKEN|SECRET|PASSWORD|API_KEY|ACCESS_KEY|PRIVATE_KEY)(=|$) ]]; then
      usage_error "-e ${arg%%=*} would show the secret in \`ps\` and \`docker inspect\`" \
        "save it as DIR/${arg%%=*}, mode 0600, and add \`--secrets DIR\` before IMAGE"
    fi
    [[ $arg != VLLM_HOST_IP=* ]] || host_ip=${arg#*=}
  done
}

check_secrets() {
  local file readable
  secrets=$(cd "$secrets" && pwd) || usage_error "--secrets is not a directory"
  for file in "$secrets"/*; do
    [[ -f $file && ${file##*/} =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] ||
      usage_error "--secrets: $file is not a file named like a variable"
  done
  readable=$(find -L "$secrets" -type f -perm /077)
  [ -z "$readable" ] || usage_error "--secrets: other users can read these files" "chmod 600 '$secrets'/*" "$readable"
}

# Set `host_ip` to the address from which HEAD_IP is reached, unless -e VLLM_HOST_IP gave another; find its interface.
find_address() {
  local route
  route=$(ip -o route get "$head_ip" 2>&1) || fail 1 "no route to HEAD_IP $head_ip" "ip route get $head_ip" "$route"
  case $role:$route in
    head:local*) host_ip=${host_ip:-$head_ip} ;;
    head:*) fail 1 "HEAD_IP $head_ip is not an address of this machine" "on workers use --worker" "$(ip -br -4 addr)" ;;
    worker:local*) fail 1 "HEAD_IP $head_ip is an address of this machine" "on the head use --head" ;;
    *) [[ $route =~ \ src\ ([0-9.]+) ]] && host_ip=${host_ip:-${BASH_REMATCH[1]}} ;;
  esac
  [ "$role" = worker ] || [ "$host_ip" = "$head_ip" ] ||
    usage_error "VLLM_HOST_IP $host_ip of the head differs from HEAD_IP $head_ip" "workers connect to HEAD_IP"
  interface=$(ip -o -4 addr show to "$host_ip" 2>/dev/null | awk '{ print $2; exit }')
  [ -n "$interface" ] ||
    fail 1 "VLLM_HOST_IP $host_ip is not an address of this machine" "select one of these" "$(ip -br -4 addr)"
}

check_docker() {
  local output
  output=$(docker version 2>&1) ||
    fail 1 "docker does not answer" "install it, start it (systemctl start docker), or run this with sudo" "$output"
}

check_image() {
  local output
  output=$(docker run --rm --network none --entrypoint /bin/sh "$image" -c 'command -v ray || echo none') ||
    fail 1 "$image does not start" "docker run --rm --entrypoint /bin/sh $image -c true"
  [ "$output" != none ] || fail 1 "$image does not contain Ray (vLLM's images omit it since v0.18)" \
    "build an image with Ray on every node and use that:
  printf 'FROM $image\nRUN uv pip install --system \"$RAY\"\n' | docker build -t vllm-ray -"
}

# `--restart always`: Docker leaves `unless-stopped` containers down after dockerd was killed.
start_container() {
  local options ray output run="$$.$RANDOM" hint=''
  options=(
    --detach --init --restart always --name "$name" --label "run_cluster.sh.run=$run" --label "run_cluster.sh=$name" --network host
    --shm-size "$(awk '/^MemTotal/ { print int($2 / 2) }' /proc/meminfo)k" # ARGS may give another
    --volume "$hf_home:/root/.cache/huggingface" -e HF_HOME=/root/.cache/huggingface
    -e "VLLM_HOST_IP=$host_ip" -e "NCCL_SOCKET_IFNAME==$interface" -e "GLOO_SOCKET_IFNAME=$interface"
    -e "RAY_ADDRESS=$head_ip:$port" -e RAY_USAGE_STATS_ENABLED=0
    -e RAY_memory_monitor_refresh_ms=0           # it kills ranks that load a model
    -e RAY_gcs_rpc_server_reconnect_timeout_s=15 # workers that lose the head restart and join the new one
  )
  ray=(ray start --block --node-ip-address "$host_ip")
  if [ "$role" = head ]; then ray+=(--head --port "$port"); else ray+=(--address "$head_ip:$port"); fi
  case $accelerator in
    nvidia) [[ ${docker_args[*]} == *--gpus* || ${docker_args[*]} == *nvidia.com/gpu=* ]] || options+=(--gpus all) ;;
    amd) options+=(--device /dev/kfd --device /dev/dri --group-add video --security-opt seccomp=unconfined) ;;
    cpu) ray+=(--num-gpus 1) ;; # a slot for one rank
  esac
  [ -z "$rdma" ] || options+=(--device /dev/infiniband --cap-add IPC_LOCK --ulimit memlock=-1 --ulimit stack=67108864)
  [ -z "$secrets" ] || options+=(--volume "$secrets:/run/secrets:ro")
  [ ! -f "$secrets/HF_TOKEN" ] || options+=(-e "HF_TOKEN_PATH=/run/secrets/HF_TOKEN")
  if [ -f "$secrets/RAY_AUTH_TOKEN" ]; then
    options+=(-e RAY_AUTH_MODE=token -e "RAY_AUTH_TOKEN_PATH=/run/secrets/RAY_AUTH_TOKEN")
  else
    options+=(-e RAY_AUTH_MODE=disabled)
    echo "warning: any host that reaches $head_ip:$port can run programs on all nodes; see RAY_AUTH_TOKEN in --help" >&2
  fi
  options+=("${docker_args[@]}" --entrypoint /bin/bash "$image" -c "$ENTRY" "$name")
  output=$(docker run "${options[@]}" "${ray[@]}" 2>&1) && return
  # not by name: it may be that of another run's container
  docker ps --all --quiet --filter "label=run_cluster.sh.run=$run" |
    xargs --no-run-if-empty docker rm --force --volumes >/dev/null 2>&1 || true
  case $output in
    *"is already in use"*) hint="run_cluster.sh --name $name --stop, or select another --name" ;;
    *"could not select device driver"*) hint="install the NVIDIA Container Toolkit, or use --accelerator amd|cpu" ;;
    *"setting rlimit"*) hint="allow dockerd to lock memory (LimitMEMLOCK=infinity), or omit --rdma" ;;
  esac
  fail 1 "docker cannot start $name" "$hint" "$output"
}

list_nodes() { docker exec "$name" timeout 30 python3 -c "$LIST_NODES" 2>/dev/null; }
restarts() { docker inspect --format '{{.RestartCount}}' "$name"; }

# A head that restarts has failed; a worker restarts until the head answers.
wait_for_ray() {
  local deadline=$((SECONDS + wait_seconds)) nodes='' serve
  echo "waiting until Ray at $head_ip:$port lists this node, $host_ip ($interface)"
  until nodes=$(list_nodes) && [[ " $nodes " == *" $host_ip "* ]]; do
    if ((SECONDS >= deadline)) || [[ $role == head && $(restarts) != 0 ]]; then
      fail 1 "Ray does not list this node; the container keeps trying" \
        "docker logs -f $name, or run_cluster.sh --name $name --stop" "$(docker logs --tail 20 "$name" 2>&1)"
    fi
    sleep 1
  done
  serve='vllm serve MODEL --distributed-executor-backend ray --pipeline-parallel-size NODES'
  [ ! -f "$secrets/VLLM_API_KEY" ] || serve="bash -c 'VLLM_API_KEY=\$(cat /run/secrets/VLLM_API_KEY) exec $serve'"
  printf 'Ray lists %s\nwhen it lists all nodes, serve a model:\n  docker exec -it %s %s\n' "$nodes" "$name" "$serve"
}

stop_container() {
  local ids
  ids=$(docker ps --all --quiet --filter "label=run_cluster.sh=$name")
  [ -n "$ids" ] || { echo "no container $name"; return; }
  # shellcheck disable=SC2086
  docker rm --force --volumes $ids >/dev/null
  echo "removed the container $name"
}

main() {
  parse_arguments "$@"
  check_docker
  if [ -n "$stop" ]; then stop_container; return; fi
  find_address
  ! docker container inspect "$name" >/dev/null 2>&1 ||
    fail 1 "the container $name exists" "run_cluster.sh --name $name --stop, or select another --name"
  check_image
  start_container
  wait_for_ray
}

main "$@"
