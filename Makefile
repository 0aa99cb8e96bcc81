# `make demo` and `make test` do all their own set-up, in .venv; nothing global is touched.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin

.PHONY: demo serve-demo test ray-test docs grid kill failures lint clean
.DEFAULT_GOAL := demo

demo: RUN := runs/demo-$(shell date +%Y%m%d-%H%M%S)
demo: .venv/ready
	$(BIN)/nestpipe train examples/demo.toml --workers 2 --trace --out $(RUN)
	@$(BIN)/nestpipe report $(RUN)

# From training to a service under load, and its page: about two minutes.
serve-demo: RUN := runs/serve-demo-$(shell date +%Y%m%d-%H%M%S)
serve-demo: .venv/ready
	$(BIN)/nestpipe train examples/hstu_ranker.toml --workers 2 --set train.steps=100 --out $(RUN)
	$(BIN)/nestpipe export $(RUN) $(RUN)/bundle
	$(BIN)/nestpipe load $(RUN)/bundle --instances 2 --rate 40 --seconds 20 --json $(RUN)/load.json
	@$(BIN)/nestpipe report $(RUN)/load.json

# Four processes, also on two cores: tests mostly wait. CI=1: hypothesis tries the same examples every time; without it (pytest by
# hand) it looks for new ones.
test: .venv/ready lint
	CI=1 $(BIN)/python -m pytest --numprocesses 4 --dist worksteal

# Replicas of Ray Serve on this machine, one of them killed under load: about a minute, and Ray (80 MB) in .venv. Where Ray is not
# installed, `make test` skips them.
ray-test: .venv/ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,ray]"
	$(BIN)/python -m pytest tests/serve/test_ray.py

# The pages of docs/ and the API from the docstrings, in site/index.html.
docs: .venv/ready
	$(BIN)/python -m mkdocs build --strict --quiet

# Every schedule against the serial one over the whole grid of settings; `make test` does a part of it.
grid: .venv/ready
	$(BIN)/python -m tests.behaviour.grid

# Fifty runs that lose a worker at a random moment; half an hour.
kill: .venv/ready
	$(BIN)/python -m tests.behaviour.kill

# An exception before and after every operation of a step, in every schedule; about half an hour.
failures: .venv/ready
	$(BIN)/python -m tests.behaviour.failures

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The stamp is written last, so that an interrupted set-up is done again.
.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "nestpipe needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,docs]"
	@touch $@

clean:
	rm -rf .venv build site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
