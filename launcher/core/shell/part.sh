# Print a command's output between two lines: the name of the part, and the exit status.
#
# `timeout` bounds every part, so that a hung NFS mount or Docker daemon does not delay the others.
# Sets `answers` to the exit status.
#
# shellcheck shell=sh
# shellcheck disable=SC2034 # callers read `answers`

part() {
  name=$1; shift
  printf '\n@@vlaunch %s\n' "$name"
  timeout -k 2 15 "$@" 2>&1
  answers=$?
  printf '\n@@vlaunch rc %s\n' "$answers"
}
