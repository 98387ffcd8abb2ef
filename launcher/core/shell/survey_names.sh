#!/bin/sh
# Resolve names: the reverse name of every argument (an address) and the addresses of that name, and
# the node's own name. All lookups run in parallel, with a timeout of 5 s.
#
# Output per lookup: kind, subject, start and end (seconds since 1970), getent's exit status, and
# the answer (an address and its name, or all addresses). The configured name services follow.

command -v getent >/dev/null || exit 127
look() {
  # Repeat a slow lookup: a slow resolver is slow again, a busy node seldom is. Both attempts must
  # end within the 15 s of a part.
  for _ in 1 2; do
    began=$(date +%s.%N)
    found=$(timeout -k 1 5 getent "$3" "$2" 2>/dev/null)
    status=$?
    ended=$(date +%s.%N)
    case $((${ended%.*} - ${began%.*})) in 1 | 2) ;; *) break ;; esac
  done
  found=$(printf '%s\n' "$found" | awk -v of="$3" '
    of == "hosts" { print $1, $2; exit }
    NF && !seen[$1]++ { printf "%s ", $1 }
  ')
  printf '%s %s %s %s %s %s\n' "$1" "$2" "$began" "$ended" "$status" "$found"
}
for each; do
  {
    look reverse "$each" hosts
    [ "$status" != 0 ] || look forward "${found#* }" ahosts
  } &
done
look own "$(uname -n)" ahosts
wait
grep -hs -e '^nameserver' -e '^hosts:' /etc/resolv.conf /etc/nsswitch.conf
:
