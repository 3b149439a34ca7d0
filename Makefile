# Every target makes its own virtual environment in .venv when it is missing or out of date.
PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin
READY := .venv/ready

.PHONY: demo test acceptance check lint types contracts docs format gpu pictures clean

demo: $(READY) ## train the two-tower example as a pipeline of 4 processes
	$(BIN)/gpp-train experiment=two_tower

test: $(READY) ## all tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

acceptance: $(READY) ## the long sweeps of which `make test` runs a sample
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m acceptance --timeout 1800

check: lint types contracts docs test ## what continuous integration runs

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

contracts: $(READY)
	$(BIN)/lint-imports

docs: $(READY) ## the documentation site in build/docs; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

gpu: $(READY) ## check and measure on the GPUs of this machine, and write benchmarks/results/gpu.md
	$(BIN)/python -m benchmarks.gpu --output benchmarks/results/gpu.md
	$(BIN)/python -m benchmarks.gpu.models | tee benchmarks/results/gpu_models.md

pictures: $(READY) ## write docs/pictures anew
	$(BIN)/python -m benchmarks.pictures

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,docs,hf,examples,slurm,cli]"
	touch $(READY)

clean: ## remove the environment and everything that was built; run folders stay
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
