#!/bin/sh
# Brings the files beside this script into place on the node that is named; nothing is started.
# Made by `vlaunch export systemd`.
set -eu
node=${1:?usage: sh install.sh NODE}
cd "$(dirname "$0")"
[ -e "$node.service" ] || { echo "install.sh: no node $node takes part" >&2; exit 2; }
[ -e secrets/RAY_AUTH_TOKEN ] || { echo "install.sh: secrets/RAY_AUTH_TOKEN is missing" >&2; exit 2; }
umask 022
mkdir -p /var/lib/vlaunch/pair/server
chmod 711 /var/lib/vlaunch/pair
rm -rf /var/lib/vlaunch/pair/payload
cp -R payload /var/lib/vlaunch/pair/payload
cp server.json /var/lib/vlaunch/pair/server.json
(umask 077 && rm -rf /var/lib/vlaunch/pair/secrets && mkdir /var/lib/vlaunch/pair/secrets && cp secrets/* /var/lib/vlaunch/pair/secrets/)
cp "$node.service" /etc/systemd/system/vlaunch-pair.service
if [ -e "$node.network" ]; then cp "$node.network" /etc/systemd/system/vlaunch-pair-network.service; fi
systemctl daemon-reload
