/* daemons/peer/recovery_drive.h — which peer the index is recovered from, and when: no socket, no clock of
 * its own.
 *
 * Shape      two kinds. A list is tried once, in its order. A set (peers found by discovery) may change at
 *            any time: in each cycle every member is tried once, in an order that is drawn anew; then a
 *            back-off of 1 s, doubled up to 30 s, and the next cycle. Only another set ends the back-off
 *            early, and resets it. An empty set at the beginning of a cycle ends the recovery: begin empty.
 *            There is no limit of attempts.
 * Truth      this struct.
 * Writers    one thread.
 * Ordering   kvp_drive_next tells what to do; after ATTEMPT exactly one kvp_drive_result. A change of the set
 *            never ends an attempt.
 * Lifetime   the owner's.
 * Crash      gone with the process: the next one begins with its first cycle.
 * Proved by  tests/t_recovery_drive.c
 */
#ifndef KVP_PEER_RECOVERY_DRIVE_H
#define KVP_PEER_RECOVERY_DRIVE_H

#include <stdint.h>

#define KVP_DRIVE_MAX 256	/* peers; of a longer list or set the rest is not looked at */
#define KVP_DRIVE_URL_MAX 1025u /* bytes, final 0 included */
#define KVP_DRIVE_WAIT_MIN_NS 1000000000ull
#define KVP_DRIVE_WAIT_MAX_NS 30000000000ull

enum kvp_drive_kind { KVP_DRIVE_LIST, KVP_DRIVE_SET };
enum kvp_drive_do {
	KVP_DRIVE_WAIT,	     /* until until_ns (UINT64_MAX: for a set, or a result) */
	KVP_DRIVE_ATTEMPT,   /* url */
	KVP_DRIVE_RECOVERED, /* the ends */
	KVP_DRIVE_EMPTY,
	KVP_DRIVE_EXHAUSTED
};

struct kvp_drive_step {
	enum kvp_drive_do what;
	const char *url; /* ATTEMPT; valid until the next call */
	uint64_t until_ns;
};

struct kvp_drive_peer {
	char url[KVP_DRIVE_URL_MAX];
	uint32_t is_eligible, is_tried; /* in the set now; tried in this cycle */
};
struct kvp_drive {
	enum kvp_drive_kind kind;
	int is_known; /* the list or the first set has been given */
	enum { KVP_DRIVE_IDLE, KVP_DRIVE_CYCLE, KVP_DRIVE_TRYING, KVP_DRIVE_BACK_OFF, KVP_DRIVE_ENDED } state;
	enum kvp_drive_do end;
	uint64_t rng, wait_ns, until_ns, attempts;
	uint32_t cnt, at;			   /* at: the one being tried */
	struct kvp_drive_peer peer[KVP_DRIVE_MAX]; /* in the order in which they are tried */
};

/* kvp_drive_init: seed any number. */
void kvp_drive_init(struct kvp_drive *d, enum kvp_drive_kind kind, uint64_t seed);
/* kvp_drive_peers gives the list, once, or the set as it is now (in any order, each once), as often as one
 * likes. Longer texts than KVP_DRIVE_URL_MAX are left out. */
void kvp_drive_peers(struct kvp_drive *d, const char *const *url, uint32_t cnt);
/* kvp_drive_next: what to do at now_ns. The same answer until something happens. */
struct kvp_drive_step kvp_drive_next(struct kvp_drive *d, uint64_t now_ns);
enum kvp_drive_outcome { KVP_DRIVE_FAILED, KVP_DRIVE_SUCCEEDED };
void kvp_drive_result(struct kvp_drive *d, enum kvp_drive_outcome how);
#endif
