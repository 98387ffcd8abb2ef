#!/usr/bin/env bash
# vlaunch serve: cluster c, 2 nodes, from inventory.yaml
# Each `on NODE …` is one command of the run. The run also sets a deadline for it, here and on the node.
set -euo pipefail
{  # read completely before it starts, so that it can be piped into bash

# Quotes each word for any POSIX shell, in any locale; `%q` of printf does not.
quoted() { local q="'"; for word; do printf "'%s' " "${word//$q/$q\\$q$q}"; done; }

on() {
  local node=$1; shift
  case $node in
    n1) ssh n1 "$(quoted "$@")" ;;
    n2) ssh n2 "$(quoted "$@")" ;;
  esac
}

# Waits for all background jobs; a failed one ends the script.
all() { local job; for job in $(jobs -p); do wait "$job"; done; }
# note: TP 8 × PP 2 (as requested): ranks expected 8 on n1, 8 on n2

# == Check the cluster and the model
# gate agents: all agents are connected to the head
# gate accelerator: the declared accelerators are visible
# gate model: every node has the model or can download it
# gate room: enough GPUs are free, and port 8000 on n1
# gate gpu-memory: its GPUs have enough free memory
# gate engine-flags: the server's arguments are valid

# == Create the server
printf %s '{"name": "default", "id": "295477a4", "model": "org/m", "backend": "mp", "processes": [{"node": "n1", "argv": ["vllm", "serve", "org/m", "--chat-template", "it'"'"'s", "--tensor-parallel-size", "8", "--pipeline-parallel-size", "2", "--distributed-executor-backend", "mp", "--nnodes", "2", "--node-rank", "0", "--master-addr", "10.0.0.1", "--master-port", "29501", "--host", "0.0.0.0", "--port", "8000"], "env": {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "/tmp/vlaunch-nccl.default-295477a4.%h.%p.log", "NCCL_DEBUG_SUBSYS": "INIT,BOOTSTRAP,ENV,NET", "VLLM_ENGINE_READY_TIMEOUT_S": "3600"}, "gpus": null, "replicas": [0, 1]}, {"node": "n2", "argv": ["vllm", "serve", "org/m", "--chat-template", "it'"'"'s", "--tensor-parallel-size", "8", "--pipeline-parallel-size", "2", "--distributed-executor-backend", "mp", "--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1", "--master-port", "29501", "--headless", "--host", "0.0.0.0", "--port", "8000"], "env": {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "/tmp/vlaunch-nccl.default-295477a4.%h.%p.log", "NCCL_DEBUG_SUBSYS": "INIT,BOOTSTRAP,ENV,NET", "VLLM_ENGINE_READY_TIMEOUT_S": "3600"}, "gpus": null, "replicas": [0, 1]}], "host": "0.0.0.0", "port": 8000, "places": {"n1": 8, "n2": 8}, "addresses": {"n1": "10.0.0.1", "n2": "10.0.0.2"}, "asked": '"$(date +%s)"', "replicas": 1, "tp": 8, "visible": "CUDA_VISIBLE_DEVICES", "memory_share": 0.92, "ray": {"dashboard": 8265, "node_manager": 6380, "gpus": 16, "reserve": true, "partial": false}, "policy": {"canary": 5.0, "stuck": 360.0, "restarts": null, "window": 3600.0, "start_timeout": 1800.0, "grace": 5.0, "drain": 60.0, "pause": 5.0, "longest_pause": 600.0}, "asked_for": {"model": "org/m", "backend": "mp", "host": "0.0.0.0", "port": 8000, "tp": 8, "pp": 2, "dp": 1, "args": ["--chat-template", "it'"'"'s"], "nodes": [], "gpus": null}, "image": "1", "version": 2}' | on n1 sh -c 'umask 022; [ ! -g "${1%/*}" ] || umask 002; saved() { sync "$1" 2>/dev/null || sync; }; new=$1/.$2.$$; mkdir -p "$1" && cat >"$new" && saved "$new" && mv "$new" "$1/$2" && saved "$1"' want /root/.vlaunch/c/server/default desired.json

exit
} </dev/null
