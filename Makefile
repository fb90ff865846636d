# Training, tests and checks; each sets itself up. The first call makes .venv from requirements.lock, with uv where it is
# installed and with venv and pip where it is not; a later one makes it anew when the lock has changed.
#
#   make train                                      train the digits that come with the project
#   make train ARGS="configs/mnist.yaml epochs=1"   what `accelerate launch train/main.py` takes
#   make test                                       the default suite; ARGS=--slow for all of it
#   make check                                      style, types, and the files of container, shell and workflows
#   make lock                                       pin what pyproject.toml asks for; ARGS=--upgrade for the newest (needs uv)
#   PYTHON=/path/to/python3.12                      the Python to make .venv with: 3.11 or 3.12

SHELL := /bin/sh
READY := .venv/.made-from-lock
BASE := import sys; assert (3, 11) <= sys.version_info[:2] <= (3, 12); print(sys._base_executable)

.PHONY: train test check lock

train: $(READY)
	.venv/bin/accelerate launch -q train/main.py $(ARGS)

test: $(READY)
	.venv/bin/python -m pytest -n 2 --dist worksteal $(ARGS)

check: $(READY)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/hadolint Dockerfile
	.venv/bin/shellcheck .ci/engine .ci/run deploy/container/run deploy/container/train deploy/slurm.sbatch
	.venv/bin/zizmor --offline --quiet .github

lock:
	uv pip compile pyproject.toml --all-extras --group dev --universal --generate-hashes --no-header --no-annotate \
	  --quiet --output-file requirements.lock $(ARGS)

$(READY): requirements.lock
	@for candidate in $(if $(PYTHON),"$(PYTHON)",python3 python3.12 python3.11); do \
	  python=$$("$$candidate" -c '$(BASE)' 2>/dev/null) && break; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "Lockstep needs Python 3.11 or 3.12; $(or $(PYTHON),python3) is neither or is missing." \
	    "Install one, or say where one is: make PYTHON=/path/to/python3.12 ..." >&2; \
	  exit 1; \
	fi; \
	set -ex; \
	rm -rf .venv; \
	if uv --version >/dev/null 2>&1; then \
	  uv venv --quiet --python "$$python" .venv; \
	  uv pip sync --quiet --compile-bytecode --python .venv/bin/python --require-hashes requirements.lock; \
	else \
	  "$$python" -m venv .venv; \
	  .venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements.lock; \
	fi; \
	touch $@
