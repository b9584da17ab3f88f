# Everything a developer runs. Each command sets up what it needs first.
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: setup demo test test-slow test-deep test-machines test-trainers test-kernels test-engines test-gpu check docs docs-links test-oldest test-python mutants bench studies clean

setup: $(VENV)/installed

# What the library itself needs is all that the demo waits for. Python compiles what is imported; pip would compile all.
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
unexport PYTHONDONTWRITEBYTECODE

# An environment that has the packages of the first one, and room for more: $(call over_the_first,FOLDER).
SITE_PACKAGES := -c "import sysconfig; print(sysconfig.get_path('purelib'))"
define over_the_first
	python3 -m venv $(1)
	echo "import site; site.addsitedir('$$($(BIN)/python $(SITE_PACKAGES))')" > "$$($(1)/bin/python $(SITE_PACKAGES))/over_the_first.pth"
endef

$(VENV)/library: pyproject.toml constraints.txt
	@echo "Installing hf_calib and what it needs into $(VENV): about a minute."
	python3 -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) --editable .
	touch $@

# A new environment whenever the requirements have changed.
$(VENV)/installed: $(VENV)/library
	@echo "Installing what tests, checks and the site need into $(VENV): about a minute."
	$(BIN)/python $(PIP_INSTALL) --editable ".[dev]"
	touch $@

demo: $(VENV)/library
	$(BIN)/hf-calib demo

test: setup
	$(BIN)/python -m pytest

# What `make test` leaves out.
test-slow: setup
	$(BIN)/python -m pytest -m "slow and not deep"

# Simulations and studies at full size, once a week: CI does not run them.
test-deep: setup
	$(BIN)/python -m pytest -m deep

# What computes, under the settings of other machines: tests/machines.sh.
MACHINES ?= plain avx2
ROOMS ?= losses metrics scaling
test-machines: setup
	bash tests/machines.sh $(BIN)/python "$(MACHINES)" "$(ROOMS)"

# With TRL, SetFit and Lightning, away from what the other tests run in.
test-trainers: .venv-trainers/installed
	.venv-trainers/bin/python -m pytest tests/trl tests/test_private_names.py

.venv-trainers/installed: $(VENV)/installed
	$(call over_the_first,.venv-trainers)
	.venv-trainers/bin/python $(PIP_INSTALL) --editable ".[trl,trainers]"
	touch $@

check: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# The site, in docs/_build/html: warnings are errors, links between its pages are checked, nothing is fetched. In one
# process: a fork of one in which torch has run hangs.
docs: setup
	$(BIN)/python -m sphinx --fresh-env --fail-on-warning --keep-going --quiet docs docs/_build/html
	@echo "docs/_build/html/index.html"

# The addresses elsewhere that the site names; they are not fetched.
docs-links: docs
	@grep --recursive --no-filename --only-matching --extended-regexp 'href="https?://[^"]+' docs/_build/html --include='*.html' \
	    | cut --characters 7- | sort --unique

# The Triton kernels without a GPU: interpreted, and compiled for one.
KERNEL_TESTS := tests/kernels tests/losses/test_golden.py tests/losses/test_gradients.py tests/losses/test_precision.py \
    tests/losses/test_special_cases.py
test-kernels: .venv-kernels/installed
	TRITON_INTERPRET=1 .venv-kernels/bin/python -m pytest --override-ini addopts= -n 2 --dist load -q $(KERNEL_TESTS)

# The recipes for engines, on two local workers each; Spark needs Java.
test-engines: .venv-engines/installed
	.venv-engines/bin/python -m pytest --override-ini addopts= --override-ini filterwarnings=default -q -rs tests/engines

# Of hf_calib they need neither torch nor transformers.
.venv-engines/installed: pyproject.toml constraints.txt
	python3 -m venv .venv-engines
	.venv-engines/bin/python $(PIP_INSTALL) \
	    dask distributed duckdb "moto[server]" numpy polars pyarrow pyspark pytest "ray[data]" s3fs safetensors \
	    scikit-learn scipy
	.venv-engines/bin/python $(PIP_INSTALL) --no-deps --editable .
	touch $@

# The same on a GPU, in an environment whose PyTorch has CUDA.
test-gpu:
	HF_CALIB_TESTS_ON=cuda python -m pytest --override-ini addopts= -q $(KERNEL_TESTS)

.venv-kernels/installed: $(VENV)/installed
	$(call over_the_first,.venv-kernels)
	.venv-kernels/bin/python $(PIP_INSTALL) triton
	touch $@

# The oldest `datasets` leaves csv files open.
test-oldest: .venv-oldest/installed
	.venv-oldest/bin/python -m pytest tests -W "ignore:unclosed file:ResourceWarning" \
	    -W ignore::pytest.PytestUnraisableExceptionWarning

.venv-oldest/installed: pyproject.toml constraints-oldest.txt
	python3 -m venv .venv-oldest
	.venv-oldest/bin/python $(PIP_INSTALL:constraints.txt=constraints-oldest.txt) --editable ".[dev]"
	touch $@

# The quick tests on another Python, with the newest packages that there are for it: `make test-python PYTHON=python3.13`.
PYTHON ?= python3
OTHER := .venv-$(notdir $(PYTHON))
test-python: $(OTHER)/installed
	$(OTHER)/bin/python -m pytest tests hf_calib

$(OTHER)/installed: pyproject.toml
	$(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/python $(filter-out --constraint constraints.txt,$(PIP_INSTALL)) --editable ".[dev]"
	touch $@

# Wrong lines in MODULE (files or folders), SAMPLE of them: which does no test notice?
SAMPLE ?= 100
mutants: setup
	$(BIN)/python tests/mutants.py $(MODULE) --sample $(SAMPLE)

bench: .venv-bench/installed
	.venv-bench/bin/python benchmarks/losses.py
	OMP_NUM_THREADS=1 .venv-bench/bin/python benchmarks/metrics.py
	OMP_NUM_THREADS=1 .venv-bench/bin/python benchmarks/scaling.py

# The packages that the metrics are compared with, away from what the tests run in.
.venv-bench/installed: pyproject.toml constraints.txt
	python3 -m venv .venv-bench
	.venv-bench/bin/python $(PIP_INSTALL) --editable ".[bench]"
	touch $@

# The papers' studies in turn, with the time of each: `make studies NEWSGROUPS=folder MNIST=folder CIFAR10=folder`; what is
# not named comes from the Hub. Another STUDIES leaves the results that are here as they are.
STUDIES ?= recipes/results/studies
WITHOUT_DATA := proofs gradient_factors five_gaussians decision_boundary
ON_NEWSGROUPS := smooth_calibration last_layer_gradients post_processing_gap \
    validation_and_training gamma_dynamics confidence_dynamics overhead small_claims

define study
@began=$$(date +%s) && $(BIN)/python recipes/studies/$(1).py --output "$(STUDIES)" $(2) \
    && echo "$(1): $$(($$(date +%s) - began)) s"

endef

studies: setup
	$(foreach name,$(WITHOUT_DATA),$(call study,$(name)))
	$(call study,norms_and_entropies,$(if $(MNIST),--data "$(MNIST)"))
	$(foreach name,$(ON_NEWSGROUPS),$(call study,$(name),$(if $(NEWSGROUPS),--data "$(NEWSGROUPS)")))
	@began=$$(date +%s) && PATH="$(BIN):$$PATH" bash recipes/studies/traced_resnet.sh "$(STUDIES)" \
	    $(if $(CIFAR10),--dataset "$(CIFAR10)" --image_column image) && echo "traced_resnet: $$(($$(date +%s) - began)) s"

clean:
	rm -rf $(VENV) .venv-oldest .venv-python* .venv-bench .venv-trainers .venv-kernels .venv-engines demo_output outputs build docs/_build docs/auto_gallery *.egg-info .pytest_cache .mypy_cache .ruff_cache
