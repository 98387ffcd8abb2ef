#!/bin/sh
# Print, in a container, the end of each server's log that is there, with the server's name before
# each line.
#
# Arguments: the only server that is wanted ("" = all), lines, `-F` to go on or `-q` not to.

cd "${VLAUNCH_STATE:-/var/lib/vlaunch}" 2>/dev/null || exit 0
for log in */engine.log; do
  name=${log%/*}
  if [ -f "$log" ] && [ "${1:-$name}" = "$name" ]; then
    tail -n "$2" "$3" "$log" | sed -u "s|^|$name |" &
  fi
done
wait
