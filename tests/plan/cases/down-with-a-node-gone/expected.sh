#!/usr/bin/env bash
# vlaunch down: cluster lab, 3 nodes, from inventory.yaml
# Each `on NODE …` is one command that the run sends, word for word; the run adds a deadline to it on both ends.
set -euo pipefail
{  # read whole before it begins, so that it may be piped into bash

on() {
  local node=$1; shift
  case $node in
    node1) ssh 192.0.2.11 "$(printf '%q ' "$@")" ;;
    node2) ssh 192.0.2.12 "$(printf '%q ' "$@")" ;;
    node3) ssh 192.0.2.13 "$(printf '%q ' "$@")" ;;
  esac
}

# Waits for everything that was started with `&`; one that failed ends the script.
all() { local job; for job in $(jobs -p); do wait "$job"; done; }

exit
} </dev/null
