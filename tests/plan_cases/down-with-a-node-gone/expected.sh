#!/usr/bin/env bash
# vlaunch down: cluster lab, 3 nodes, from inventory.yaml
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
    node3) ssh 192.0.2.13 "$(quoted "$@")" ;;
  esac
}

# Waits for all background jobs; a failed one ends the script.
all() { local job; for job in $(jobs -p); do wait "$job"; done; }

# == Remove workers
on node2 docker rm --force --volumes d99d48cd6182bf9bf9e811f5d63aefbd1b2fe562c58c3b7795eb293cfc0fa7cb

# == Remove the head
on node1 docker rm --force --volumes bff86e874d240ce3d75c0f9687e55afa4077abe7be023f72eef0b3175d8c1c87

# == Remove files and secrets
on node1 sh -c 'rm -rf "$1/payload" "$1/secrets" "$1/front" "$1/server" "$1/$2" "$1/.$2."* && { rmdir "$3"/* "$3" ${4:+"$4"} 2>/dev/null; rmdir "$1" 2>/dev/null || [ ! -d "$1" ]; } && { rmdir "${1%/*}" 2>/dev/null || true; }' clear /root/.vlaunch/lab network.json /root/.vlaunch/cache/lab /root/.vlaunch/cache &
on node2 sh -c 'rm -rf "$1/payload" "$1/secrets" "$1/front" "$1/server" "$1/$2" "$1/.$2."* && { rmdir "$3"/* "$3" ${4:+"$4"} 2>/dev/null; rmdir "$1" 2>/dev/null || [ ! -d "$1" ]; } && { rmdir "${1%/*}" 2>/dev/null || true; }' clear /root/.vlaunch/lab network.json /root/.vlaunch/cache/lab /root/.vlaunch/cache &
all

# == Verify that nothing is left
# gate absent: no container, file or secret of the cluster is left

exit
} </dev/null
