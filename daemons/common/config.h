/* daemons/common/config.h — one table of all settings: parse, check, show, hand over.
 *
 * Shape      struct kvp_config: plain values, no pointers, so it can be copied into a sealed memory file
 *            and from there into every child. One field a setting of config_settings.def, then what follows
 *            from them.
 * Truth      flag, else environment, else configuration file, else default.
 * Writers    kvp_config_load (supervisor, tools, a process started by hand); nobody changes it afterwards.
 * Readers    every process: kvp_config_from_fd, then plain reads.
 * Ordering   none: the file is sealed before it is inherited.
 * Lifetime   one start of the node.
 * Crash      nothing to repair: a started child has the complete file or none.
 * Proved by  tests/t_config.c
 *
 * Rules: values are trimmed, blank is unset (an error for DYN_SIDECAR_*). bool: 1 true on yes, 0 false off
 * no, any case. Whatever is wrong is an error that names variable or flag, value and legal range; all
 * errors of a start are collected. An unknown KVPICK_* variable, flag or file key is an error that names
 * the nearest known one; unknown DYN_* variables are collected for one log line. A binary checks the
 * settings that it reads.
 */
#ifndef KVP_COMMON_CONFIG_H
#define KVP_COMMON_CONFIG_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

#include "daemons/common/log.h"

#define KVP_CONFIG_UNSET UINT64_MAX /* an optional integer without a value */
#define KVP_CONFIG_UNSET_F (-1e308) /* an optional number without a value: kvp_config_has */
#define KVP_CONFIG_NO_WORD (-1)     /* an optional word without a value */
#define KVP_CONFIG_ERR_MAX 8192
#define KVP_CONFIG_NOTICE_MAX 2048
#define KVP_CONFIG_POLICIES                                                                                  \
	"reference|least_work" /* compiled-in selection policies, |-separated: enum kvp_score_policy */

/* Programs, as bits: which of them reads a setting. */
enum kvp_binary {
	KVP_BIN_SUPERVISOR = 1,
	KVP_BIN_INDEXER = 2,
	KVP_BIN_EXTPROC = 4,
	KVP_BIN_HTTPD = 8,
	KVP_BIN_PEER = 16,
	KVP_BIN_DISCOVERY = 32,
	KVP_BIN_SIDECAR = 64,
	KVP_BIN_CTL = 128
};

enum kvp_config_mode { KVP_MODE_SELECTION, KVP_MODE_EPP, KVP_MODE_BOTH };
enum kvp_config_huge { KVP_HUGE_TRY, KVP_HUGE_OFF };
enum kvp_config_approx { KVP_APPROX_TTL, KVP_APPROX_LRU };
enum kvp_config_queue { KVP_QUEUE_FCFS, KVP_QUEUE_LCFS, KVP_QUEUE_WSPT };
enum kvp_config_affinity { KVP_AFFINITY_HARD, KVP_AFFINITY_SOFT };
enum kvp_config_cond {
	KVP_COND_ISL_BOUNDING,
	KVP_COND_PREFILL_LOAD,
	KVP_COND_ISL_OR_LOAD,
	KVP_COND_NON_CACHED_TOKENS,
	KVP_COND_MAX_LOCAL_PREFILL
};
enum kvp_config_roles { KVP_ROLES_DYN, KVP_ROLES_LLMD };
enum kvp_config_topology { KVP_TOPOLOGY_AGGREGATED, KVP_TOPOLOGY_DISAGGREGATED };
enum kvp_config_tokenizer {
	KVP_TOK_VLLM_RENDER,
	KVP_TOK_SGLANG_RENDERER,
	KVP_TOK_SGLANG_TOKENIZE,
	KVP_TOK_TEXT
};
enum kvp_config_dp { KVP_DP_NONE, KVP_DP_HEADER, KVP_DP_PORT };
enum kvp_config_adapter { KVP_PD_NONE, KVP_PD_VLLM_NIXL, KVP_PD_SGLANG, KVP_PD_TRTLLM };
enum kvp_config_source { KVP_FROM_DEFAULT, KVP_FROM_FILE, KVP_FROM_ENV, KVP_FROM_FLAG };
enum kvp_config_act { KVP_ACT_RUN, KVP_ACT_HELP, KVP_ACT_VERSION, KVP_ACT_CHECK };

/* Number of each setting: KVP_CFG_<field>. */
enum kvp_config_id {
#define GROUP(title)
#define BOOL(field, ...) KVP_CFG_##field,
#define INT(field, ...) KVP_CFG_##field,
#define FLT(field, ...) KVP_CFG_##field,
#define STR(field, ...) KVP_CFG_##field,
#define WORD(field, ...) KVP_CFG_##field,
#include "daemons/common/config_settings.def"
	KVP_CFG_CNT
};

/* What follows from several settings; use these, not the raw ones. */
struct kvp_config_derived {
	int32_t mode;                 /* enum kvp_config_mode */
	uint8_t selection_on, epp_on; /* roles of this node */
	uint8_t peer_on, discovery_on;
	uint8_t queueing_on; /* a threshold or a policy file is set */
	uint8_t disaggregated;
	uint16_t api_port;     /* 0 = off */
	uint16_t metrics_port; /* 0 = off */
	uint16_t sync_port;    /* aggregated sync plane, 0 = off */
	uint16_t dump_port;    /* 0 = off */
	uint32_t threads;      /* decoder threads of the indexer */
	int32_t policy[3];     /* enum kvp_score_policy of the aggregated, prefill, decode role */
	double overlap_score_credit;   /* with the deprecated weight applied */
	double prefill_load_scale;     /* same */
	double prefill_busy_threshold; /* its own, else the queue threshold, else unset */
	uint64_t prefill_max_num_batched_tokens,
		decode_max_num_batched_tokens; /* KVP_CONFIG_UNSET = unknown */
	int32_t log_level;                     /* enum kvp_log_level */
	int32_t sidecar_adapter;               /* enum kvp_config_adapter */
	uint64_t sidecar_max_request_bytes, sidecar_max_answer_bytes; /* in two legs; of an engine, kept */
	uint64_t sidecar_max_held_bytes; /* 0 = no limit */
};

struct kvp_config {
	uint64_t magic; /* set by kvp_config_load, checked by kvp_config_from_fd */
	uint64_t layout;
	uint64_t size;
	uint32_t binary; /* enum kvp_binary of the loader */
	uint32_t act;    /* enum kvp_config_act asked for on the command line */

#define GROUP(title)
#define BOOL(field, ...) uint8_t field;
#define INT(field, ...) uint64_t field;
#define FLT(field, ...) double field;
#define STR(field, name, flag, bytes, ...) char field[bytes];
#define WORD(field, ...) int32_t field;
#include "daemons/common/config_settings.def"

	struct kvp_config_derived eff;
	uint8_t source[KVP_CFG_CNT];         /* enum kvp_config_source */
	char ignored[KVP_CONFIG_NOTICE_MAX]; /* variables that were ignored, for one log line; "" = none */
};

struct kvp_config_err {
	size_t len;
	unsigned cnt;
	char text[KVP_CONFIG_ERR_MAX]; /* one line an error */
};

/* What the caller handles itself: words without a flag, and with KVP_BIN_CTL also flags not in the table. */
struct kvp_config_rest {
	int cnt;
	const char *arg[64];
};

/* kvp_config_load parses all sources into *out.
 *
 * binary   whose settings are read and checked, whose flags are legal.
 * argv     argc arguments after the program name (and after a verb); may be NULL with argc 0.
 * envp     NULL-terminated NAME=value list; the process's own environment is not looked at.
 * rest     words that are no flags; NULL: such words are errors.
 * return   KVP_OK; KVP_ERR_INVAL with the reasons in err (out is then unspecified); KVP_ERR_SYS without
 *          memory. --help and --version stop early with KVP_OK and out->act set; look at act first.
 * blocks   reads the configuration file and looks at files that settings name.
 */
int kvp_config_load(enum kvp_binary binary, int argc, const char *const *argv, const char *const *envp,
	struct kvp_config *out, struct kvp_config_rest *rest, struct kvp_config_err *err);

/* kvp_config_main is kvp_config_load for a main function: prints errors to stderr, and help, version or the
 * effective configuration to stdout. Returns -1 to go on, else the exit code. */
int kvp_config_main(enum kvp_binary binary, int argc, const char *const *argv, const char *const *envp,
	struct kvp_config *out, struct kvp_config_rest *rest);

/* kvp_config_has answers whether an optional number has a value. */
static inline int kvp_config_has(double v)
{
	return v > KVP_CONFIG_UNSET_F;
}

/* kvp_config_list_next copies the next member of a list setting. *pos starts at 0. Returns 1, 0 at the
 * end. No list that was accepted has a longer member than these; with less room it would end there. */
#define KVP_CONFIG_MEMBER_MAX 1023u /* bytes */
#define KVP_CONFIG_ALLOW_MAX 320u   /* of a list of allowed targets */
int kvp_config_list_next(const char *list, size_t *pos, char *member, size_t cap);

/* kvp_config_name returns the variable of a setting. */
const char *kvp_config_name(enum kvp_config_id id);

/* kvp_config_value writes the effective value as text ("unset" without one, "set" for secrets) and returns
 * it. */
const char *kvp_config_value(const struct kvp_config *c, enum kvp_config_id id, char *buf, size_t cap);

/* kvp_config_value_next walks what an info metric shows: every setting that the loading binary reads. *id
 * starts at 0; returns the setting to show, or -1 at the end. */
int kvp_config_value_next(const struct kvp_config *c, int *id);

/* Texts. kvp_config_print_check: one line a setting, value and source. kvp_config_print_markdown: the
 * tables of the README. */
void kvp_config_print_help(FILE *f, enum kvp_binary binary);
void kvp_config_print_check(FILE *f, const struct kvp_config *c);
void kvp_config_print_markdown(FILE *f);
void kvp_config_print_version(FILE *f, enum kvp_binary binary);

/* kvp_config_log logs the effective values that are not defaults, and the ignored variables, one line
 * each. */
void kvp_config_log(const struct kvp_config *c);

/* kvp_config_log_setup applies the log settings to this process. */
void kvp_config_log_setup(const struct kvp_config *c, const char *process, int instance);

/* kvp_config_to_memfd returns a sealed, close-on-exec memory file with *c, or KVP_ERR_SYS. kvp_config_from_fd
 * copies it out again: KVP_ERR_LAYOUT if it is not one of this build, KVP_ERR_SYS if it can't be read. */
int kvp_config_to_memfd(const struct kvp_config *c);
int kvp_config_from_fd(int fd, struct kvp_config *out);

/* kvp_config_run_dir chooses the default run directory: <parent>/kvpick if it is a writable directory or
 * could be made, else xdg/kvpick (xdg NULL or "" = none), else /tmp/kvpick-<uid>. Makes nothing. */
void kvp_config_run_dir(const char *parent, const char *xdg, uid_t uid, char *buf, size_t cap);
#endif
