/* shm/peers.h — the ZMQ endpoints of the replicas that this node is to follow: one small table for all
 * processes.
 *
 * Shape      KVP_PEERS_MAX rows; a row is a state word and the endpoint's text. FREE -> CLAIMED -> LISTED ->
 *            FREE; owner, a use count and the state are in the word. A version counts the changes.
 * Truth      the state word. The set is that of the texts of LISTED rows, as exact strings.
 * Writers    the supervisor (configured peers, before any other process exists), httpd (replica_sync routes),
 *            discovery and peer. Any number at a time; nobody waits for anybody.
 * Readers    all. kvpick-peer connects to what is listed: it compares the version with the one it has seen.
 * Ordering   LISTED is stored by compare-and-swap (full barrier) after the text; a reader loads the word
 *            before and after it copies the text. Who lists looks for the same text in other rows afterwards:
 *            of two that came at the same time the one in the higher row goes.
 * Lifetime   as long as the region: rows survive the processes that made them. A region made anew holds the
 *            configured peers only.
 * Crash      killed with a claimed row: kvp_peers_sweep_owner frees it. Killed between listing and looking: a
 *            text may stand twice; kvp_peers_list shows it once, kvp_peers_drop removes every row of it.
 * Proved by  tests/t_peers.c
 */
#ifndef KVP_SHM_PEERS_H
#define KVP_SHM_PEERS_H

#include <kvpick/types.h>
#include "shm/obj.h"

#define KVP_PEERS_MAX 256u
#define KVP_PEERS_TEXT_MAX 1024u /* bytes of an endpoint */

struct kvp_peers_shm;
struct kvp_peers { /* process-local handle */
	struct kvp_peers_shm *shm;
};

uint64_t kvp_peers_align(void);
uint64_t kvp_peers_footprint(const struct kvp_geom *g);
int kvp_peers_new(void *mem, const struct kvp_geom *g);
int kvp_peers_join(void *mem, const struct kvp_geom *g, struct kvp_peers *out);
void kvp_peers_leave(struct kvp_peers *p);
int kvp_peers_delete(void *mem);
/* kvp_peers_check counts words and lengths that cannot be. Meaningful at any time. */
uint64_t kvp_peers_check(const struct kvp_peers *p);

/* kvp_peers_add lists an endpoint (1..KVP_PEERS_TEXT_MAX bytes, no final 0 needed; its form is the caller's
 * business). owner: the caller's, not 0. KVP_OK it is new; KVP_ERR_EXISTS it was listed; KVP_ERR_FULL;
 * KVP_ERR_INVAL. */
int kvp_peers_add(struct kvp_peers *p, kvp_owner owner, const char *text, uint32_t len);

/* kvp_peers_drop removes an endpoint. KVP_OK, KVP_ERR_NOTFOUND. */
int kvp_peers_drop(struct kvp_peers *p, const char *text, uint32_t len);

/* One row: KVP_OK and the text with a final 0; KVP_ERR_NOTFOUND if nothing is listed in row i <
 * KVP_PEERS_MAX. */
int kvp_peers_get(const struct kvp_peers *p, uint32_t i, char text[KVP_PEERS_TEXT_MAX + 1], uint32_t *len);

/* kvp_peers_list calls fn(ctx, text, len) for every endpoint, in the order of their bytes, each once.
 * KVP_ERR_SYS without memory (nothing was called). */
int kvp_peers_list(
	const struct kvp_peers *p, void (*fn)(void *ctx, const char *text, uint32_t len), void *ctx);

/* kvp_peers_version changes after every change of the set. Acquire: load it before looking at the rows. */
uint64_t kvp_peers_version(const struct kvp_peers *p);

/* kvp_peers_sweep_owner frees what a dead process had claimed; returns the number of rows. */
uint32_t kvp_peers_sweep_owner(struct kvp_peers *p, kvp_owner dead);
#endif
