#!/bin/sh
# First process of every vlaunch container: puts the mounted secrets into the environment of what it starts, so that no secret
# is ever an argument, a value in `docker inspect`, or a line of a script. Usage: entry.sh agent OPTION… | COMMAND [ARG…]
for file in /run/vlaunch/secrets/*; do
  name=${file##*/}
  # Ray and Hugging Face read their tokens from the mounted file themselves (RAY_AUTH_TOKEN_PATH, HF_TOKEN_PATH).
  # The agent reads its certificate itself, again when it is renewed.
  case $name in '*' | RAY_AUTH_TOKEN | HF_TOKEN | AGENT_CA | AGENT_CERTIFICATE) continue ;; esac
  value=$(cat "$file") || exit 1
  export "$name=$value"
done
if [ "$1" = agent ]; then
  shift
  # A restarted container keeps its layer: NCCL's logs of a job that had the same name would be read as the new one's.
  rm -f /tmp/vlaunch-nccl.*
  # So does Ray's folder: the last session says how it ended, those before it only take room.
  before=; for each in /tmp/ray/session_2*; do rm -rf "$before"; before=$each; done
  case " $* " in *' -- ray '*) command -v ray >/dev/null || {
    echo "entry.sh: this image has no Ray (stock vLLM images carry none since v0.18): let vlaunch build the derived image" >&2
    exit 127
  } ;; esac
  # An upgrade replaces the archive, which Python reads again for late imports and tracebacks: the agent keeps its own open.
  exec 3</opt/vlaunch/agent.pyz
  exec python3 -c 'import os, sys; sys.path.insert(0, f"/proc/{os.getpid()}/fd/3"); from vlaunch_agent.__main__ import main; sys.exit(main())' "$@"
fi
exec "$@"
