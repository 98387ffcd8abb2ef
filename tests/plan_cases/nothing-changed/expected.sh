#!/usr/bin/env bash
# vlaunch up: cluster lab, 2 nodes, from inventory.yaml
# Each `on NODE …` is one command of the run. The run also sets a deadline for it, here and on the node.
set -euo pipefail
{  # read completely before it starts, so that it can be piped into bash

# Quotes each word for any POSIX shell, in any locale; `%q` of printf does not.
quoted() { local q="'"; for word; do printf "'%s' " "${word//$q/$q\\$q$q}"; done; }

on() {
  local node=$1; shift
  case $node in
    node1) ssh 192.0.2.11 "$(quoted "$@")" ;;
    node2) ssh 192.0.2.12 "$(quoted "$@")" ;;
  esac
}

# Waits for all background jobs; a failed one ends the script.
all() { local job; for job in $(jobs -p); do wait "$job"; done; }

# == Scan the nodes
# gate docker: Docker answers
# gate docker-engine: the daemon is Docker and runs as root
# gate selinux: SELinux lets containers use the mounted directories
# gate ports: the cluster's ports are free
# gate address: the declared address is on the declared interface
# gate disk: the disks have room for the image and the model
# gate state-dir: the state directory is writable

# == Compare the image between the nodes
# gate image: vllm-cpu:0.32.0 is the same on every node

# == Verify the Ray cluster
# gate ray-nodes: Ray has exactly 2 nodes with 2 GPUs

# == Verify the agents
# gate agents: all agents are connected to the head

exit
} </dev/null
