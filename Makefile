# Every task of the project; `make` alone lists them. `make setup` runs first wherever it is needed.

VENV   := .venv
BIN    := $(VENV)/bin
PYTHON ?= python3
STAMP  := $(VENV)/.installed
SPARK_STAMP := $(VENV)/.installed-spark
CLASSES := $(VENV)/spark-classes.jsa
PEERS  := $(VENV)/peers
EXAMPLES := $(VENV)/examples
CONTAINERS := $(VENV)/containers
SPHINX := $(VENV)/sphinx
AXE_VERSION := 4.10.3
AXE    := $(VENV)/axe-core-$(AXE_VERSION).tgz
AXE_SHA512 := 5e6edba515e70d25f6604d9815f064d859c5d1ea7ab661bbc4f87c88779ef0c21cae0abbeb636471ef39e9d62d2582e4b88a1866f19f4ecfcf6d986275e4dc12
RESOLVE = uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
	--no-annotate --no-emit-package postroom

# The tests start thousands of programs, and without this each would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup lock wheels release demo test test-setup test-fast check format docs site bench soak faults faults-soak test-browser test-monitoring test-systemd test-containers test-bare clean

help: ## list the tasks
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## the virtual environment and everything in it; quick when nothing changed

$(STAMP): dev.lock pyproject.toml sdk/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Postroom needs Python 3.11 or newer"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r dev.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e sdk -e .
	@touch $@

# Spark is large, and only the pipelines and their tests need it: the demo does without.
# It is built from source, in more space than a /tmp in memory may have.
$(SPARK_STAMP): $(STAMP) spark.lock
	@mkdir -p $(VENV)/tmp
	TMPDIR="$(CURDIR)/$(VENV)/tmp" $(BIN)/pip install --quiet --disable-pip-version-check --require-hashes --no-build-isolation -r spark.lock
	@rm -rf $(VENV)/tmp
	@touch $@

# The tests start Spark some twenty times: what its Java then reads is read once.
$(CLASSES): $(SPARK_STAMP) tests/support/class_data.py
	PYTHONPATH=tests $(BIN)/python -m support.class_data $@

# What the benchmarks compare with has a directory of its own: only the benchmarks see it.
$(PEERS): $(STAMP) bench.lock
	@rm -rf $@
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes --target $@ -r bench.lock

# What the examples are written with: only their tests see it.
$(EXAMPLES): $(STAMP) examples.lock
	@rm -rf $@
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes --target $@ -r examples.lock

# What builds the site has one too: its versions are nobody else's affair.
$(SPHINX): $(STAMP) site.lock
	@rm -rf $@
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes --target $@ -r site.lock

lock: ## resolve the seven lock files again (needs uv)
	$(RESOLVE) --group dev --extra embedded --extra nkeys --extra otel -o dev.lock pyproject.toml sdk/pyproject.toml
	$(RESOLVE) -c dev.lock -o requirements.lock pyproject.toml sdk/pyproject.toml
	$(RESOLVE) --extra pipeline -c dev.lock -o spark.lock pyproject.toml
	$(RESOLVE) --group bench -c dev.lock -o bench.lock
	$(RESOLVE) --group examples -c dev.lock -o examples.lock
	$(RESOLVE) --group containers -o containers.lock
	$(RESOLVE) --group site -o site.lock

# Every time in what is built is that of the commit, so that two builds of one commit are the same bytes.
wheels release: export SOURCE_DATE_EPOCH = $(shell git log -1 --format=%ct)
wheels: setup ## both distributions as wheels and sources, in dist/
	@rm -rf dist
	cd sdk && ../$(BIN)/hatchling build -d ../dist
	$(BIN)/hatchling build -d dist

release: wheels ## the same with Debian packages and SHA256SUMS (apt: dpkg)
	@command -v dpkg-deb > /dev/null || { echo "this needs dpkg-deb: apt-get install dpkg"; exit 1; }
	$(BIN)/python release/debian.py dist
	cd dist && sha256sum * > SHA256SUMS

demo: setup ## the whole main job on embedded servers, with visible results
	$(BIN)/postroom demo

test-setup: $(CLASSES) $(EXAMPLES) ## what `make test` installs; .ci/run makes it beside the checks

# A test that outlasts its time-out takes its worker with it. The run ends then: with a new worker in its place
# pytest-xdist 3.8 would wait for ever. Where a recipe needs a shell, `exec` puts the tests in its place: a SIGTERM that
# make passes on would end the shell alone.
test: test-setup ## every test but the slow suites
	exec $(BIN)/pytest -n 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 -m "not (soak or systemd or browser or monitoring or containers)"

test-fast: $(SPARK_STAMP) ## the tests that start no server, for the loop of daily work: under 90 s
	$(BIN)/pytest -n 2 -q tests/unit

check: $(SPARK_STAMP) ## ruff, mypy strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## let ruff put the code in shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup ## write the pages that follow from the code, and what follows from the pages
	$(BIN)/python docs/generate.py
	$(BIN)/python monitoring/generate.py

site: $(SPHINX) ## the docs as a site with search, in build/site; a link that leads nowhere ends it
	@rm -rf build/site
	PYTHONPATH=$(SPHINX) $(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --nitpicky \
		--conf-dir docs/site --doctree-dir build/doctrees . build/site
	@echo "open build/site/index.html"

bench: $(SPARK_STAMP) $(PEERS) ## the benchmarks, each beside its baseline or peers, into docs/performance.md; BENCH="full lone" for some
	$(BIN)/python -m bench --write $(BENCH)

soak: export TMPDIR := $(or $(TMPDIR),/tmp)
soak: $(SPARK_STAMP) ## the crash tests, for longer, with their files on the disk
	$(BIN)/pytest -m soak

faults: $(SPARK_STAMP) ## the fault campaign: three quarters of an hour; GOALS="F1 F4" for some
	PYTHONPATH=tests exec $(BIN)/python -m faults $(GOALS)

faults-soak: $(SPARK_STAMP) ## the same, for hours
	PYTHONPATH=tests exec $(BIN)/python -m faults --soak $(GOALS)

# What keeps people out of a page is for axe-core to find. It comes from npm, one version with its checksum.
$(AXE): $(STAMP)
	@command -v npm chromium chromedriver > /dev/null || { echo "this needs npm and a Chromium: apt-get install npm chromium chromium-driver"; exit 1; }
	cd $(VENV) && npm pack --silent axe-core@$(AXE_VERSION)
	@echo "$(AXE_SHA512)  $@" | sha512sum --check --quiet || { rm $@; exit 1; }

test-browser: $(AXE) ## the console in a real Chromium, every page and every repair (apt: npm, chromium, chromium-driver)
	AXE="$(CURDIR)/$(AXE)" exec $(BIN)/pytest -m browser tests/browser

test-monitoring: setup ## each alert provoked under a real Prometheus (apt: prometheus; ten minutes)
	@command -v promtool > /dev/null || { echo "this needs Prometheus: apt-get install prometheus"; exit 1; }
	$(BIN)/pytest -m monitoring tests/monitoring

# Its first run makes a Debian.
test-systemd: setup ## boots a real systemd in a container (root, debootstrap, systemd-container, lintian)
	$(BIN)/pytest -m systemd

$(CONTAINERS): $(STAMP) containers.lock
	@rm -rf $@
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes --target $@ -r containers.lock

test-containers: wheels $(CONTAINERS) ## the image, compose.yaml, the manifests (root, debootstrap, docker.io, docker-compose, podman, runc, kubernetes-client)
	$(BIN)/pytest -m containers tests/containers

test-bare: wheels ## a fresh clone and the wheels alone on a bare Debian (root, debootstrap, systemd-container)
	$(BIN)/python tests/bare_machine/run --wheels --suite bookworm trixie forky
	$(BIN)/python tests/bare_machine/run

clean: ## remove the virtual environment and every cache
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
