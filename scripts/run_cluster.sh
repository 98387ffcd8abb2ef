#!/usr/bin/env bash
# One node of a vLLM Ray cluster, without Python: starts the container that `vlaunch up` would start here, under the same name,
# with the same labels and the same spec hash, so that `vlaunch status`, `up` and `down` know it. Needs bash 4 and Docker.
set -eo pipefail
shopt -u patsub_replacement 2>/dev/null || true # bash 5.2 gives `&` a meaning that older ones do not know

PAYLOAD=/opt/vlaunch
SECRETS=/run/vlaunch/secrets
SERVER=/var/lib/vlaunch
COMPILED=/var/cache/vlaunch
TOKEN=RAY_AUTH_TOKEN
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

usage() {
  cat <<'HELP'
Usage: run_cluster.sh [OPTIONS] IMAGE HEAD_IP --head|--worker HF_HOME [DOCKER_RUN_ARGS…]
       run_cluster.sh [--cluster NAME] [--state-dir DIR] --stop

Starts this machine's node of a Ray cluster for vLLM, detached. Run it on the head first, then on each worker.
HF_HOME is a directory of this machine; the container sees it under the same path, as its HF_HOME.

The rule: options of this script stand before IMAGE; everything after HF_HOME goes to `docker run` as it is. Only
`-e NAME=VALUE` (also -eNAME=VALUE, --env …, --env=…) is read there: it overrides what the script would set, and
VLLM_HOST_IP says this node's address.

Options:
  --cluster NAME        name of the cluster [vllm]
  --name NODE           this node's name in the cluster [the host name]; the container is vlaunch-CLUSTER-NODE
  --node-ip IP          this node's address; head: HEAD_IP; worker: by default the address from which HEAD_IP is reached
  --interface NAME      the interface for NCCL and Gloo [the one that has the node's address]
  --accelerator KIND    nvidia, amd or cpu [nvidia]
  --gpus N              GPUs of this node (cpu: slots) [all; cpu: 1]
  --rdma                InfiniBand or RoCE: /dev/infiniband, IPC_LOCK, unlimited memlock, 64 MiB stack
  --token-file FILE     the cluster's token, mode 0600: Ray's, and that of the nodes' agents; made on the head where it is
                        missing [~/.vlaunch/CLUSTER/secrets/RAY_AUTH_TOKEN]
  --no-token            let everybody who reaches the ports talk to Ray; agents need the token all the same
  --secret NAME         hand the environment variable NAME to the container through a file of mode 0600; may be repeated.
                        HF_TOKEN needs no option: it is handed over whenever it is set
  --port NAME=NUMBER    another port than the default; may be repeated; gcs=6379 dashboard=8265 client=10001
                        node_manager=6380 object_manager=6381 runtime_env_agent=6382 dashboard_agent_grpc=6383
                        metrics_export=6384 dashboard_agent_http=52365 worker_min=10002 worker_max=19999 group=29560
                        metrics=29580
  --object-store BYTES  memory of Ray's object store [Ray's choice]
  --state-dir DIR       where this machine keeps the cluster's small files [~/.vlaunch]
  --replace             remove a container of the same name first
  --wait SECONDS        how long Ray may take to listen [90]
  --dry-run             print the `docker run` line, change nothing
  --stop                remove the cluster's containers, helper files and secrets from this machine
  -h, --help            show this text

Example, head and worker of two nodes with 8 GPUs each:
  run_cluster.sh --rdma IMAGE 10.0.0.11 --head   /data/huggingface
  run_cluster.sh --rdma --token-file ~/ray-token IMAGE 10.0.0.11 --worker /data/huggingface -e VLLM_HOST_IP=10.0.0.12

Ends with 0 when Ray listens, 1 when it failed, 2 when the request was wrong.
HELP
}

say() { printf '%s\n' "$*" >&2; }

# fail STATUS MESSAGE [HINT [EVIDENCE]]
fail() {
  say "error: $2"
  [ -z "$4" ] || printf '%s\n' "$4" | tail -n 20 | sed 's/^/  /' >&2
  [ -z "$3" ] || say $'\n'"hint: $3"
  exit "$1"
}

wrong() { fail 2 "$1" "${2:-run_cluster.sh --help}"; }

whole_number() { [[ $1 =~ ^[0-9]{1,15}$ ]]; }

# What inventories accept as an address other nodes can reach; IPv6 is left to `vlaunch up`.
usable_ip() {
  local part parts
  [[ $1 =~ ^[0-9]{1,3}(\.[0-9]{1,3}){3}$ ]] || return 1
  IFS=. read -r -a parts <<<"$1"
  for part in "${parts[@]}"; do
    [[ $part =~ ^(0|[1-9][0-9]*)$ ]] && ((part <= 255)) || return 1
  done
  ((parts[0] > 0 && parts[0] != 127 && parts[0] < 224))
}

# ---- what was asked for -----------------------------------------------------------------------------------------------------

cluster=vllm node='' node_ip='' interface='' accelerator=nvidia gpus='' rdma='' token_file='' token_auth=1 object_store=''
state_dir='' replace='' patience=90 dry_run='' stop='' image='' head_ip='' role='' hf_home=''
secret_names=() extra=()
declare -A port=(
  [gcs]=6379 [dashboard]=8265 [client]=10001 [node_manager]=6380 [object_manager]=6381 [runtime_env_agent]=6382
  [dashboard_agent_grpc]=6383 [dashboard_agent_http]=52365 [metrics_export]=6384 [worker_min]=10002 [worker_max]=19999
  [group]=29560 [metrics]=29580
)
# Where the agent serves its metrics unless it is told something else (launcher/payload/agent/metrics.py).
readonly OWN_METRICS=29580
declare -A env=() secrets=()

read_options() {
  local word value
  while (($#)); do
    word=$1
    case $word in
      -h | --help) usage; exit 0 ;;
      --rdma) rdma=1; shift; continue ;;
      --no-token) token_auth=''; shift; continue ;;
      --replace) replace=1; shift; continue ;;
      --dry-run) dry_run=1; shift; continue ;;
      --stop) stop=1; shift; continue ;;
      --head | --worker) wrong "$word stands after IMAGE and HEAD_IP" "run_cluster.sh IMAGE HEAD_IP $word HF_HOME" ;;
      --) shift; break ;;
      --*=*) value=${word#*=}; word=${word%%=*}; shift ;;
      -*) (($# > 1)) || wrong "there is nothing after $word"; value=$2; shift 2 ;;
      *) break ;;
    esac
    case $word in
      --cluster) cluster=$value ;;
      --name) node=$value ;;
      --node-ip) node_ip=$value ;;
      --interface) interface=$value ;;
      --accelerator) accelerator=$value ;;
      --gpus) gpus=$value ;;
      --token-file) token_file=$value ;;
      --secret) secret_names+=("$value") ;;
      --port) set_port "$value" ;;
      --object-store) object_store=$value ;;
      --state-dir) state_dir=$value ;;
      --wait) patience=$value ;;
      *) wrong "there is no option $word" "options of \`docker run\` stand after HF_HOME; see run_cluster.sh --help" ;;
    esac
  done
  [ -z "$stop" ] || { (($# == 0)) || wrong "--stop goes without IMAGE, HEAD_IP and the rest"; return 0; }
  (($# >= 4)) || wrong "IMAGE, HEAD_IP, --head or --worker, and HF_HOME are needed; there are only $# of them"
  image=$1 head_ip=$2 role=${3#--} hf_home=$4
  [[ $3 == --head || $3 == --worker ]] || wrong "the third word is --head or --worker, not \`$3\`"
  read_extra "${@:5}"
}

set_port() {
  local name=${1%%=*} number=${1#*=}
  [[ $name =~ ^[a-z_]+$ && -n ${port[$name]} ]] || wrong "there is no port called \`$name\`" "the names are: ${!port[*]}"
  [[ $number =~ ^[1-9][0-9]{0,4}$ && $number -le 65535 ]] || wrong "--port $name is a number from 1 to 65535, not \`$number\`"
  port[$name]=$number
}

# Environment is taken out, so that each variable is there once; the rest stays as it is, in its order.
read_extra() {
  while (($#)); do
    case $1 in
      -e | --env) (($# > 1)) || wrong "there is nothing after $1"; set_env "$2"; shift ;;
      --env=*) set_env "${1#--env=}" ;;
      -e?*) set_env "${1#-e}" ;;
      --name | --name=* | --gpus | --gpus=*)
        wrong "${1%%=*} stands before IMAGE" "run_cluster.sh ${1%%=*} … $image $head_ip --$role $hf_home" ;;
      --rm | --entrypoint | --entrypoint=* | --network | --network=* | --net | --net=*)
        wrong "${1%%=*} is decided by this script: the container stays, in the host's network, and starts Ray" ;;
      --cluster* | --node-ip* | --interface* | --accelerator* | --rdma | --token-file* | --no-token | --secret* | --port* | \
        --object-store* | --state-dir* | --replace | --wait* | --dry-run | --stop | --head | --worker)
        wrong "${1%%=*} is no option of \`docker run\`" "options of this script stand before IMAGE" ;;
      *) extra+=("$1") ;;
    esac
    shift
  done
}

# The rule of inventories for what looks like a secret; the value is never shown.
set_env() {
  local name=${1%%=*} value=${1#*=}
  local kinds='(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|API_?KEY|ACCESS_KEY|SECRET_KEY|PRIVATE_KEY|CREDENTIALS?)$'
  [[ $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || wrong "-e takes NAME=VALUE, and NAME is made of letters, digits and \`_\`"
  if [[ ${name^^} =~ $kinds && ($1 != *=* || ${#value} -ge 6) || $value =~ ^(hf_|sk-|ghp_|nvapi-)[A-Za-z0-9_-]{16,}$ ]]; then
    wrong "-e $name would show a secret in \`docker inspect\`" "export $name, and say --secret $name before IMAGE"
  fi
  case $name in RAY_ADDRESS | RAY_AUTH_MODE | RAY_AUTH_TOKEN_PATH)
    wrong "$name is decided by this script" "see HEAD_IP, --port gcs=…, --token-file and --no-token in run_cluster.sh --help" ;;
  esac
  if [[ $1 == *=* ]]; then
    env[$name]=$value
  elif [ "$name" = VLLM_HOST_IP ]; then
    env[$name]=$VLLM_HOST_IP
  else
    extra+=(-e "$name") # docker takes the value from its own environment
  fi
}

check_words() {
  local name
  [[ $cluster =~ ^[a-z0-9]([a-z0-9_.-]{0,38}[a-z0-9])?$ ]] ||
    wrong "--cluster is a name of at most 40 lower-case letters, digits, \`-\`, \`_\` and \`.\`, not \`$cluster\`"
  node=${node:-$(uname -n)}
  [[ $node =~ ^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$ ]] ||
    wrong "--name is a name of at most 63 letters, digits, \`-\`, \`_\` and \`.\`, not \`$node\`"
  state_dir=${state_dir:-${HOME:?}/.vlaunch}
  [[ $state_dir == /* ]] || state_dir=$PWD/$state_dir
  state=$state_dir/$cluster container=vlaunch-$cluster-$node
  [ -z "$stop" ] || return 0
  [[ $image =~ ^[A-Za-z0-9] ]] || wrong "\`$image\` is no image"
  usable_ip "$head_ip" || wrong "HEAD_IP is the head's IPv4 address on the cluster's network, not \`$head_ip\`"
  [[ $accelerator =~ ^(nvidia|amd|cpu)$ ]] || wrong "--accelerator is nvidia, amd or cpu, not \`$accelerator\`"
  whole_number "${gpus:-0}" || wrong "--gpus is a whole number, not \`$gpus\`"
  whole_number "$patience" || wrong "--wait is a number of seconds, not \`$patience\`"
  whole_number "${object_store:-0}" || wrong "--object-store is a number of bytes, not \`$object_store\`"
  [[ -z $interface || $interface =~ ^[A-Za-z0-9._][A-Za-z0-9._@-]{0,14}$ ]] || wrong "\`$interface\` is no interface's name"
  [[ $hf_home == /* ]] || hf_home=$PWD/$hf_home
  [[ $hf_home == / || $hf_home != */ ]] || hf_home=${hf_home%/}
  [[ $hf_home != *[:$'\n']* ]] || wrong "HF_HOME cannot contain \`:\`, which Docker reads as a separator"
  [ -n "$dry_run" ] || [ -d "$hf_home" ] || wrong "HF_HOME $hf_home is not a directory of this machine" "mkdir -p '$hf_home'"
  for name in "${secret_names[@]}"; do
    [[ $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || wrong "--secret takes the name of an environment variable"
    [ -n "${!name}" ] || wrong "--secret $name: the environment variable is not set" "export $name"
    secrets[$name]=${!name}
  done
  [ -z "$HF_TOKEN" ] || secrets[HF_TOKEN]=$HF_TOKEN
}

# ---- this node --------------------------------------------------------------------------------------------------------------

find_address() {
  local said asked=${env[VLLM_HOST_IP]}
  [ -z "$asked" ] || [ -z "$node_ip" ] || [ "$asked" = "$node_ip" ] ||
    wrong "--node-ip says $node_ip, -e VLLM_HOST_IP says $asked" "say it once"
  node_ip=${asked:-$node_ip}
  if [ -z "$node_ip" ] && [ "$role" = head ]; then
    node_ip=$head_ip
  elif [ -z "$node_ip" ]; then
    said=$(ip -o route get "$head_ip" 2>&1) && [[ $said =~ \ src\ ([0-9.]+) ]] ||
      fail 1 "no route from here to HEAD_IP $head_ip is known" "check the address, or say --node-ip" "$said"
    node_ip=${BASH_REMATCH[1]}
    [ "$node_ip" != "$head_ip" ] || wrong "HEAD_IP $head_ip is this machine's own address" "use --head here, --worker elsewhere"
  fi
  usable_ip "$node_ip" || wrong "VLLM_HOST_IP is an IPv4 address the other nodes can reach, not \`$node_ip\`"
  [ "$role" = worker ] || [ "$node_ip" = "$head_ip" ] ||
    wrong "this is the head, so its address $node_ip must be HEAD_IP $head_ip, under which workers look for it"
  [ "$role" = head ] || [ "$node_ip" != "$head_ip" ] || wrong "this worker's address is HEAD_IP, $head_ip" "say its own --node-ip"
  [ -z "$interface" ] || return 0
  said=$(ip -o -4 addr show 2>&1) || fail 1 "this machine's addresses cannot be read" "say --interface" "$said"
  interface=$(awk -v ip="$node_ip" '{ split($4, a, "/") } a[1] == ip { print $2; exit }' <<<"$said")
  [ -n "$interface" ] ||
    fail 1 "$node_ip is not an address of this machine" "say which of these it is with --node-ip, or run it on that machine" \
      "$(awk '$2 != "lo" { print $2, $4 }' <<<"$said")"
}

count_gpus() {
  local said
  [ -z "$gpus" ] || return 0
  case $accelerator in
    cpu) gpus=1 ;;
    nvidia)
      said=$(nvidia-smi --query-gpu=index --format=csv,noheader 2>&1) ||
        fail 1 "nvidia-smi cannot count this machine's GPUs" "say --gpus N, or --accelerator amd|cpu" "$said"
      gpus=$(grep -c '^[0-9]' <<<"$said") || fail 1 "nvidia-smi shows no GPU" "say --gpus N, or --accelerator amd|cpu" "$said"
      ;;
    amd)
      gpus=$(cat /sys/class/kfd/kfd/topology/nodes/*/properties 2>/dev/null | grep -c '^simd_count [1-9]') ||
        fail 1 "the kernel shows no AMD GPU" "say --gpus N" ;;
  esac
}

# Puts the token into `secrets`; `mint` stays empty unless it still has to be made.
find_token() {
  local file=${token_file:-$state/secrets/$TOKEN} text
  mint=''
  if [ ! -e "$file" ]; then
    [ "$role" = head ] || [ -n "$token_auth$token_file" ] || return 0 # Ray needs none
    [ "$role" = head ] || [ -n "$dry_run" ] ||
      fail 1 "the head's token is not here" "copy it from the head and say --token-file ~/ray-token before IMAGE:
  scp -p HEAD:~/.vlaunch/$cluster/secrets/$TOKEN ~/ray-token
or start both with --no-token" "$file does not exist"
    mint=$file
    return 0
  fi
  [ -r "$file" ] && [ -f "$file" ] || fail 1 "the token file $file cannot be read" "ls -l '$file'"
  [ -z "$(find -L "$file" -perm /077)" ] || fail 1 "others may read the token file $file" "chmod 600 '$file'"
  text=$(<"$file")
  [[ $text =~ ^[!-~]+$ ]] ||
    fail 1 "the token file $file does not hold one word" "remove it from every node; the head makes a new one"
  secrets[$TOKEN]=$text
}

# ---- the container ----------------------------------------------------------------------------------------------------------

sorted() { printf '%s\n' "$@" | LC_ALL=C sort; }

hex() { od -An -v -tx1 | tr -d ' \n'; }

unhex() {
  local bytes='' i
  for ((i = 0; i < ${#1}; i += 2)); do bytes+="\\x${1:i:2}"; done
  printf %b "$bytes"
}

# HMAC-SHA256 of standard input (RFC 2104), in hex. Only builtins see the key, so that `ps` never does.
hmac() {
  local key inner='' outer='' i digest
  key=$(printf %s "$1" | hex)
  ((${#key} <= 128)) || key=$(printf %s "$1" | sha256sum | cut -c 1-64)
  while ((${#key} < 128)); do key+="00"; done
  for ((i = 0; i < 128; i += 2)); do
    printf -v inner '%s%02x' "$inner" $((16#${key:i:2} ^ 0x36))
    printf -v outer '%s%02x' "$outer" $((16#${key:i:2} ^ 0x5c))
  done
  digest=$({ unhex "$inner"; cat; } | sha256sum | cut -c 1-64)
  { unhex "$outer"; unhex "$digest"; } | sha256sum | cut -c 1-64
}

# What launcher/plan/containers.py calls the fingerprint: it changes when a secret does, and tells nothing about it. Without the
# token there is no key that nobody can guess.
fingerprint() {
  local name first=1
  [ -n "${secrets[$TOKEN]}" ] || { echo made-by-the-run; return; }
  for name in $(sorted "${!secrets[@]}"); do
    [ -n "$first" ] || printf '\0'
    first=''
    printf '%s=%s' "$name" "${secrets[$name]}"
  done | hmac "${secrets[$TOKEN]}" | cut -c 1-12
}

# The words as Python's json.dumps writes them. What is not ASCII comes out differently, and then `status` shows a difference.
json_words() {
  local word separator='' bs=$'\\' quote='"'
  printf '['
  for word; do
    word=${word//"$bs"/$bs$bs} word=${word//"$quote"/$bs$quote} word=${word//$'\n'/${bs}n} word=${word//$'\t'/${bs}t}
    printf '%s"%s"' "$separator" "$word"
    separator=', '
  done
  printf ']'
}

# What launcher/tools/docker.py calls an image's identity: of its layers and its configuration, as Python's json.dumps writes them.
# Of an image that vlaunch made on another one, that one's counts.
image_identity() {
  local said format list text
  # shellcheck disable=SC2016 # Docker's template has the variables
  list='{{with .Config.%s}}[{{range $i, $e := .}}{{if $i}}, {{end}}{{json $e}}{{end}}]{{else}}null{{end}}'
  text='{{with .Config.%s}}{{json .}}{{else}}null{{end}}'
  # shellcheck disable=SC2016,SC2059 # here, too; the pieces are formats of printf
  format='{{with index .Config.Labels "vlaunch.base"}}{{.}}{{else}}[{"Layers": [{{range $i, $e := .RootFS.Layers}}{{if $i}}, {{end}}'$(
    printf "{{json \$e}}{{end}}], \"Type\": {{json .RootFS.Type}}}, {{json .Architecture}}, $list, $list, $list, $text, $text]{{end}}" \
      Env Entrypoint Cmd User WorkingDir
  )
  said=$(docker image inspect --format "$format" "$image" 2>/dev/null) || return 0
  case $said in
    \[*) printf %s "$said" | sed 's/\\u003c/</g; s/\\u003e/>/g; s/\\u0026/\&/g' | sha256sum | cut -c 1-12 ;;
    *) printf '%s\n' "${said:0:12}" ;;
  esac
}

plan_container() {
  local common ray agent private=(--private-shm) shm=(--ipc private --tmpfs /dev/shm) options=() labels name word compiled
  local words=("VLLM_CACHE_ROOT=$COMPILED/vllm" "TORCHINDUCTOR_CACHE_DIR=$COMPILED/inductor" "TRITON_CACHE_DIR=$COMPILED/triton"
    "FLASHINFER_WORKSPACE_BASE=$COMPILED/flashinfer" "DG_JIT_CACHE_DIR=$COMPILED/deep_gemm"
    "TILELANG_CACHE_DIR=$COMPILED/tilelang" "CUDA_CACHE_PATH=$COMPILED/cuda"
    AUTOSCALER_UPDATE_INTERVAL_S=1 RAY_gcs_rpc_server_reconnect_timeout_s=15
    RAY_ROTATION_BACKUP_COUNT=1 RAY_ROTATION_MAX_BYTES=67108864 RAY_health_check_failure_threshold=5 RAY_health_check_period_ms=1000 RAY_memory_monitor_refresh_ms=0 RAY_process_group_cleanup_enabled=1 RAY_worker_niceness=0
    RAY_USAGE_STATS_ENABLED=0 "RAY_ADDRESS=$head_ip:${port[gcs]}" "VLLM_HOST_IP=$node_ip" "HF_HOME=$hf_home"
    "NCCL_SOCKET_IFNAME==$interface" "GLOO_SOCKET_IFNAME=$interface" "TP_SOCKET_IFNAME=$interface") # `=`: the whole name, to NCCL
  [ "$accelerator" != nvidia ] || words+=(CUDA_DEVICE_ORDER=PCI_BUS_ID "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME==$interface")
  [ "$accelerator" = cpu ] || [ -n "$rdma" ] || words+=("UCX_NET_DEVICES=$interface")
  if [ -n "$token_auth" ]; then
    words+=(RAY_AUTH_MODE=token "RAY_AUTH_TOKEN_PATH=$SECRETS/$TOKEN")
  else
    words+=(RAY_AUTH_MODE=disabled)
  fi
  [ -z "${secrets[HF_TOKEN]}" ] || words+=("HF_TOKEN_PATH=$SECRETS/HF_TOKEN")
  for word in "${words[@]}"; do
    [ -n "${env[${word%%=*}]+set}" ] || env[${word%%=*}]=${word#*=}
  done

  for word in "${extra[@]}"; do
    case $word in --shm-size | --shm-size=*) shm=() ;; --ipc | --ipc=*) shm=() private=() ;; esac
  done
  agent=(agent --node "$node" --head "$head_ip" --port "${port[group]}")
  [ "$role" = worker ] || agent+=(--lead)
  [ "$role" = worker ] || [ "${port[metrics]}" = "$OWN_METRICS" ] || agent+=(--metrics "${port[metrics]}")
  agent+=("${private[@]}")
  [ "$accelerator" != nvidia ] || options+=(--gpus "$gpus")
  [ "$accelerator" != amd ] || options+=(--device /dev/kfd --device /dev/dri)
  [ -z "$rdma" ] || options+=(--device /dev/infiniband --cap-add IPC_LOCK)
  [ "$accelerator" != amd ] || options+=(--group-add video --security-opt seccomp=unconfined)
  [ -z "$rdma" ] || options+=(--ulimit memlock=-1 --ulimit stack=67108864)
  # Other log drivers do not know these, and Docker refuses what a driver does not know.
  case $(docker info --format '{{.LoggingDriver}}' 2>/dev/null) in
    '' | json-file | local) options+=(--log-opt max-file=5 --log-opt max-size=20m) ;;
  esac
  compiled=$(image_identity)
  options+=(--volume "$state/payload:$PAYLOAD:ro" --volume "$state/secrets:$SECRETS:ro" --volume "$state/server:$SERVER"
    --volume "$state_dir/cache/$cluster/${compiled:-made-for-the-image}:$COMPILED" --volume "$hf_home:$hf_home")
  for name in $(sorted "${!env[@]}"); do options+=(--env "$name=${env[$name]}"); done

  common=(--num-gpus "$gpus")
  [ -z "$object_store" ] || common+=(--object-store-memory "$object_store")
  common+=(
    --node-manager-port "${port[node_manager]}" --object-manager-port "${port[object_manager]}"
    --runtime-env-agent-port "${port[runtime_env_agent]}" --dashboard-agent-grpc-port "${port[dashboard_agent_grpc]}"
    --dashboard-agent-listen-port "${port[dashboard_agent_http]}" --metrics-export-port "${port[metrics_export]}"
    --min-worker-port "${port[worker_min]}" --max-worker-port "${port[worker_max]}" --disable-usage-stats
  )
  if [ "$role" = head ]; then
    ray=(ray start --head --block --node-ip-address "$node_ip" --port "${port[gcs]}" --dashboard-host 127.0.0.1
      --dashboard-port "${port[dashboard]}" --ray-client-server-port "${port[client]}" "${common[@]}")
  else
    ray=(ray start --block --address "$head_ip:${port[gcs]}" --node-ip-address "$node_ip" "${common[@]}")
  fi

  labels=("vlaunch.cluster=$cluster" "vlaunch.node=$node" "vlaunch.role=$role")
  labels+=("vlaunch.secrets=$(fingerprint)")
  # The launcher's spec hash: of the whole line, without itself.
  command=()
  assemble "${labels[@]}"
  spec=$(json_words "${command[@]}" | sha256sum | cut -c 1-12)
  assemble "${labels[@]}" "vlaunch.spec=$spec"
}

# Sets `command`; reads what plan_container has put together.
assemble() {
  local label labelled=()
  for label; do labelled+=(--label "$label"); done
  command=(run --detach --name "$container" --network host "${shm[@]}" --restart always "${options[@]}" "${labelled[@]}"
    "${extra[@]}" --entrypoint /bin/sh "$image" "$PAYLOAD/entry.sh" "${agent[@]}" -- "${ray[@]}")
}

# Quotes as Python's shlex.join does.
shell_line() {
  local word separator='' q="'\"'\"'"
  for word; do
    [[ $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]] || word="'${word//\'/$q}'"
    printf '%s%s' "$separator" "$word"
    separator=' '
  done
  printf '\n'
}

# ---- doing it ---------------------------------------------------------------------------------------------------------------

check_docker() {
  local said
  command -v docker >/dev/null || fail 1 "docker is not installed" "https://docs.docker.com/engine/install/"
  said=$(docker version --format '{{.Server.Version}}' 2>&1) && return 0
  case $said in
    *"ermission denied"*)
      fail 1 "docker does not let $(id -un) in" "use sudo, or join the group: sudo usermod -aG docker $(id -un)" "$said" ;;
    *) fail 1 "the docker daemon does not answer" "sudo systemctl start docker" "$said" ;;
  esac
}

check_image() {
  local said
  if ! docker image inspect "$image" >/dev/null 2>&1; then
    say "pulling $image"
    said=$(docker pull --quiet "$image" 2>&1) ||
      fail 1 "the image $image is not here and cannot be pulled" "check its name" "$said"
  fi
  said=$(docker run --rm --network none --entrypoint /bin/sh "$image" -c 'command -v ray || echo no Ray' 2>&1) ||
    fail 1 "$image cannot be started" "docker run --rm --entrypoint /bin/sh $image -c true" "$said"
  [[ $said == *"no Ray"* ]] || return 0
  fail 1 "$image has no Ray" "stock vLLM images carry none since v0.18. \`vlaunch up\` builds an image that does.
Or build one on every node:
  printf 'FROM %s\\nRUN uv pip install --system \"ray[default,data,serve]==2.60.0\"\\n' $image | docker build -t vllm-ray -
and name that image instead$(known_images)"
}

known_images() {
  local found
  found=$(docker images --filter label=vlaunch.image.content --format '{{.Repository}}:{{.Tag}}' 2>/dev/null) || return 0
  [ -z "$found" ] || printf '; vlaunch has built here already: %s' "${found//$'\n'/, }"
}

# Ends the script when the same container runs already.
check_name() {
  local said status format='{{.State.Status}} {{index .Config.Labels "vlaunch.spec"}}'
  said=$(docker inspect --type container --format "$format" "$container" 2>/dev/null) || return 0
  status=${said%% *}
  if [ -z "$replace" ] && [ "$said" = "running $spec" ]; then
    say "$container runs already, just so; nothing was changed"
    printf '%s\n' "$container"
    exit 0
  fi
  [ -n "$replace" ] ||
    fail 1 "there is a container called $container already, and it is $status" "say --replace to start it anew, or --stop"
  say "removing the old $container"
  said=$(docker rm --force --volumes "$container" 2>&1) || fail 1 "the old container cannot be removed" "" "$said"
}

# shellcheck disable=SC2016 # the inner bash expands them
listens() { timeout 3 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "$1" "$2" 2>/dev/null; }

check_network() {
  local name
  if [ "$role" = head ]; then
    for name in gcs group; do
      ! listens "$head_ip" "${port[$name]}" ||
        fail 1 "port ${port[$name]} is taken on $head_ip" "see what has it: \`ss -ltnp sport = :${port[$name]}\`
or say --port $name=…"
    done
  else
    listens "$head_ip" "${port[gcs]}" ||
      fail 1 "nothing answers at $head_ip:${port[gcs]}" "start the head first, and allow TCP from $node_ip to $head_ip"
  fi
}

# Stands for the launcher's own where that is not beside this script: starts what the agent would start, and no agent.
entry_sh() {
  cat <<'ENTRY'
#!/bin/sh
for file in /run/vlaunch/secrets/*; do
  name=${file##*/}
  # Ray and Hugging Face read their tokens from the mounted file themselves (RAY_AUTH_TOKEN_PATH, HF_TOKEN_PATH).
  case $name in '*' | RAY_AUTH_TOKEN | HF_TOKEN) continue ;; esac
  value=$(cat "$file") || exit 1
  export "$name=$value"
done
# The note of a dead session would send `ray start --head` to a cluster that is gone.
rm -f /tmp/ray/ray_current_cluster
while [ "$1" != -- ]; do shift; done
shift
exec "$@"
ENTRY
}

store() (
  umask 077
  local folder=${1%/*} new=${1%/*}/.${1##*/}.$$ # a name that entry.sh does not take for a secret
  mkdir -p "$folder"
  printf %s "$2" >"$new"
  mv "$new" "$1"
)

write_files() {
  local name from=$HERE/../launcher/payload to=$state/payload
  (
    umask 022
    mkdir -p "$to/lib/vlaunch_agent" "$state/server" && chmod 711 "$state" || exit 1
    if [ -d "$from" ]; then
      install -m 755 "$from/entry.sh" "$from/head.py" "$to" && install -m 755 "$from"/agent/*.py "$to/lib/vlaunch_agent"
    else
      entry_sh >"$to/.entry.sh" && chmod 755 "$to/.entry.sh" && mv "$to/.entry.sh" "$to/entry.sh"
    fi
  ) || fail 1 "the helper files cannot be written to $state" "say --state-dir"
  mkdir -p "$state/secrets" && chmod 700 "$state/secrets"
  # What is mounted becomes a variable of the container: a secret that is not given any more must go.
  for name in "$state/secrets"/*; do
    [ ! -f "$name" ] || [ -n "${secrets[${name##*/}]}" ] || rm -f "$name"
  done
  for name in "${!secrets[@]}"; do
    store "$state/secrets/$name" "${secrets[$name]}" || fail 1 "the secret $name cannot be written to $state/secrets"
  done
}

start() {
  local said hint=''
  say "starting the Ray $role $container on $node_ip ($interface), $gpus GPUs"
  said=$(docker "${command[@]}" 2>&1) && return 0
  docker rm --force --volumes "$container" >/dev/null 2>&1 || true
  case $said in
    *"could not select device driver"*)
      hint="install the NVIDIA Container Toolkit, run \`sudo nvidia-ctk runtime configure\`, and restart docker" ;;
    *"setting rlimit"*) hint="the daemon may not raise memlock here: leave --rdma out, or allow it (LimitMEMLOCK=infinity)" ;;
    *infiniband*) hint="this machine has no /dev/infiniband: load its RDMA driver, or leave --rdma out" ;;
    *"/dev/kfd"*) hint="this machine has no AMD GPU driver loaded: \`sudo modprobe amdgpu\`" ;;
  esac
  fail 1 "docker cannot start $container" "$hint" "$said"
}

# The head listens on Ray's port, a worker on its node manager's; a container that ended or began again has failed.
await_ray() {
  local wanted=${port[gcs]} deadline=$((SECONDS + patience)) said
  [ "$role" = head ] || wanted=${port[node_manager]}
  while :; do
    said=$(docker inspect --type container --format '{{.State.Status}} {{.RestartCount}}' "$container" 2>&1) || true
    [ "$said" = "running 0" ] || fail 1 "the Ray $role ended soon after its start ($said restarts)" \
      "docker logs $container; run_cluster.sh --cluster $cluster --stop removes it" "$(docker logs --tail 20 "$container" 2>&1)"
    ! listens "$node_ip" "$wanted" || return 0
    ((SECONDS < deadline)) || fail 1 "the Ray $role does not listen on $node_ip:$wanted after ${patience}s" \
      "docker logs -f $container" "$(docker logs --tail 20 "$container" 2>&1)"
    sleep 0.5
  done
}

say_next() {
  say "the Ray $role listens on $node_ip; see all nodes: docker exec $container ray status"
  if [ "$role" = head ]; then
    say "workers need the head's token: scp -p $state/secrets/$TOKEN WORKER:ray-token"
    say "and on each: run_cluster.sh --token-file ~/ray-token --cluster $cluster $image $head_ip --worker $hf_home"
  fi
  [ -n "${secrets[$TOKEN]}" ] ||
    say "note: without the head's token this node's agent joins no other: \`vlaunch serve\` cannot use it"
  [ -f "$state/payload/head.py" ] ||
    say "note: launcher/payload is not beside this script, so no agent runs here: \`vlaunch\` can start no server on this node"
  printf '%s\n' "$container"
}

remove_all() {
  local ids said
  if [ -n "$dry_run" ]; then
    say "would remove what \`docker ps --all --filter label=vlaunch.cluster=$cluster\` shows, and $state/payload, secrets and server"
    return 0
  fi
  check_docker
  mapfile -t ids < <(docker ps --all --quiet --no-trunc --filter "label=vlaunch.cluster=$cluster")
  if ((${#ids[@]})); then
    said=$(docker rm --force --volumes "${ids[@]}" 2>&1) ||
      fail 1 "containers of $cluster cannot be removed" "run it again" "$said"
  fi
  said=$(docker ps --all --quiet --filter "label=vlaunch.cluster=$cluster") && [ -z "$said" ] ||
    fail 1 "containers of $cluster are left" "run it again" "$said"
  rm -rf "$state/payload" "$state/secrets" "$state/server"
  rmdir "$state" 2>/dev/null || [ ! -d "$state" ] || say "note: $state holds other files and stays"
  say "cluster $cluster: ${#ids[@]} containers removed; nothing of it is left on this machine"
}

main() {
  read_options "$@"
  check_words
  if [ -n "$stop" ]; then remove_all; return; fi
  find_address
  count_gpus
  find_token
  if [ -n "$dry_run" ]; then
    if [ -n "$mint" ]; then
      secrets[$TOKEN]=$(printf '%064d' 0)
      say "note: $mint is not there yet; with it the labels vlaunch.secrets and vlaunch.spec will be others"
    fi
    plan_container
    shell_line docker "${command[@]}"
    return
  fi
  check_docker
  [ -z "$rdma" ] || [ -d /dev/infiniband ] ||
    fail 1 "--rdma: this machine has no /dev/infiniband" "load its RDMA driver, or leave --rdma out"
  check_image
  if [ -n "$mint" ]; then
    secrets[$TOKEN]=$(head -c 32 /dev/urandom | hex)
    store "$mint" "${secrets[$TOKEN]}" || fail 1 "the token cannot be written to $mint"
  fi
  plan_container
  check_name
  check_network
  write_files
  start
  await_ray
  say_next
}

main "$@"
