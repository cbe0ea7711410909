# `make demo` and `make test` do all set-up themselves: they find a Python, make .venv and install what they need.

JAX := 0.11.2
ARGS :=

# A name on PATH that answers with 3.12 or newer, else one of pyenv's own (its shims refuse versions that are not selected).
pyenv_root := $(or $(shell pyenv root 2>/dev/null),$(HOME)/.pyenv)
candidates := $(or $(PYTHON),python3.12 python3.13 python3.14 python3 $(wildcard $(pyenv_root)/versions/3.1[2-9]*/bin/python3))
usable := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))
python = $(shell for python in $(candidates); do "$$python" -c '$(usable)' 2>/dev/null && echo "$$python" && break; done)
define no_python
No Python >= 3.12 with venv found (looked for: $(candidates)).
Get one with `pyenv install 3.12`, `apt install python3.12-venv`, `brew install python@3.12` or `uv python install 3.12`,
then run this again, or name it: `make $(MAKECMDGOALS) PYTHON=/path/to/python3.12`
endef

# CUDA 13 needs driver 580. Without a card jax must not look for one: the plugin below is there only to compile.
driver := $(shell nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | grep -m 1 -oE '^[0-9]+')
cuda := $(if $(driver),$(shell test $(driver) -ge 580 && echo cuda13 || echo cuda12))
ifeq ($(cuda),)
JAX_PLATFORMS ?= cpu
export JAX_PLATFORMS
endif

pip_install = bin/python -m pip install --quiet --disable-pip-version-check

pytest = bin/python -m pytest -n auto --dist worksteal

# What `make test` runs on the second jax; the first runs all but the small form, which its full form holds.
on_second_jax := not full and not interpreter and not host

define ruff
.venv/bin/ruff check
.venv/bin/ruff format --check
endef

.PHONY: help demo test quick lint format environments clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' Makefile | expand -t 22

demo: .venv/.demo  ## one serving step with a paged cache, checked against the oracle; options in ARGS="..."
	.venv/bin/python -m inkling_pallas demo $(ARGS)

ifeq ($(strip $(ARGS)),)
test: .venv/.test .venv-jax012/.test  ## lint, every test, first the small form on jax 0.12: budget 12 minutes on 2 calm cores
	@echo "make test has a budget of 12 minutes on 2 calm cores; make quick, without kernels and long cases, of 3"
	$(ruff)
	@echo "jax 0.12, the small form; pyright beside it, its output is below"
	@.venv/bin/pyright > .venv/pyright.txt 2>&1 & types=$$!; failed=; \
	JAX_PLATFORMS=cpu .venv-jax012/$(pytest) -m "$(on_second_jax)" || failed="$$failed tests"; \
	wait $$types || failed="$$failed pyright"; \
	cat .venv/pyright.txt; \
	if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi
	@echo "jax $(JAX), the whole suite"
	@.venv/$(pytest) -m "not small" --durations 10
else
test: .venv/.test  ## with ARGS="-k decode" or other options of pytest: only that, on one jax
	.venv/$(pytest) $(ARGS)
endif

quick: .venv/.test  ## one jax, no kernels and no long cases: budget 3 minutes on 2 calm cores
	@echo "make quick has a budget of 3 minutes on 2 calm cores"
	@.venv/$(pytest) -m "not full and not interpreter and not lowering and not slow" $(ARGS)

lint: .venv/.test  ## ruff, the format check and pyright: about 1 minute
	$(ruff)
	.venv/bin/pyright

format: .venv/.test  ## format, and fix what ruff can
	.venv/bin/ruff format
	.venv/bin/ruff check --fix

environments: .venv/.test .venv-jax012/.test  ## install what `make test` needs

clean:  ## remove the environments and every cache
	rm -rf .venv .venv-jax012 .hypothesis .pytest_cache .ruff_cache build dist
	find inkling_pallas tests -name __pycache__ -exec rm -rf {} +

.venv/bin/python .venv-jax012/bin/python:
	$(or $(python),$(error $(no_python))) -m venv --clear $(@:/bin/python=)

.venv/.demo: pyproject.toml | .venv/bin/python
	.venv/$(pip_install) --editable '.[demo$(cuda:%=,%)]' jax==$(JAX)
	touch $@

.venv/.test: pyproject.toml | .venv/bin/python
	.venv/$(pip_install) --editable '.[test$(cuda:%=,%)]' jax==$(JAX)
ifeq ($(shell uname -sm)$(cuda),Linux x86_64)
	.venv/$(pip_install) --no-deps jax-cuda13-plugin==$(JAX) jax-cuda13-pjrt==$(JAX)
endif
	touch .venv/.demo $@

.venv-jax012/.test: pyproject.toml | .venv-jax012/bin/python
	.venv-jax012/$(pip_install) --upgrade --editable '.[test]' 'jax>=0.12,<0.13'
	touch $@
