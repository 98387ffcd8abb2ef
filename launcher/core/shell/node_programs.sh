#!/bin/sh
# Create a cluster's directories, and unpack the node programs from standard input.
#
# Arguments: as for node_folders.sh. tar replaces files atomically, so that containers never read
# incomplete ones.

. ./node_folders.sh

mkdir -p "$d/payload" && tar -xf - -C "$d/payload"
