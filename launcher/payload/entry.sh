#!/bin/sh
# First process of every vlaunch container: puts the mounted secrets into the environment of what it starts, so that no secret
# is ever an argument, a value in `docker inspect`, or a line of a script. Usage: entry.sh COMMAND [ARG…]
for file in /run/vlaunch/secrets/*; do
  name=${file##*/}
  # Ray and Hugging Face read their tokens from the mounted file themselves (RAY_AUTH_TOKEN_PATH, HF_TOKEN_PATH).
  case $name in '*' | RAY_AUTH_TOKEN | HF_TOKEN) continue ;; esac
  value=$(cat "$file") || exit 1
  export "$name=$value"
done
# A restarted container keeps its layer: the note of a dead Ray session would send `ray start --head` to a cluster that is gone,
# and NCCL's logs of a job that had the same name would be read as the new one's.
rm -f /tmp/ray/ray_current_cluster /tmp/vlaunch-nccl.*
if [ "$1" = ray ] && ! command -v ray >/dev/null; then
  echo "entry.sh: this image has no Ray (stock vLLM images carry none since v0.18): let vlaunch build the derived image" >&2
  exit 127
fi
# What was served before this container restarted, or its supervisor died, is served again, without anybody's doing.
if [ "$1 $2 $3" = "ray start --head" ] && [ -f /opt/vlaunch/supervisor.py ]; then
  (python3 /opt/vlaunch/supervisor.py boot; exec python3 /opt/vlaunch/supervisor.py watch) &
fi
exec "$@"
