/* daemons/ctl/ctl.h — kvpickctl: looks at a running node; every verb but sweep maps the region read-only.
 *
 * Shape      one process a call; verbs over struct ctl; output as text tables or as one JSON object, by the
 *            same code (ctl_tab_*).
 * Writers    nothing shared, except `sweep`, which the supervisor starts with --boot-fd.
 * Crash      a look leaves nothing. The supervisor repeats a sweep that was killed.
 */
#ifndef KVP_CTL_CTL_H
#define KVP_CTL_CTL_H

#include "daemons/common/boot.h"
#include "daemons/common/config.h"
#include "ipc/json_out.h"
#include "shm/region.h"
#include "shm/sweep.h"
#include <stdio.h>

enum ctl_form { CTL_TEXT, CTL_JSON };

struct ctl {
	struct kvp_config *cfg;
	struct kvp_attach at;
	struct kvp_region *region; /* mapped read-only */
	enum ctl_form form;
	struct kvp_jw doc;    /* JSON form: the one object that is printed */
	uint32_t timeout_ms;  /* -t: longest wait for a region */
	uint32_t interval_ms; /* top -u */
	int once;	      /* top -1 */
	uint64_t limit;	      /* --limit, UINT64_MAX = all */
	const char *model, *group;
	const char *verb;
};

/* main.c */
int ctl_attach(struct ctl *c); /* KVP_OK or an exit code after a message */
void ctl_detach(struct ctl *c);

/* table.c: a document is a sequence of tables; a table is aligned text or a JSON array of objects as a member
 * of the document. Strings from outside are escaped in both. */
#define CTL_COL_MAX 20
struct ctl_tab {
	struct ctl *ctl;
	uint32_t col_cnt, cell_cnt, cell_max, col;
	const char *const *col_name;
	char **cell; /* text form: all cells, row by row */
	uint8_t right[CTL_COL_MAX];
	int failed; /* out of memory */
};
void ctl_doc_begin(struct ctl *c);
/* ctl_doc_end prints the JSON object; KVP_EXIT_OK, or KVP_EXIT_DEPEND without memory. */
int ctl_doc_end(struct ctl *c);

void ctl_tab_begin(
	struct ctl_tab *t, struct ctl *c, const char *name, uint32_t col_cnt, const char *const *col_name);
void ctl_tab_u64(struct ctl_tab *t, uint64_t v);
void ctl_tab_f64(struct ctl_tab *t, double v);
void ctl_tab_str(struct ctl_tab *t, const char *s);
void ctl_tab_strn(struct ctl_tab *t, const char *s, size_t n);
void ctl_tab_none(struct ctl_tab *t); /* "-" or null */
/* ctl_tab_end prints a text table; KVP_EXIT_OK, or KVP_EXIT_DEPEND without memory. */
int ctl_tab_end(struct ctl_tab *t);

/* Times for people: UTC, ISO 8601. */
void ctl_time(uint64_t real_ns, char buf[32]);

/* Verbs: the exit code. */
int ctl_slots(struct ctl *c);
int ctl_errors(struct ctl *c);
int ctl_peers(struct ctl *c);
int ctl_gen(struct ctl *c);
int ctl_radix(struct ctl *c);
int ctl_workers(struct ctl *c);
int ctl_resv(struct ctl *c);
int ctl_check(struct ctl *c);
int ctl_top(struct ctl *c);
int ctl_sweep(int argc, char **argv);
#endif
