/* bench/load/options.h — the command line of kvpick-load.
 *
 * Shape      struct kvp_load_cfg: everything a run needs, strings pointing into argv.
 * Truth      the command line. Writers: kvp_load_options, once. Readers: main, replay. Ordering: none.
 * Lifetime   the process. Crash: nothing.
 * Proved by  tests/s_sim.t
 */
#ifndef KVP_BENCH_LOAD_OPTIONS_H
#define KVP_BENCH_LOAD_OPTIONS_H

#include "bench/load/gen.h"
#include "bench/load/simulate.h"
#include "bench/load/stats.h"

#define KVP_LOAD_RUN_MAX 4	/* policies side by side */
#define KVP_LOAD_TARGET_MAX 256 /* engines a policy */

enum kvp_load_mode { KVP_LOAD_REPLAY, KVP_LOAD_SIMULATE, KVP_LOAD_GENERATE };
enum kvp_load_arrival { KVP_LOAD_SPREAD, KVP_LOAD_RAW };
enum kvp_load_output { KVP_LOAD_TABLE, KVP_LOAD_JSON };
enum kvp_load_prompt { KVP_LOAD_HASHES, KVP_LOAD_TOKENS };
enum kvp_load_register { KVP_LOAD_REGISTER_NO, KVP_LOAD_REGISTER_YES };

struct kvp_load_target { /* one engine */
	char host[64];	 /* IP literal */
	uint16_t http_port;
	uint16_t event_port, replay_port; /* 0 = not known */
};
struct kvp_load_set {
	struct kvp_load_target target[KVP_LOAD_TARGET_MAX];
	uint32_t cnt;
};

struct kvp_load_cfg {
	enum kvp_load_mode mode;
	enum kvp_load_arrival arrival;
	enum kvp_load_output output;
	const char *trace, *generate; /* files; "-" = standard output for generate */
	uint64_t limit, duration_s, seed;
	double speed, scale;
	enum kvp_policy policy[KVP_LOAD_RUN_MAX];
	uint32_t run_cnt;
	struct kvp_load_set set[KVP_LOAD_RUN_MAX]; /* engines of each run */
	uint32_t set_cnt;
	char base_host[64]; /* the node */
	uint16_t base_port;
	const char *model, *group, *token_file;
	enum kvp_load_prompt node_form;	  /* how the node gets the prompt */
	enum kvp_load_prompt engine_form; /* how the engine gets it: ids or token ids */
	enum kvp_load_register registration;
	uint64_t timeout_s;
	uint32_t engine_cnt; /* simulate */
	struct kvp_sim_cfg engine;
	struct kvp_gen_cfg gen;
};

/* kvp_load_options reads the command line; exits with KVP_EXIT_CONFIG and a message for anything wrong, with
 * 0 after --help. */
void kvp_load_options(int argc, char **argv, struct kvp_load_cfg *out);

/* kvp_load_set_read appends engines to a set: "host:port[:events[:replay]],..." or "@file" with the lines
 * that kvpick-sim prints. KVP_ERR_PROTO (syntax), KVP_ERR_FULL, KVP_ERR_SYS (file). */
int kvp_load_set_read(struct kvp_load_set *set, const char *text);
/* kvp_load_url reads "http://host:port[/]" (host: an IP literal or localhost). KVP_ERR_PROTO. */
int kvp_load_url(const char *url, char host[64], uint16_t *port);
#endif
