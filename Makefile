# kvpick: one entry point. `make help` lists the targets.
BUILD ?= release
B := build/$(BUILD)
CC ?= gcc
CXX ?= g++
PROVE ?= prove
JOBS ?= 2

WARN := -Wall -Wextra -Wshadow -Wcast-align -Wvla -Werror
CWARN := $(WARN) -Wstrict-prototypes -Wmissing-prototypes
BASE := -g -fno-omit-frame-pointer -fstack-protector-strong -ffp-contract=off -D_GNU_SOURCE -fPIC \
	-Iinclude -I. -I$(B)/gen -MMD -MP -pthread
ARCH := $(if $(filter x86_64,$(shell uname -m)),-mcx16 -march=x86-64-v2)

OPT_release := -O2
OPT_debug := -O0 -DKVP_DEBUG -DKVP_TEST_POINTS
OPT_asan := -O1 -fsanitize=address -DKVP_DEBUG -DKVP_TEST_POINTS
OPT_ubsan := -O1 -fsanitize=undefined -fno-sanitize-recover=undefined -DKVP_DEBUG -DKVP_TEST_POINTS
OPT_tsan := -O1 -fsanitize=thread -DKVP_ATOMIC_C11 -DKVP_DEBUG -DKVP_TEST_POINTS
OPT_cov := -O0 --coverage -DKVP_TEST_POINTS
OPT_fuzz := -O1 -fsanitize=fuzzer-no-link,address -DKVP_FUZZ -DKVP_TEST_POINTS
ifeq ($(BUILD),fuzz)
CC := clang
CXX := clang++
endif
OPT := $(OPT_$(BUILD))
ifeq ($(OPT),)
$(error BUILD must be release, debug, asan, ubsan, tsan, cov or fuzz)
endif
CFLAGS = -std=c11 $(CWARN) $(BASE) $(ARCH) $(OPT)
CXXFLAGS = -std=c++17 $(WARN) $(BASE) $(ARCH) $(OPT)
LDFLAGS = -pthread $(filter -fsanitize% --coverage,$(OPT)) -Wl,--as-needed
LIBS := -luring -lzmq -lmsgpackc -lsimdjson -lhttp_parser -lxxhash -lyaml -lcurl -lgrpc -lgpr -labsl_synchronization -lprotobuf-c \
	-lyajl -lssl -lcrypto -lstdc++ -lm

# Libraries, lowest first. libkvpick is what other programs embed: shm plus the selection flow.
SHM_SRC := $(wildcard shm/*.c)
SELECT_SRC := $(wildcard daemons/common/select*.c)
IPC_SRC := $(wildcard ipc/*.c ipc/*.cc)
COMMON_SRC := $(filter-out $(SELECT_SRC),$(wildcard daemons/common/*.c))
obj = $(patsubst %,$(B)/%.o,$(1))
LIB_A := $(B)/libkvpick.a
LIB_SO := $(B)/libkvpick.so
IPC_A := $(B)/libkvp-ipc.a
COMMON_A := $(B)/libkvp-common.a
LINK := $(COMMON_A) $(IPC_A) $(LIB_A)
# Simulated engines and load generator share their models with each other and with their tests.
BENCH_A := $(B)/libkvp-bench.a
BENCH_LIB_SRC := $(filter-out %/main.c,$(wildcard bench/sim/*.c bench/load/*.c))
# The Endpoint Picker's parts, which tests link one by one.
EXTPROC_A := $(B)/libkvp-extproc.a
EXTPROC_LIB_SRC := $(filter-out %/main.c,$(wildcard daemons/extproc/*.c))
# The parts of the replica daemon, likewise.
PEER_A := $(B)/libkvp-peer.a
PEER_LIB_SRC := $(filter-out %/main.c,$(wildcard daemons/peer/*.c))
# Discovery's parts, likewise.
DISCOVERY_A := $(B)/libkvp-discovery.a
DISCOVERY_LIB_SRC := $(filter-out %/main.c,$(wildcard daemons/discovery/*.c))
# And the sidecar's.
SIDECAR_A := $(B)/libkvp-sidecar.a
SIDECAR_LIB_SRC := $(filter-out %/main.c,$(wildcard daemons/sidecar/*.c))

# One binary a folder: folder -> program name.
PROGS := $(B)/kvpick $(B)/kvpick-indexer $(B)/kvpick-httpd $(B)/kvpick-extproc $(B)/kvpick-peer \
	$(B)/kvpick-discovery $(B)/kvpick-sidecar $(B)/kvpickctl $(B)/kvpick-sim $(B)/kvpick-load
src_kvpick := daemons/supervisor
src_kvpick-indexer := daemons/indexer
src_kvpick-httpd := daemons/httpd
src_kvpick-extproc := daemons/extproc
src_kvpick-peer := daemons/peer
src_kvpick-discovery := daemons/discovery
src_kvpick-sidecar := daemons/sidecar
src_kvpickctl := daemons/ctl
src_kvpick-sim := bench/sim
src_kvpick-load := bench/load
# A folder that has no main.c yet is not a program yet.
PROGS := $(foreach p,$(PROGS),$(if $(wildcard $(src_$(notdir $(p)))/main.c),$(p)))

TEST_SRC := $(wildcard tests/[tvmrg]_*.c)
TORTURE_SRC := $(wildcard tests/torture/x_*.c)
FUZZ_SRC := $(wildcard tests/fuzz/f_*.c)
HELPER_SRC := $(wildcard tests/helpers/*.c)
BENCH_SRC := $(wildcard bench/b_*.c)
# Tests that kill at named places find these in every build: a library of its own of what has such places.
POINT_A := $(B)/libkvpick-points.a
POINT_TESTS := $(addprefix $(B)/tests/,t_catalogue t_cmdring_crash t_lifecycle_crash t_memo t_radix_crash \
	t_reconcile t_tiers_crash r_radix)
TESTS := $(patsubst %.c,$(B)/%,$(TEST_SRC) $(TORTURE_SRC) $(FUZZ_SRC))
# Programs with these places.
POINT_PROGS := $(addprefix $(B)/tests/points/,kvpick-discovery kvpick-httpd kvpickctl)
HELPERS := $(patsubst %.c,$(B)/%,$(HELPER_SRC)) $(POINT_PROGS)
BENCHES := $(patsubst %.c,$(B)/%,$(BENCH_SRC))
SCRIPTS := $(wildcard tests/[sk]_*.t tests/crash/k_*.t) tests/mutation.t

ifeq ($(BUILD),tsan)
export TSAN_OPTIONS := suppressions=$(CURDIR)/tests/tsan.supp exitcode=66 halt_on_error=0 $(TSAN_OPTIONS)
endif

.PHONY: all lib tests benches test check vectors long torture mutation fuzz bench bench-scale bench-http bench-extproc bench-peer bench-policy soak lint run run-envoy run-disagg deps install clean help
all: $(LIB_A) $(LIB_SO) $(PROGS)
lib: $(LIB_A) $(LIB_SO) $(IPC_A) $(COMMON_A)
tests: all $(TESTS) $(HELPERS)
benches: all $(BENCHES)

$(B)/%.c.o: %.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -c -o $@ $<
$(B)/points/%.c.o: %.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -DKVP_TEST_POINTS -c -o $@ $<
$(B)/%.cc.o: %.cc
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) -c -o $@ $<
$(LIB_A): $(call obj,$(SHM_SRC) $(SELECT_SRC))
# Messages of protobuf: ipc/x.proto -> $(B)/gen/ipc/x.pb-c.[ch].
PROTO_SRC := $(wildcard ipc/*.proto)
PROTO_C := $(PROTO_SRC:%.proto=$(B)/gen/%.pb-c.c)
$(PROTO_C): $(B)/gen/%.pb-c.c: %.proto
	@mkdir -p $(B)/gen
	protoc-c --c_out=$(B)/gen $<
$(PROTO_C:.c=.o): %.o: %.c
	$(CC) $(CFLAGS) -Wno-missing-braces -c -o $@ $<
$(call obj,$(wildcard ipc/extproc_*.c) ipc/grpc_health.c): | $(PROTO_C)
$(IPC_A): $(call obj,$(IPC_SRC)) $(PROTO_C:.c=.o)
$(COMMON_A): $(call obj,$(COMMON_SRC))
$(BENCH_A): $(call obj,$(BENCH_LIB_SRC))
$(EXTPROC_A): $(call obj,$(EXTPROC_LIB_SRC))
$(PEER_A): $(call obj,$(PEER_LIB_SRC))
$(DISCOVERY_A): $(call obj,$(DISCOVERY_LIB_SRC))
$(SIDECAR_A): $(call obj,$(SIDECAR_LIB_SRC))
$(POINT_A): $(patsubst %,$(B)/points/%.o,shm/point.c $(shell grep -lw KVP_POINT $(SHM_SRC)))
$(LIB_A) $(IPC_A) $(COMMON_A) $(BENCH_A) $(EXTPROC_A) $(PEER_A) $(DISCOVERY_A) $(SIDECAR_A) $(POINT_A):
	@mkdir -p $(@D)
	@rm -f $@
	ar rcs $@ $^
$(LIB_SO): $(call obj,$(SHM_SRC) $(SELECT_SRC))
	$(CC) -shared $(LDFLAGS) -Wl,-soname,libkvpick.so.0 -o $@ $^ -lxxhash -lm

.SECONDEXPANSION:
$(PROGS): $$(call obj,$$(wildcard $$(src_$$(@F))/*.c)) $$(if $$(filter bench/%,$$(src_$$(@F))),$(BENCH_A)) $(LINK)
	$(CC) $(LDFLAGS) -o $@ $^ $(LIBS)
$(POINT_PROGS): $$(patsubst %.c,$(B)/points/%.c.o,$$(wildcard $$(src_$$(@F))/*.c)) $(POINT_A) $(LINK)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) -o $@ $^ $(LIBS)
$(B)/tests/fuzz/f_%: $(B)/tests/fuzz/f_%.c.o $(SIDECAR_A) $(LINK)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) $(if $(filter fuzz,$(BUILD)),-fsanitize=fuzzer) -o $@ $^ $(LIBS)
$(B)/tests/t_sim_%: $(B)/tests/t_sim_%.c.o $(BENCH_A) $(LINK)
	$(CC) $(LDFLAGS) -o $@ $^ $(LIBS)
$(B)/tests/t_load_%: $(B)/tests/t_load_%.c.o $(BENCH_A) $(LINK)
	$(CC) $(LDFLAGS) -o $@ $^ $(LIBS)
$(B)/tests/helpers/h_envoy: $(B)/tests/helpers/h_envoy.c.o $(BENCH_A) $(LINK)
	$(CC) $(LDFLAGS) -o $@ $^ $(LIBS)
$(B)/tests/t_grpc_%: $(B)/tests/t_grpc_%.c.o $(BENCH_A) $(LINK)
	$(CC) $(LDFLAGS) -o $@ $^ $(LIBS)
$(B)/bench/b_peer: $(B)/bench/b_peer.c.o $(BENCH_A) $(PEER_A) $(LINK)
	$(CC) $(LDFLAGS) -o $@ $^ $(LIBS)
$(B)/bench/b_%: $(B)/bench/b_%.c.o $(BENCH_A) $(LINK)
	$(CC) $(LDFLAGS) -o $@ $^ $(LIBS)
# The example of embedding gets what `make install` installs, and nothing else.
$(B)/tests/t_embed: $(B)/tests/t_embed.c.o $(LIB_A)
	$(CC) $(LDFLAGS) -o $@ $^ -lxxhash -lm
$(B)/tests/%: $(B)/$$(subst $(B)/,,$$@).c.o $(EXTPROC_A) $(PEER_A) $(DISCOVERY_A) $(SIDECAR_A) $(LINK)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) -o $@ $< $(filter $(POINT_A),$^) $(EXTPROC_A) $(PEER_A) $(DISCOVERY_A) $(SIDECAR_A) $(LINK) $(LIBS)
$(POINT_TESTS): $(POINT_A)
$(POINT_TESTS:=.c.o): CFLAGS += -DKVP_TEST_POINTS

deps:
	@deploy/deps.sh

# The whole suite: the same command locally and in CI.
test: deps
	$(MAKE) --no-print-directory -j$(JOBS) BUILD=$(BUILD) tests
	KVP_BUILD_DIR=$(B) $(PROVE) -j$(JOBS) --exec '' $(TESTS) $(SCRIPTS)
check: test
# Every recorded conversation of the Selection API, with 1 and with 3 HTTP processes, and every vector; what is
# skipped is shown with the reason. About four minutes.
vectors: deps
	$(MAKE) --no-print-directory -j$(JOBS) BUILD=$(BUILD) tests
	KVP_LONG=1 HTTPD_PROCESSES=1,3 KVP_BUILD_DIR=$(B) $(PROVE) -v -j$(JOBS) --exec '' \
		$(patsubst %.c,$(B)/%,$(wildcard tests/v_*.c)) tests/s_api_vectors.t
# Long forms of tests that `make test` runs short: waits, hang-ups, admission, workers that come and go,
# ten thousand sagas through pickers and sidecars.
LONG := $(B)/tests/t_select_queue tests/s_queue.t tests/s_cancel.t tests/s_admission.t tests/s_regressions.t \
	tests/s_recovery.t tests/s_interop.t tests/s_kube.t tests/s_disagg_sidecars.t
long: deps
	$(MAKE) --no-print-directory -j$(JOBS) BUILD=$(BUILD) tests
	KVP_LONG=1 KVP_BUILD_DIR=$(B) $(PROVE) -v --exec '' $(LONG)
# A node, simulated engines, kvpick against round-robin on a bundled trace: TRACE=file takes another one,
# POLICY=least_work the other selection policy.
run: deps
	$(MAKE) --no-print-directory -s -j$(JOBS) BUILD=$(BUILD) $(PROGS)
	KVP_BUILD_DIR=$(B) TRACE='$(TRACE)' SCALE='$(SCALE)' POLICY='$(POLICY)' LOAD_ARGS='$(LOAD_ARGS)' deploy/run-demo.sh
# The same trace through a real Envoy that asks kvpick, and round-robin beside it.
run-envoy: deps
	$(MAKE) --no-print-directory -s -j$(JOBS) BUILD=$(BUILD) $(PROGS)
	KVP_BUILD_DIR=$(B) TRACE='$(TRACE)' SCALE='$(SCALE)' LOAD_ARGS='$(LOAD_ARGS)' deploy/run-envoy.sh
# The same with three prefill and three decode engines and their sidecars. PD=vllm|sglang|trtllm
run-disagg: deps
	$(MAKE) --no-print-directory -s -j$(JOBS) BUILD=$(BUILD) $(PROGS)
	KVP_BUILD_DIR=$(B) PD='$(PD)' TRACE='$(TRACE)' SCALE='$(SCALE)' LOAD_ARGS='$(LOAD_ARGS)' deploy/run-disagg.sh
# Every bar with its value: bench about 5 minutes; bench-scale for 1 to 3 readers and growing trees.
bench bench-scale: deps
	$(MAKE) --no-print-directory -s -j$(JOBS) BUILD=$(BUILD) benches $(patsubst %.c,$(B)/%,$(TORTURE_SRC))
	KVP_BUILD_DIR=$(B) bench/bars.py $(if $(filter bench-scale,$@),--scale,--raw) $(BENCH_ARGS)
	$(if $(filter bench,$@),KVP_BUILD_DIR=$(B) bench/bars_http.py --raw)
# The Selection API over HTTP, and beside it the reference service where pip can install it.
bench-http: deps
	$(MAKE) --no-print-directory -s -j$(JOBS) BUILD=$(BUILD) $(PROGS) $(B)/bench/b_api
	KVP_BUILD_DIR=$(B) bench/bars_http.py --raw $(BENCH_ARGS)
# The Endpoint Picker behind a played Envoy: streams a second, time to the answer, processor time.
bench-extproc: deps
	$(MAKE) --no-print-directory -s -j$(JOBS) BUILD=$(BUILD) $(PROGS) $(B)/tests/helpers/h_envoy $(B)/tests/helpers/h_tokenizer
	KVP_BUILD_DIR=$(B) bench/bars_extproc.py $(BENCH_ARGS)
# Between nodes: messages/s, what telling costs who books, a dump's MB/s, blocks/s of a recovery.
BENCH_PEER := b_peer b_lifecycle b_dump b_recover
bench-peer: deps
	$(MAKE) --no-print-directory -s -j$(JOBS) BUILD=$(BUILD) $(PROGS) $(addprefix $(B)/bench/,$(BENCH_PEER))
	@for b in $(BENCH_PEER); do $(B)/bench/$$b || exit 1; done
# Selection policies on simulated engines: TRACE="a.jsonl b.jsonl" plays those, else the bundled trace.
bench-policy: deps
	$(MAKE) --no-print-directory -s -j$(JOBS) BUILD=$(BUILD) $(B)/bench/b_policy
	$(B)/bench/b_policy $(foreach t,$(TRACE),--trace '$(t)') $(BENCH_ARGS)
# The sidecar as a plain proxy beside a plain nginx (fetched, not installed): added latency, tokens a second, memory.
bench-sidecar: deps
	$(MAKE) --no-print-directory -s -j$(JOBS) BUILD=$(BUILD) $(B)/kvpick-sidecar $(B)/bench/b_sidecar
	KVP_BUILD_DIR=$(B) bench/bars_sidecar.py $(BENCH_ARGS)
torture: tests
	KVP_TORTURE_S=600 KVP_BUILD_DIR=$(B) $(PROVE) --exec '' $(patsubst %.c,$(B)/%,$(TORTURE_SRC)) tests/s_torture.t
# Every one-line breakage of the list, in every build that one asks for (about ten minutes).
mutation: deps
	KVP_MUTATION_JOBS=$(JOBS) tests/mutation.t --all
# Random clients on a node for SOAK_S seconds: no wrong answer, flat memory, nothing left. KVP_SEED replays.
SOAK_S ?= 600
soak: deps
	$(MAKE) --no-print-directory -s -j$(JOBS) BUILD=$(BUILD) $(PROGS) $(HELPERS)
	SOAK_S=$(SOAK_S) KVP_BUILD_DIR=$(B) tests/s_soak.t
# Coverage-guided fuzzing of every parser of outside bytes, FUZZ_SECONDS each (needs clang).
FUZZ_SECONDS ?= 60
fuzz:
	$(MAKE) --no-print-directory -j$(JOBS) BUILD=fuzz $(patsubst %.c,build/fuzz/%,$(FUZZ_SRC))
	for f in $(patsubst tests/fuzz/f_%.c,%,$(FUZZ_SRC)); do mkdir -p build/fuzz/corpus/$$f && \
		build/fuzz/tests/fuzz/f_$$f -max_total_time=$(FUZZ_SECONDS) build/fuzz/corpus/$$f \
			tests/fuzz/corpus/$$f || exit 1; done
lint:
	@tests/lint.py

install: all
	install -d $(DESTDIR)/usr/bin $(DESTDIR)/usr/lib $(DESTDIR)/usr/include/kvpick \
		$(DESTDIR)/usr/lib/systemd/system $(DESTDIR)/usr/lib/sysusers.d $(DESTDIR)/usr/share/doc/kvpick
	install -m 755 $(PROGS) $(DESTDIR)/usr/bin
	install -m 644 $(LIB_A) $(LIB_SO) $(DESTDIR)/usr/lib
	install -m 644 include/kvpick/*.h include/kvpick/*.def $(DESTDIR)/usr/include/kvpick
	install -m 644 deploy/systemd/kvpick.service $(DESTDIR)/usr/lib/systemd/system
	install -m 644 deploy/systemd/kvpick.sysusers $(DESTDIR)/usr/lib/sysusers.d/kvpick.conf
	install -m 644 deploy/systemd/kvpick.yaml LICENSE $(DESTDIR)/usr/share/doc/kvpick
clean:
	rm -rf build
help:
	@echo "make run | run-envoy | run-disagg | test | vectors | long | lint | bench | bench-scale | bench-http | bench-extproc | bench-peer | bench-policy | torture | soak | install; BUILD=release|debug|asan|ubsan|tsan|cov|fuzz"

-include $(shell find $(B) -name '*.d' 2>/dev/null)
