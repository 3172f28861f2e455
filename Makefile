# Every target works on a fresh clone with python3 and a C compiler; `make help` lists them.
.DEFAULT_GOAL := help
.PHONY: help install chromium demo test test-slow test-all test-gpu lint format docs check bench \
	bench-quick clean

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# The slowest tests are listed, because the gate has to stay short.
PYTEST := $(BIN)/python -m pytest --durations=25 --durations-min=5
# Files beside each other, but the tests of a file in one process: they share what they build.
BESIDE := -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder
BENCHMARKS := $(sort $(wildcard benchmarks/*/main.py))

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## make .venv with bayplan and its tools, once

# torch comes first and alone, by its exact pin: only that spelling may choose its build.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,check,docs]'
	touch $@

# Reports are tested in it. Without it those tests are skipped, and say so.
chromium: ## install Debian's Chromium where this may be done, for tests of reports
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
	&& apt-get -qq update && apt-get -qq install -y chromium >/dev/null; } \
	|| echo "no Chromium here and none can be installed: tests of reports in a browser are skipped"

demo: install ## plan a model that does not fit, run it, leave report.html
	$(BIN)/python examples/demo.py

test: install ## tests, doctests of src, blocks of README and docs: 10 minutes on two cores
	$(PYTEST) $(BESIDE) -m 'not slow and not alone' --doctest-modules src tests
	$(PYTEST) -m 'alone and not slow' tests

test-slow: install ## only the broad and slow tests, which `make test` leaves out
	$(PYTEST) $(BESIDE) -m 'slow and not alone' tests
	$(PYTEST) -m 'slow and alone' tests

test-all: test test-slow ## every test, each once

test-gpu: install ## what can run on this machine's GPU; writes gpu-report.json and .txt to send back
	$(PYTEST) -m gpu --on-accelerator --device-report . tests/accelerator

lint: install ## format, lint, types and import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

format: install ## rewrite the code as `make lint` wants it
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: install ## the site, into site/; fails where a link leads nowhere
	$(BIN)/python docs/file_fields.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

check: lint test ## everything that must be green before a change is merged

bench: install ## every benchmark in full; writes the results the tables are made of
	@set -e; for main in $(BENCHMARKS); do echo "== $$main"; $(BIN)/python $$main; done

bench-quick: install ## every benchmark in a tiny setting, to see that none is broken
	@set -e; for main in $(BENCHMARKS); do echo "== $$main --quick"; $(BIN)/python $$main --quick; done

clean: ## remove .venv and caches
	rm -rf .venv .hypothesis .pytest_cache .ruff_cache .import_linter_cache build dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
