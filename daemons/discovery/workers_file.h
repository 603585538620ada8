/* daemons/discovery/workers_file.h — a file that lists workers: read, checked, watched.
 *
 * Shape      YAML (JSON is a part of it): a mapping with the one key `workers`, a list of WorkerRequest
 *            objects as the Selection API takes them, each with `role` prefill or decode where the topology
 *            has roles. A change is what stat tells: the file is read when it
 *            looks the same for KVP_WORKERS_QUIET_NS, so a file that is being written is not.
 * Truth      the file.
 * Writers    people and programs outside; here nobody.
 * Ordering   a version that was read and found good replaces the one before; a bad one changes nothing.
 * Lifetime   kvp_workers_file_read fills a list, kvp_workers_list_free empties it.
 * Crash      process-local.
 * Proved by  tests/t_workers_file.c, tests/s_workers_file.t, tests/fuzz/f_workers_file.c
 */
#ifndef KVP_DISCOVERY_WORKERS_FILE_H
#define KVP_DISCOVERY_WORKERS_FILE_H

#include "daemons/discovery/catalog.h"

#define KVP_WORKERS_BYTES_MAX (64u << 20) /* of the file */
#define KVP_WORKERS_MAX 65536u		  /* of the list */
#define KVP_WORKERS_QUIET_NS 200000000ull

struct kvp_workers_list {
	struct kvp_catalog_want *want; /* with their texts */
	uint32_t cnt;
};

/* kvp_workers_parse reads a text. KVP_OK and *out; KVP_ERR_PROTO, KVP_ERR_LIMIT or KVP_ERR_SYS and a line
 * about it in err, which says where. Every member is checked as a registration would be; unknown ones are
 * errors. */
int kvp_workers_parse(const char *text, size_t len, struct kvp_workers_list *out, char *err, size_t err_cap);
void kvp_workers_list_free(struct kvp_workers_list *l);

struct kvp_workers_watch {
	const char *path;	    /* set by the caller, who zeroes the rest */
	uint64_t seen[5], taken[5]; /* device, inode, size, time of change in ns, existence */
	uint64_t since_ns;	    /* seen has been the same since then */
	int any;		    /* something was taken */
};

/* kvp_workers_watch_poll looks at the file: 1 when it has changed since the last 1 and is at rest (the first
 * time: when it is at rest); 0 otherwise. */
int kvp_workers_watch_poll(struct kvp_workers_watch *w, uint64_t now_ns);

/* kvp_workers_file_read reads and parses the file: as kvp_workers_parse; KVP_ERR_SYS also when it can't be
 * read, KVP_ERR_AGAIN when it changed meanwhile. */
int kvp_workers_file_read(const char *path, struct kvp_workers_list *out, char *err, size_t err_cap);
#endif
