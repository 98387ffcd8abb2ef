# Name a part of an answer, and print it between two lines: its name, and its exit status.
#
# `timeout` bounds each: a hung NFS mount or a wedged daemon must not take the other answers with
# it. `answers` is the exit status then.
#
# shellcheck shell=sh
# shellcheck disable=SC2034 # who asks looks at `answers`

part() {
  name=$1; shift
  printf '\n@@vlaunch %s\n' "$name"
  timeout -k 2 15 "$@" 2>&1
  answers=$?
  printf '\n@@vlaunch rc %s\n' "$answers"
}
