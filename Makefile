# `make demo` shows the whole job on two practice hosts on this machine; `make test` runs every check.
# Both install what they need into .venv, from exact, hashed versions (requirements.lock).

PYTHON ?= python3
BIN := .venv/bin
LAB := /var/lib/vlaunch-lab
DEBIAN13 := /var/cache/vlaunch-lab/debian13
# The practice hosts need root (network namespaces, dockerd); everything else does not.
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)
VLAUNCH := $(BIN)/vlaunch
PAIR := $(wildcard tests/integration/test_[1389]_*.py)

.PHONY: demo test machine machine-exports lint unit processes lab-tests lab-tests-pair lab-tests-others long-tests faults mutants figures layout plans exports exports-run recipes lock docs reference recording clean-lab

demo: .venv/installed
	$(SUDO) $(VLAUNCH) lab up --install-missing
	$(VLAUNCH) check $(LAB)/inventory.yaml
	$(VLAUNCH) up $(LAB)/inventory.yaml
	$(VLAUNCH) exec --head -- ray status
	$(VLAUNCH) check-nccl
	$(VLAUNCH) serve
	$(VLAUNCH) exec --head -- ray status
	$(VLAUNCH) chat --max-tokens 24 "What is a pipeline stage?"
	$(VLAUNCH) status
	$(VLAUNCH) stop
	rm -rf out/demo
	$(VLAUNCH) batch --model /data/huggingface/tiny-llama --input examples/data/prompts.txt --max-tokens 24 \
		--output out/demo --output-format jsonl
	cat out/demo/rows/*.jsonl
	@echo
	@echo "The cluster stays up: try \`$(VLAUNCH) serve\` and \`$(VLAUNCH) chat\`, or a job in examples/."
	@echo "Remove it with \`$(strip $(SUDO) $(VLAUNCH) lab down)\`."

test: machine
	$(MAKE) --no-print-directory --jobs 2 lint unit
	$(MAKE) --no-print-directory processes lab-tests

# sshd for the tests of the transport, Docker and the rest for the practice hosts, a browser for the page of the network check,
# nft to read the firewall rules. Prometheus is only unpacked: Debian's package would start it.
machine: .venv/installed .venv/prometheus/usr/bin/promtool
	$(SUDO) $(VLAUNCH) lab install
	command -v nft >/dev/null || { $(SUDO) apt-get update --quiet && $(SUDO) env DEBIAN_FRONTEND=noninteractive \
		apt-get install --yes --quiet --no-install-recommends nftables; }
	command -v chromium >/dev/null || { $(SUDO) apt-get update --quiet && $(SUDO) env DEBIAN_FRONTEND=noninteractive \
		apt-get install --yes --quiet --no-install-recommends chromium fonts-dejavu-core; }

.venv/prometheus/usr/bin/promtool: | .venv/installed
	rm -rf .venv/prometheus && mkdir .venv/prometheus && cd .venv/prometheus && \
		{ apt-get download --quiet prometheus || { $(SUDO) apt-get update --quiet && apt-get download --quiet prometheus; }; } && \
		dpkg-deb --extract prometheus_*.deb . && rm prometheus_*.deb

# podman for tests that run exported pods. Debian has its `kube play` since version 13, so a small Debian 13 is made; the tests are
# skipped where that fails.
machine-exports: machine
	test -d $(DEBIAN13) || { $(SUDO) rm -rf $(DEBIAN13).new && $(SUDO) mkdir -p $(dir $(DEBIAN13)) && \
		$(SUDO) mmdebstrap --quiet --variant=minbase \
		--include=podman,runc,catatonit trixie $(DEBIAN13).new && \
		$(SUDO) mv $(DEBIAN13).new $(DEBIAN13); } || echo "no Debian 13 here: tests of exports that need it are skipped"

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/shellcheck --external-sources --source-path=SCRIPTDIR scripts/*.sh launcher/*/*.sh launcher/*/*/*.sh benchmarks/*/*.sh tests/*/*.sh

# Files of tests lie in memory, where there is room and programs may be started: a disk waits at each file that is replaced.
MEMORY := $(shell grep -q ' /dev/shm .*noexec' /proc/mounts 2>/dev/null || \
	df --output=avail /dev/shm 2>/dev/null | awk 'NR == 2 && $$1 > 1000000 { print "TMPDIR=/dev/shm" }')

# With byte code kept, whatever the environment says: compiling all tests anew in each process takes seconds.
unit: .venv/installed
	$(MEMORY) PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -q -m "not lab and not processes" -n auto --dist worksteal

# Definitions of custom resources, and a checker, for tests of exports; without them those say that they were skipped.
export VLAUNCH_CRDS ?= $(abspath $(wildcard ../shared/fixtures/kubernetes))

# Agents, sshd, pip and scripts as programs of their own: they wait for one another, and for deadlines.
processes: .venv/installed
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -q -m "processes and not lab" -n auto --dist worksteal

# In two rows at once, for much of their time is waiting: most of what runs on the cluster of two nodes, and all others. Those have a
# cluster of three nodes, and take two of them where a test needs a cluster of two. Both rows take about the same time.
lab-tests: .venv/installed
	$(MAKE) --no-print-directory --jobs 2 lab-tests-pair lab-tests-others

lab-tests-pair: .venv/installed
	$(SUDO) $(BIN)/pytest -q -m "lab and not long" --durations=15 $(PAIR)

lab-tests-others: .venv/installed
	$(SUDO) env VLAUNCH_PAIR_OF_TRIO=1 $(BIN)/pytest -q -m "lab and not long" --durations=15 $(PAIR:%=--ignore=%)

# Servers and batches that die in every way, several servers at once, a flood, and a login that may do little: an hour and more
# that `make test` has no room for. The compiler is for what engines compile.
long-tests: machine-exports
	command -v g++ >/dev/null && test -e /usr/include/python3.11/Python.h || { $(SUDO) apt-get update --quiet && \
		$(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --no-install-recommends g++ python3-dev; }
	$(SUDO) $(BIN)/pytest -q -m long --durations=30

# The fault campaign, or what is missing of it: hours. FAULTS="--verb up --seeds 1" narrows it; results go on where they stopped.
faults: .venv/installed
	code=0; $(SUDO) $(BIN)/python -m benchmarks.faults $(FAULTS) || code=$$?; $(BIN)/python -m benchmarks.faults --report && exit $$code

# How many of a seeded sample of mutants the unit tests kill: an hour on two cores. MUTANTS="--count 20 --seed 7" is another sample,
# MUTANTS=--again tests the last one's survivors. cosmic-ray has a .venv of its own, for it is of no use to anything else.
mutants: .venv/installed .venv/cosmic-ray/installed
	.venv/cosmic-ray/bin/python benchmarks/mutants.py $(MUTANTS)

.venv/cosmic-ray/installed: | .venv/installed
	$(PYTHON) -m venv .venv/cosmic-ray
	.venv/cosmic-ray/bin/pip install --quiet --disable-pip-version-check cosmic-ray==8.7.0
	touch $@

# How hard the code is to read.
figures: .venv/installed
	$(BIN)/python -m benchmarks.figures

# The bands of the import contract, drawn in docs/explanation/architecture.md.
layout: .venv/installed
	$(BIN)/python -m benchmarks.layout

# Every export of every example inventory through every checker that is here, and a broken copy of each.
exports: .venv/installed
	$(BIN)/python -m benchmarks.exports

# Exported pods (by podman) and Prometheus on practice hosts. An hour.
exports-run: machine-exports
	$(SUDO) $(BIN)/pytest -q -m long -rs --durations=20 $(wildcard tests/integration/test_m_export_*.py) tests/integration/test_l_metrics.py

# What `vlaunch plan` chooses for each model of its cases on twenty clusters: DP × TP × PP.
plans: .venv/installed
	$(BIN)/python -m benchmarks.plan --table

.venv/installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

# The packaged recipes, from a checkout of github.com/vllm-project/recipes: make recipes FROM=../recipes
recipes: .venv/installed
	$(BIN)/python -m benchmarks.package_recipes $(FROM)

# The newest versions that fit pyproject.toml, with hashes; review the difference. requirements-runtime.lock has those of users.
COMPILE := $(BIN)/uv pip compile --universal --generate-hashes --no-emit-index-url --no-header --quiet
lock: .venv/installed
	$(COMPILE) pyproject.toml --extra dev --python-version 3.10 --output-file requirements.lock
	$(COMPILE) pyproject.toml --constraint requirements.lock --python-version 3.10 --no-annotate --output-file requirements-runtime.lock
	$(COMPILE) --group docs --python-version 3.11 --output-file requirements-docs.lock

# The site, in out/site/index.html. Warnings, such as broken links and anchors, are errors; needs no network once .venv/docs exists.
docs: reference .venv/docs/installed
	.venv/docs/bin/sphinx-build --fail-on-warning --keep-going --fresh-env --quiet docs out/site

# Reference pages from the code that defines their content; they are committed.
reference: .venv/installed
	$(BIN)/python -m scripts.reference

# docs/demo.svg from a log of `make demo`: make recording LOG=demo.log; without LOG it runs the demo first.
recording: .venv/installed
	$(if $(LOG),,mkdir -p out && { $(MAKE) --no-print-directory demo >out/demo.log 2>&1 || { tail out/demo.log; exit 1; }; })
	$(BIN)/python -m scripts.recording $(or $(LOG),out/demo.log)

# Python 3.11 or newer. A separate environment, so that neither users nor tests install Sphinx.
.venv/docs/installed: requirements-docs.lock | .venv/installed
	$(PYTHON) -m venv .venv/docs
	.venv/docs/bin/pip install --quiet --disable-pip-version-check --require-hashes -r requirements-docs.lock
	touch $@

# dist/: the wheel and sdist of the last commit, tried in a clean environment. It sets no tag.
.PHONY: release
release: .venv/installed
	scripts/release.sh

clean-lab: .venv/installed
	$(SUDO) $(VLAUNCH) lab down
