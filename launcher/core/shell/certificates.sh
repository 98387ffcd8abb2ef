#!/bin/sh
# Print the public certificates of a node's agent, the authority's first; never the private key.
#
# Arguments: the directories to search; the first that has certificates wins.

for each; do
  [ -e "$each/secrets/AGENT_CA" ] || continue
  for file in AGENT_CA AGENT_CERTIFICATE; do
    sed -n '/-BEGIN CERTIFICATE-/,/-END CERTIFICATE-/p' "$each/secrets/$file" 2>/dev/null | head -c 8192
  done
  break
done
