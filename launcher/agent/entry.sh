#!/bin/sh
# First process of every vlaunch container: exports the mounted secrets to the process that it starts, so that no secret is
# an argument, a value in `docker inspect`, or a line of a script. Usage: entry.sh agent OPTION… | COMMAND [ARG…]
for file in /run/vlaunch/secrets/*; do
  name=${file##*/}
  # Ray and Hugging Face read their tokens from the mounted files (RAY_AUTH_TOKEN_PATH, HF_TOKEN_PATH). The agent reads
  # its certificate, and reads it again after a renewal.
  case $name in '*' | RAY_AUTH_TOKEN | HF_TOKEN | AGENT_CA | AGENT_CERTIFICATE) continue ;; esac
  value=$(cat "$file") || exit 1
  export "$name=$value"
done
if [ "$1" = agent ]; then
  shift
  # A restarted container keeps its writable layer: remove NCCL's logs, which a new job of the same name would mix with its own.
  rm -f /tmp/vlaunch-nccl.*
  # Keep Ray's last session, which shows how it ended, and remove the older ones.
  before=; for each in /tmp/ray/session_2*; do rm -rf "$before"; before=$each; done
  case " $* " in *' -- ray '*) command -v ray >/dev/null || {
    echo "entry.sh: this image has no Ray (vLLM's images omit it since v0.18): let vlaunch build the derived image" >&2
    exit 127
  } ;; esac
  # Python reads the archive again for late imports and tracebacks, and an upgrade replaces it: keep the current one open.
  exec 3</opt/vlaunch/agent.pyz
  exec python3 -c 'import os, sys; sys.path.insert(0, f"/proc/{os.getpid()}/fd/3"); from vlaunch_agent.agent.__main__ import main; sys.exit(main())' "$@"
fi
exec "$@"
