/* daemons/discovery/catalog.h — the workers that ought to be registered, and what is done to make it so.
 *
 * Shape      entries by worker id: what is wanted (a WorkerRequest, JSON), what was told to the indexer,
 *            whether it is ours. Entries with something to do wait in one of two queues; at most
 *            KVP_CATALOG_WINDOW commands are under way. A pass lasts from the first of them until nothing is
 *            left to do.
 * Truth      the catalogue of the indexer; here only what this process asked for, and a hash of the record
 *            that came of it. Which ids are ours stands in a file beside the region's socket, written before
 *            the first command about them.
 * Writers    the process's one thread.
 * Ordering   a later wish replaces an earlier one at once, also while a command is under way.
 *            KVP_CATALOG_POST_FIRST: no worker is deleted before all wanted ones were posted.
 *            KVP_CATALOG_DELETE_FIRST: deletions overtake, for workers that nobody may be sent to any more.
 * Lifetime   kvp_catalog_open to kvp_catalog_close.
 * Crash      the next process reads the ids from the file (of the same region) and goes on; commands that
 *            were under way are executed or not, and are sent again.
 * Proved by  tests/t_catalog.c, tests/s_workers_file.t, tests/s_kube.t, tests/s_kube_roles.t (killed)
 */
#ifndef KVP_DISCOVERY_CATALOG_H
#define KVP_DISCOVERY_CATALOG_H

#include "ipc/json_in.h"
#include "shm/catalogue.h"
#include "shm/cmdring.h"

#define KVP_CATALOG_WINDOW 32
#define KVP_CATALOG_INCOMPLETE_TURN 6
#define KVP_CATALOG_RETRY_NS 5000000000ull /* after a pass in which a command failed */
#define KVP_CATALOG_REPLY_NS 30000000000ull

struct kvp_catalog_want {
	uint64_t worker_id;
	const char *json; /* WorkerRequest with this id; copied */
	uint32_t len;
	enum kvp_part_role role;
	uint64_t owner; /* whose worker it is: a hash of the pod's name; 0 where an id can be nobody else's */
};

enum kvp_catalog_order { KVP_CATALOG_POST_FIRST, KVP_CATALOG_DELETE_FIRST };

struct kvp_catalog_cfg {
	struct kvp_cmdring *ring;
	kvp_owner owner;
	const struct kvp_cat *cat; /* NULL: what was schedulable when it was posted is taken to be so still */
	/* file with the ids that are ours; NULL: none is kept; outlives the handle */
	const char *ids_path;
	uint64_t region_gen;
	enum kvp_catalog_order order;
};

struct kvp_catalog_stat {
	uint32_t wanted, schedulable; /* of the wanted ones, as told at their last post */
	uint32_t refused;	      /* wanted ones whose last post was refused */
	uint64_t passes, failed;      /* passes ended; those to be repeated */
	uint64_t posts, deletes;      /* commands sent */
	uint64_t strayed;	      /* records that somebody else had changed or removed */
};

struct kvp_catalog;

/* kvp_catalog_open: KVP_OK; KVP_ERR_SYS. Ids of an earlier process of the same region are ours again; they
 * are deleted when kvp_catalog_set does not name them. */
int kvp_catalog_open(struct kvp_catalog **out, const struct kvp_catalog_cfg *cfg);
void kvp_catalog_close(struct kvp_catalog *c);

/* kvp_catalog_set makes cnt workers the wanted ones. KVP_OK and a pass begins; KVP_ERR_EXISTS an id comes
 * twice, *twice says which, nothing has changed; KVP_ERR_LIMIT a body is longer than a command;
 * KVP_ERR_SYS. */
int kvp_catalog_set(
	struct kvp_catalog *c, const struct kvp_catalog_want *want, uint32_t cnt, uint64_t *twice);

/* kvp_catalog_put and kvp_catalog_drop change one worker of the picture; equal to what is wanted: nothing.
 * Somebody else's worker of that id stays: KVP_ERR_EXISTS. KVP_ERR_LIMIT, KVP_ERR_SYS. */
int kvp_catalog_put(struct kvp_catalog *c, const struct kvp_catalog_want *want);
void kvp_catalog_drop(struct kvp_catalog *c, uint64_t worker_id, uint64_t owner);

/* kvp_catalog_tend sends what is due and takes answers: after a wake-up of the process, and every beat.
 * refused: called for every post that the indexer refused. */
void kvp_catalog_tend(struct kvp_catalog *c, uint64_t now_ns,
	void (*refused)(void *ctx, uint64_t worker_id, int status, const char *text, size_t len), void *ctx);

/* kvp_catalog_compare looks whether the catalogue still has every wanted worker as it was registered, and as
 * schedulable; what is not so is posted again. Every KVP_CATALOG_INCOMPLETE_TURN-th call, from the first on,
 * so are those that were not schedulable when they were told. Costs a look at every record. Returns how many
 * had changed. */
uint32_t kvp_catalog_compare(struct kvp_catalog *c);

/* kvp_catalog_is_settled: 1 when a picture was set and its pass has ended, also with failures. */
int kvp_catalog_is_settled(const struct kvp_catalog *c);
/* kvp_catalog_is_set: 1 when a picture was set. kvp_catalog_is_flying: 1 while answers are waited for. */
int kvp_catalog_is_set(const struct kvp_catalog *c);
int kvp_catalog_is_flying(const struct kvp_catalog *c);
/* kvp_catalog_has_ids: 1 if an earlier process of this region had registered workers. */
int kvp_catalog_has_ids(const struct kvp_catalog *c);
void kvp_catalog_stat(const struct kvp_catalog *c, struct kvp_catalog_stat *out);
#endif
