/* daemons/extproc/pool.h — where requests may be sent: endpoints of the schedulable workers of the served
 * model and of one role, and what a subset hint leaves of them.
 *
 * Shape      an array sorted by worker id, made anew when the catalogue has changed.
 * Truth      the catalogue (shm/catalogue.h). A worker whose endpoint is not host:port behind scheme and in
 *            front of a path can't be the answer to a proxy and is left out.
 * Who        one thread.
 * Crash      process-local.
 * Proved by  tests/t_pool.c, tests/s_extproc.t
 */
#ifndef KVP_EXTPROC_POOL_H
#define KVP_EXTPROC_POOL_H

#include "ipc/extproc_msg.h"
#include "ipc/json_in.h"
#include "shm/catalogue.h"

#define KVP_POOL_TEXT 300 /* bytes of host:port with its final 0 */

struct kvp_pool_addr {
	uint8_t family; /* 4, 6; 0 = a name, compared as text */
	uint8_t ip[16];
	uint32_t port; /* 0 = any */
	struct kvp_str name;
};

struct kvp_pool_member {
	uint64_t worker_id;
	uint32_t start_rank, rank_cnt;
	uint32_t host_len; /* of text, without the port */
	uint64_t domain;   /* hash of its transfer domain; 0 = none, or not read */
	struct kvp_pool_addr addr;
	char text[KVP_POOL_TEXT]; /* ip:port or [v6]:port */
};

struct kvp_pool {
	const struct kvp_cat *cat;
	enum kvp_part_role role;
	struct kvp_str model, group;
	struct kvp_pool_member *member;
	uint32_t cnt, cap, turn;
	uint32_t unusable; /* schedulable workers that were left out */
	uint64_t version;  /* of the catalogue */
	int is_read;
	uint64_t *allowed;
	uint32_t allowed_cap;
	struct kvp_json *json; /* NULL: domains are not read */
	char *record;
};

/* kvp_pool_open: strings are borrowed. */
void kvp_pool_open(struct kvp_pool *p, const struct kvp_cat *cat, enum kvp_part_role role,
	struct kvp_str model, struct kvp_str group);
void kvp_pool_close(struct kvp_pool *p);
/* kvp_pool_read_domains makes the members know their transfer domains from now on: KVP_OK; KVP_ERR_SYS. */
int kvp_pool_read_domains(struct kvp_pool *p);

/* kvp_pool_refresh reads the catalogue if it has changed: KVP_OK; KVP_ERR_SYS without memory (the old members
 * stay). Pointers to members are valid until the next one. */
int kvp_pool_refresh(struct kvp_pool *p);

const struct kvp_pool_member *kvp_pool_worker(const struct kvp_pool *p, uint64_t worker_id);
/* kvp_pool_at finds who serves host:port, and which rank: with rank ports each has the next port. */
enum kvp_pool_ports { KVP_POOL_ONE_PORT, KVP_POOL_RANK_PORTS };
const struct kvp_pool_member *kvp_pool_at(const struct kvp_pool *p, struct kvp_extproc_str endpoint,
	enum kvp_pool_ports ports, uint32_t *dp_rank);

/* kvp_pool_allow gives the ids that a hint leaves: entries ip:port, [v6]:port, or an address alone for all of
 * its ports. *ids NULL = everybody, no list needed. Valid until the next call. KVP_OK; KVP_ERR_SYS. */
int kvp_pool_allow(struct kvp_pool *p, enum kvp_extproc_hint hint, const struct kvp_extproc_str *entry,
	uint32_t entry_cnt, const uint64_t **ids, uint32_t *cnt);

/* kvp_pool_narrow keeps of what kvp_pool_allow gave those in a domain, and those that have none; a domain of
 * 0 keeps all. KVP_OK; KVP_ERR_SYS. */
int kvp_pool_narrow(struct kvp_pool *p, uint64_t domain, const uint64_t **ids, uint32_t *cnt);

/* kvp_pool_any gives the allowed members in turn; NULL if there is none. */
const struct kvp_pool_member *kvp_pool_any(struct kvp_pool *p, const uint64_t *ids, uint32_t cnt);

/* kvp_pool_destination writes host:port of a rank: 1, or 0 when it does not fit or there is no such port. */
int kvp_pool_destination(
	const struct kvp_pool_member *m, uint32_t dp_rank, enum kvp_pool_ports ports, char *out, size_t cap);
#endif
