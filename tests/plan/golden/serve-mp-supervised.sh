#!/usr/bin/env bash
# vlaunch serve: cluster c, 2 nodes, from inventory.yaml
# Each `on NODE …` is one command that the run sends, word for word; the run adds a deadline to it on both ends.
set -euo pipefail
{  # read whole before it begins, so that it may be piped into bash

on() {
  local node=$1; shift
  case $node in
    n1) ssh n1 "$(printf '%q ' "$@")" ;;
    n2) ssh n2 "$(printf '%q ' "$@")" ;;
  esac
}

# Waits for everything that was started with `&`; one that failed ends the script.
all() { local job; for job in $(jobs -p); do wait "$job"; done; }

# The run takes the token that the head has, or makes one; labels that hash secrets depend on it.
: "${RAY_AUTH_TOKEN:=$(openssl rand -hex 32)}"
# note: TP 8 × PP 2 (as asked): ranks expected 8 on n1, 8 on n2

# == Look at the nodes and the model
# gate model: every node has the model, or may download it
# gate free-gpus: nothing in Ray holds the GPUs
# gate api-port: port 8001 is free on the head
# gate mp-port: port 29501 is free on the head
# gate group-port: port 29560 is free on the head

# == Compare the image between the nodes
# gate image: base:1 is the same on every node

# == Write helper files and secrets
vlaunch payload | on n1 sh -c 'umask 022 && mkdir -p "$1/payload" "$1/server" && chmod 711 "$1" && tar -xf - -C "$1/payload"' unpack /root/.vlaunch/c &
vlaunch payload | on n2 sh -c 'umask 022 && mkdir -p "$1/payload" "$1/server" && chmod 711 "$1" && tar -xf - -C "$1/payload"' unpack /root/.vlaunch/c &
all
printf %s "${RAY_AUTH_TOKEN:?}" | on n1 sh -c 'umask 077 && mkdir -p "$1/secrets" && chmod 711 "$1" && new=$1/secrets/.$2.$(uname -n).$$ && cat > "$new" && mv "$new" "$1/secrets/$2"' store /root/.vlaunch/c RAY_AUTH_TOKEN &
printf %s "${RAY_AUTH_TOKEN:?}" | on n2 sh -c 'umask 077 && mkdir -p "$1/secrets" && chmod 711 "$1" && new=$1/secrets/.$2.$(uname -n).$$ && cat > "$new" && mv "$new" "$1/secrets/$2"' store /root/.vlaunch/c RAY_AUTH_TOKEN &
all

# == Write down what is wanted
printf %s '{"version": 1, "id": "d983a404", "backend": "mp", "model": "org/m", "argv": ["vllm", "serve", "org/m", "--tensor-parallel-size", "8", "--pipeline-parallel-size", "2", "--distributed-executor-backend", "mp", "--host", "0.0.0.0", "--port", "8001"], "env": {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,BOOTSTRAP,ENV,NET", "NCCL_DEBUG_FILE": "/tmp/vlaunch-nccl.rank.%h.%p.log"}, "metadata": {"vlaunch.model": "org/m", "vlaunch.args": "d983a404", "vlaunch.host": "0.0.0.0", "vlaunch.port": "8001", "vlaunch.tp": "8", "vlaunch.pp": "2"}, "asked_for": {"model": "org/m", "backend": "mp", "host": "0.0.0.0", "port": 8001, "tp": 8, "pp": 2, "dp": 1, "args": []}, "image": "1", "cluster": {"nodes": {"10.0.0.1": 8, "10.0.0.2": 8}, "needs": 16, "port": 6380}, "api": {"host": "127.0.0.1", "port": 8001}, "dashboard": 8265, "policy": {"canary": 5.0, "timeout": 8, "restarts": 3, "window": 3600, "grace": 5, "start_timeout": 1800.0}, "supervise": true}' | on n1 sh -c 'umask 022 && mkdir -p "$1/server" && cd "$1/server" && shift && rm -f "$@" && new=.wanted.$$ && cat >"$new" && mv "$new" wanted.json' want /root/.vlaunch/c wanted.json gave-up.json server.json

# == Start the ranks
on n1 docker run --detach --name vlaunch-c-n1-rank --network host --ipc private --tmpfs /dev/shm --restart unless-stopped --gpus 8 --volume /root/.vlaunch/c/payload:/opt/vlaunch:ro --volume /root/.vlaunch/c/secrets:/run/vlaunch/secrets:ro --volume /root/.vlaunch/c/server:/var/lib/vlaunch --volume /data/huggingface:/data/huggingface --env HF_HOME=/data/huggingface --env NCCL_DEBUG=INFO --env NCCL_DEBUG_FILE=/tmp/vlaunch-nccl.rank.%h.%p.log --env NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,ENV,NET --env VLLM_HOST_IP=10.0.0.1 --label vlaunch.args=d983a404 --label vlaunch.cluster=c --label vlaunch.host=0.0.0.0 --label vlaunch.model=org/m --label vlaunch.node=n1 --label vlaunch.port=8001 --label vlaunch.pp=2 --label vlaunch.role=rank --label vlaunch.secrets=a4a883283f1c --label vlaunch.spec=2e3706f65c12 --label vlaunch.tp=8 --entrypoint /bin/sh base:1 /opt/vlaunch/entry.sh python3 /opt/vlaunch/group.py --rank 0 --of 2 --head 10.0.0.1 --port 29560 --id d983a404 --node n1 --api-host 127.0.0.1 --api 8001 -- vllm serve org/m --tensor-parallel-size 8 --pipeline-parallel-size 2 --distributed-executor-backend mp --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --master-port 29501 --host 0.0.0.0 --port 8001 &
on n2 docker run --detach --name vlaunch-c-n2-rank --network host --ipc private --tmpfs /dev/shm --restart unless-stopped --gpus 8 --volume /root/.vlaunch/c/payload:/opt/vlaunch:ro --volume /root/.vlaunch/c/secrets:/run/vlaunch/secrets:ro --volume /root/.vlaunch/c/server:/var/lib/vlaunch --volume /data/huggingface:/data/huggingface --env HF_HOME=/data/huggingface --env NCCL_DEBUG=INFO --env NCCL_DEBUG_FILE=/tmp/vlaunch-nccl.rank.%h.%p.log --env NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,ENV,NET --env VLLM_HOST_IP=10.0.0.2 --label vlaunch.args=d983a404 --label vlaunch.cluster=c --label vlaunch.host=0.0.0.0 --label vlaunch.model=org/m --label vlaunch.node=n2 --label vlaunch.port=8001 --label vlaunch.pp=2 --label vlaunch.role=rank --label vlaunch.secrets=a4a883283f1c --label vlaunch.spec=b5421d71dde8 --label vlaunch.tp=8 --entrypoint /bin/sh base:1 /opt/vlaunch/entry.sh python3 /opt/vlaunch/group.py --rank 1 --of 2 --head 10.0.0.1 --port 29560 --id d983a404 --node n2 --api-host 127.0.0.1 --api 8001 -- vllm serve org/m --tensor-parallel-size 8 --pipeline-parallel-size 2 --distributed-executor-backend mp --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29501 --headless --host 0.0.0.0 --port 8001 &
all

exit
} </dev/null
