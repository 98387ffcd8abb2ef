# `make demo` shows the main job on two lab hosts on this machine; `make test` runs all checks.
# Both install their dependencies into .venv, with pinned versions and hashes (requirements.lock).

PYTHON ?= python3
BIN := .venv/bin
LAB := /var/lib/vlaunch-lab
DEBIAN13 := /var/cache/vlaunch-lab/debian13
HAPROXY := /var/cache/vlaunch-lab/haproxy
# Only the lab hosts need root (network namespaces, dockerd).
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)
VLAUNCH := $(BIN)/vlaunch
LAB_TESTS := $(sort $(shell grep -rlw --include='*.py' 'mark\.lab' tests))
PAIR := $(wildcard tests/integration/test_[1389]_*.py) $(filter-out tests/integration/%,$(LAB_TESTS))

.PHONY: demo test machine machine-exports lint unit processes lab-tests lab-tests-pair lab-tests-others long-tests faults mutants figures layout contract plans exports exports-run recipes lock docs reference recording clean-lab

demo: .venv/installed
	$(SUDO) $(VLAUNCH) lab up --install-missing
	$(VLAUNCH) check -i $(LAB)/inventory.yaml
	$(VLAUNCH) up $(LAB)/inventory.yaml
	$(VLAUNCH) exec --head -- ray status
	$(VLAUNCH) check-nccl
	$(VLAUNCH) serve
	$(VLAUNCH) exec --head -- ray status
	$(VLAUNCH) chat --max-tokens 24 "What is a pipeline stage?"
	$(VLAUNCH) status
	mkdir -p out && $(VLAUNCH) front certificate >out/front.pem
	export OPENAI_API_KEY=$$($(VLAUNCH) front keys add "demo-$$(date +%s)") && \
		OPENAI_BASE_URL=https://10.77.0.11:8443/v1 SSL_CERT_FILE=out/front.pem \
		$(BIN)/python examples/openai_client.py "What is a tensor?"
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

# sshd for tests of the transport, Docker and other packages for lab hosts, Chromium for the network report, nft for the firewall
# rules, HAProxy for the front; Debian's package starts it. Prometheus is only unpacked, for the same reason, and so is a newer
# HAProxy, with its libraries: the default image of the front is newer than Debian's. A mirror may be older than its lists allow.
machine: .venv/installed .venv/prometheus/usr/bin/promtool
	$(SUDO) $(VLAUNCH) lab install
	command -v nft >/dev/null || { $(SUDO) apt-get update --quiet && $(SUDO) env DEBIAN_FRONTEND=noninteractive \
		apt-get install --yes --quiet --no-install-recommends nftables; }
	command -v chromium >/dev/null || { $(SUDO) apt-get update --quiet && $(SUDO) env DEBIAN_FRONTEND=noninteractive \
		apt-get install --yes --quiet --no-install-recommends chromium fonts-dejavu-core; }
	command -v haproxy >/dev/null || { $(SUDO) apt-get update --quiet && $(SUDO) env DEBIAN_FRONTEND=noninteractive \
		apt-get install --yes --quiet --no-install-recommends haproxy && \
		{ $(SUDO) systemctl disable --now --quiet haproxy || $(SUDO) service haproxy stop || :; }; }
	test -d $(HAPROXY) || { $(SUDO) rm -rf $(HAPROXY).new && $(SUDO) mkdir -p $(dir $(HAPROXY)) && \
		$(SUDO) mmdebstrap --quiet --variant=extract --aptopt='Acquire::Check-Valid-Until "false"' \
		--include=haproxy forky $(HAPROXY).new && $(SUDO) mv $(HAPROXY).new $(HAPROXY); }

.venv/prometheus/usr/bin/promtool: | .venv/installed
	rm -rf .venv/prometheus && mkdir .venv/prometheus && cd .venv/prometheus && \
		{ apt-get download --quiet prometheus || { $(SUDO) apt-get update --quiet && apt-get download --quiet prometheus; }; } && \
		dpkg-deb --extract prometheus_*.deb . && rm prometheus_*.deb

# podman for tests that run exported pods. `podman kube play` needs Debian 13: a small root file system of it is created; the tests
# are skipped if that fails.
machine-exports: machine
	test -d $(DEBIAN13) || { $(SUDO) rm -rf $(DEBIAN13).new && $(SUDO) mkdir -p $(dir $(DEBIAN13)) && \
		$(SUDO) mmdebstrap --quiet --variant=minbase \
		--include=podman,runc,catatonit trixie $(DEBIAN13).new && \
		$(SUDO) mv $(DEBIAN13).new $(DEBIAN13); } || echo "could not create a Debian 13 root: tests of exported pods will be skipped"

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m benchmarks.figures --budgets
	$(BIN)/shellcheck --external-sources --source-path=SCRIPTDIR scripts/*.sh launcher/*/*.sh launcher/*/*/*.sh benchmarks/*/*.sh tests/*/*.sh

# Test files are stored in memory if /dev/shm has room and allows programs: on a disk, replacing a file waits for a sync.
MEMORY := $(shell grep -q ' /dev/shm .*noexec' /proc/mounts 2>/dev/null || \
	df --output=avail /dev/shm 2>/dev/null | awk 'NR == 2 && $$1 > 1000000 { print "TMPDIR=/dev/shm" }')

# Keep byte code regardless of the environment: compiling all tests again in every process takes seconds.
unit: .venv/installed
	$(MEMORY) PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -q -m "not lab and not processes" -n auto --dist worksteal

# Custom resource definitions and a validator for tests of exports, which are skipped without them.
export VLAUNCH_CRDS ?= $(abspath $(wildcard ../shared/fixtures/kubernetes))

# Tests that start agents, sshd, pip and scripts as processes, and wait for them and for deadlines.
processes: .venv/installed
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -q -m "processes and not lab" -n auto --dist worksteal

# Two rows in parallel, because they mostly wait: most tests of the two-node cluster and those without a cluster, and all others. The
# others have a three-node cluster, and use two of its nodes for tests of two nodes. Both rows take about the same time.
lab-tests: .venv/installed
	$(MAKE) --no-print-directory --jobs 2 lab-tests-pair lab-tests-others

lab-tests-pair: .venv/installed
	$(SUDO) $(BIN)/pytest -q -m "lab and not long" --durations=15 $(PAIR)

lab-tests-others: .venv/installed
	$(SUDO) env VLAUNCH_PAIR_OF_TRIO=1 $(BIN)/pytest -q -m "lab and not long" --durations=15 $(filter-out $(PAIR),$(LAB_TESTS))

# Servers and batch jobs under all faults, several servers, a flood of requests, and an unprivileged SSH user: more than an hour, too
# long for `make test`. The compiler is for kernels that engines compile.
long-tests: machine-exports
	command -v g++ >/dev/null && test -e /usr/include/python3.11/Python.h || { $(SUDO) apt-get update --quiet && \
		$(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --no-install-recommends g++ python3-dev; }
	$(SUDO) $(BIN)/pytest -q -m long --durations=30

# The fault campaign: hours. FAULTS="--verb up --seeds 1" narrows it; it resumes after the last recorded result.
faults: .venv/installed
	code=0; $(SUDO) $(BIN)/python -m benchmarks.faults $(FAULTS) || code=$$?; $(BIN)/python -m benchmarks.faults --report && exit $$code

# The share of a seeded sample of mutants that unit tests kill: an hour on two cores. MUTANTS="--count 20 --seed 7" takes another
# sample, MUTANTS=--retry tests the survivors of the last one. cosmic-ray has its own .venv because nothing else uses it.
mutants: .venv/installed .venv/cosmic-ray/installed
	.venv/cosmic-ray/bin/python benchmarks/mutants.py $(MUTANTS)

.venv/cosmic-ray/installed: | .venv/installed
	$(PYTHON) -m venv .venv/cosmic-ray
	.venv/cosmic-ray/bin/pip install --quiet --disable-pip-version-check cosmic-ray==8.7.0
	touch $@

# Figures of readability: lines per file, complexity, names.
figures: .venv/installed
	$(BIN)/python -m benchmarks.figures
	$(BIN)/python -m benchmarks.figures --budgets

# The bands of the import contract, drawn in docs/explanation/architecture.md.
layout: .venv/installed
	$(BIN)/python -m benchmarks.layout

# Compare launcher/upstream with the source of the newest vLLM, Ray and NCCL: downloads 600 MB once, and takes minutes.
# CONTRACT=--offline uses earlier downloads, CONTRACT=--brief leaves out entries that all versions have; more: CONTRACT=--help.
contract: .venv/installed
	$(BIN)/python -m scripts.contract $(CONTRACT)

# All exports of the example inventories, and a broken copy of each, through all installed validators.
exports: .venv/installed
	$(BIN)/python -m benchmarks.exports

# Exported pods (by podman) and Prometheus on lab hosts: an hour.
exports-run: machine-exports
	$(SUDO) $(BIN)/pytest -q -m long -rs --durations=20 $(wildcard tests/integration/test_m_export_*.py) tests/integration/test_l_metrics.py

# The layouts (DP × TP × PP) that `vlaunch plan` chooses for its test models on twenty clusters.
plans: .venv/installed
	$(BIN)/python -m benchmarks.plan --table

.venv/installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

# The packaged recipes, from vLLM's source distribution, with the hardware profiles of a checkout of
# github.com/vllm-project/recipes: make recipes FROM=vllm-0.33.0.tar.gz PROFILES=../recipes
recipes: .venv/installed
	$(BIN)/python -m benchmarks.package_recipes $(FROM) $(PROFILES)

# Pin the newest versions that fit pyproject.toml, with hashes; review the difference. requirements-runtime.lock is for users.
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
