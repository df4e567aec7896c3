# The front door. `make` lists what it does; cargo does the work, and CARGO_TARGET_DIR is honoured.

.DEFAULT_GOAL := help
.PHONY: help run cli test soak chaos simulate exhaust model check test-servers prometheus interop languages memcheck fuzz \
	faults mutants simulate-faults bench plots instructions dist dist-check dist-arm64 dist-debian release-check \
	install clean

# Tests run in their crate's folder, so a relative path to a server is made absolute here.
ifneq (,$(findstring /,$(RLOCK_SERVER)))
override export RLOCK_SERVER := $(abspath $(RLOCK_SERVER))
endif

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: ## Build the module and start a server with it on 127.0.0.1:6379, or PORT=
	@scripts/run

cli: install ## Build the program `rlock`: target/release/rlock
	cargo build --release -p rlock-cli

# Most tests wait most of the time, for servers and for leases to end.
test: install ## Run every test; RLOCK_SERVER= names another server
	RUST_TEST_THREADS=$${RUST_TEST_THREADS:-$$(($$(nproc) * 4))} cargo test --no-fail-fast

soak: install ## The heavy tests, with the figures they print
	RLOCK_DROPS=100000 cargo test --release -p rlock-tests --test it -- \
		bind client_session client_faults client_rw client_multi client_threads --include-ignored --nocapture --test-threads 1

chaos: install ## A storm over real servers and its checkers; CHAOS_SECONDS=, CHAOS_SEED=, CHAOS_MENU=
	CHAOS_SECONDS=$(or $(CHAOS_SECONDS),1800) CHAOS_SEED=$(CHAOS_SEED) CHAOS_ROUND=$(CHAOS_ROUND) \
		CHAOS_MENU="$(CHAOS_MENU)" \
		cargo test --test chaos -- --ignored --exact storm --nocapture

simulate: install ## Simulate clients, links and servers from seeds; SECONDS=, SEED=, FROM=, FILE=, ONLY=
	SIMULATE_SECONDS=$(or $(SECONDS),60) SIMULATE_SEED=$(SEED) SIMULATE_FROM=$(FROM) \
		SIMULATE_FILE=$(FILE) SIMULATE_ONLY=$(ONLY) scripts/simulate

exhaust: install ## Small programs with every fault at every step; PAIRS=1 every pair, EVERY=500, SHARD=1/64, PROGRESS=, ONLY=
	EXHAUST_ONLY=$(ONLY) EXHAUST_SECONDS=$(SECONDS) SHARD=$(SHARD) EVERY=$(EVERY) PROGRESS=$(PROGRESS) \
		scripts/exhaust $(if $(PAIRS),pairs,singles)
	$(if $(PAIRS),,EXHAUST_ONLY=$(ONLY) scripts/exhaust equal)

model: install ## Search every state of the protocol's model, within each line of tests/model/bounds.txt
	@while read -r bounds; do cargo run -q --release -p rlock-model -- $$bounds || exit 1; done < tests/model/bounds.txt

check: install ## Formatting, lints, documentation and the core's tests: before each commit
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	cargo clippy -p rlock-tests --test interop --test languages -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --document-private-items
	cargo test -p rlock-core
	cargo test -p rlock-bench --lib
	cargo test -p rlock-example-otlp
	scripts/simulate-faults --check

test-servers: install ## The integration tests on every Redis and Valkey that can be had
	scripts/test-servers

prometheus: install ## What `rlock exporter` tells, to a real Prometheus and promtool
	@scripts/install prometheus
	RLOCK_PROMETHEUS=1 cargo test --test it exporter::

interop: ## The tests beside a real Redisson, which is Java
	@scripts/install javac mvn
	scripts/interop

languages: install ## The programs of docs/languages.md, in the languages this machine has
	scripts/languages

memcheck: ## The smoke tests, load and noise among them, with the server under valgrind
	@scripts/install valgrind
	scripts/memcheck

fuzz: ## Fuzz the core, FUZZ_SECONDS= a target (60), on a nightly compiler
	FUZZ_SECONDS=$(or $(FUZZ_SECONDS),60) scripts/fuzz

faults: ## Put known faults back into a copy of the core and see each net catch them
	@scripts/faults

mutants: ## Change the core and the client at single places and see a test fail; SEED=, MINUTES=
	@scripts/mutants

simulate-faults: install ## The same with faults of client and core, and the simulation
	@scripts/simulate-faults

bench: install ## Measure everything against what there is instead; tables and plots into docs/bench
	@scripts/bench

plots: ## Draw the tables and plots of docs/bench from its files again
	@scripts/bench --plots

instructions: ## Count the server's instructions an operation; ACCEPT=1 keeps the figures
	@scripts/install valgrind
	cargo bench -p rlock-tests --bench instructions -- $(if $(ACCEPT),--accept)

dist: install ## Everything to install without a compiler, for two machines: target/dist
	@scripts/dist

dist-check: ## Build that once more elsewhere, compare, and look into it
	@scripts/dist-check

dist-arm64: install ## Run what `make dist` made for aarch64, under qemu
	@scripts/dist-arm64

dist-debian: ## Install, upgrade, use and purge the packages; as root, and nothing stays
	@scripts/dist-debian

release-check: install ## What a release is checked for beside the tests; STEPS=, ACCEPT=1, BASELINE=
	ACCEPT=$(ACCEPT) BASELINE=$(BASELINE) scripts/release-check $(STEPS)

install: ## Install what the build and the tests need and this machine lacks
	@scripts/install

clean: ## Remove everything built, the servers unpacked and the data of `make run`
	cargo clean
