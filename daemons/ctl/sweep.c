#include "daemons/ctl/ctl.h"

#include "daemons/common/log.h"
#include <stdlib.h>
#include <string.h>

#define TRIES 100 /* of a sweep that others keep from finishing; each is a few milliseconds */
#define LOST_MAX 8

static int slot_arg(int argc, char **argv, uint32_t *slot)
{
	const char *v = NULL;
	for (int i = 1; i < argc; i++) {
		if (strcmp(argv[i], "--slot") == 0)
			v = argv[i + 1];
		else if (strncmp(argv[i], "--slot=", 7) == 0)
			v = argv[i] + 7;
	}
	char *end = NULL;
	unsigned long n = v ? strtoul(v, &end, 10) : 0;
	if (!v || !*v || *end || n >= KVP_SLOT_MAX)
		return KVP_ERR_INVAL;
	*slot = (uint32_t)n;
	return KVP_OK;
}

static int lost_args(int argc, char **argv, kvp_owner *lost)
{
	int cnt = 0;
	for (int i = 1; i + 1 < argc; i++)
		if (strcmp(argv[i], "--lost") == 0 && cnt < LOST_MAX)
			lost[cnt++] = (kvp_owner)strtoul(argv[i + 1], NULL, 10);
	return cnt;
}

/* sweep_owner gives back what one dead process held. */
static int sweep_owner(struct kvp_boot *boot, kvp_owner dead)
{
	struct kvp_region *r = boot->region;
	struct kvp_sweep_result res;
	memset(&res, 0, sizeof(res));
	kvp_book_publish(&r->book, &r->lifecycle); /* what the dead held ends for the replicas, too */
	int rc = KVP_ERR_AGAIN;
	for (int i = 0; i < TRIES && rc == KVP_ERR_AGAIN; i++)
		rc = kvp_book_sweep_owner(&r->book, dead, NULL, NULL, &res);
	struct kvp_queue_sweep waiting;
	kvp_queue_attach(&r->queue, boot->owner, boot->slots, boot->ctr);
	kvp_queue_sweep_owner(&r->queue, &r->book, dead, &waiting);
	uint32_t cells = kvp_cmd_sweep_owner(&r->cmd, dead);
	uint32_t records = kvp_errlog_sweep_owner(&r->errlog, dead);
	kvp_pending_attach(&r->pending, boot->owner, boot->ctr);
	uint32_t kept = kvp_pending_sweep_owner(&r->pending, dead);
	uint32_t share = kvp_quota_sweep_owner(&r->quota, dead);
	uint32_t sessions = kvp_affinity_sweep_owner(&r->affinity, dead), waiter;
	uint32_t peers = kvp_peers_sweep_owner(&r->peers, dead) +
			 kvp_peers_sweep_owner(&r->sources, dead);
	while (kvp_affinity_waiting(&r->affinity, &waiter))
		kvp_slot_wake(boot->slots, waiter);
	KVP_LOG_I("sweep.done",
		"slot=%u rc=%d claims=%u finished=%u undone=%u freed=%u kept=%u ranks=%u chunks=%u "
		"commands=%u errors=%u selections=%u waiting=%u put_back=%u sessions=%u peers=%u "
		"quota=%u",
		KVP_OWNER_SLOT(dead), rc, res.claim_cnt, res.finish_cnt, res.undo_cnt, res.free_cnt,
		res.kept_cnt, res.rank_cnt, res.chunk_cnt, cells, records, kept, waiting.freed_cnt,
		waiting.back_cnt, sessions, peers, share);
	return rc;
}

/* ctl_sweep gives back what the dead process of a slot held, and what killed helpers before this one held
 * (they had its slot, and its work). Started by the supervisor, one at a time, between reaping and releasing
 * the slot. */
int ctl_sweep(int argc, char **argv)
{
	uint32_t slot;
	kvp_owner lost[LOST_MAX];
	static struct kvp_boot boot;
	if (slot_arg(argc, argv, &slot)) {
		fputs("kvpickctl: sweep needs --slot I\n", stderr);
		return KVP_EXIT_CONFIG;
	}
	int lost_cnt = lost_args(argc, argv, lost);
	int rc = kvp_boot_child(argc, argv, KVP_ROLE_CTL, &boot);
	if (rc)
		return kvp_boot_exit(rc);
	kvp_boot_control(&boot, KVP_CTL_RUN);
	kvp_owner dead = kvp_slot_owner(boot.slots, slot);
	if (dead == boot.owner || (dead && kvp_slot_alive(boot.lock_fd, slot) != 0)) {
		KVP_LOG_E("sweep.refused", "slot=%u reason=alive", slot);
		return KVP_EXIT_AGAIN;
	}
	rc = dead ? sweep_owner(&boot, dead) : KVP_OK;
	for (int i = 0; i < lost_cnt && rc == KVP_OK; i++)
		if (lost[i] != boot.owner && KVP_OWNER_SLOT(lost[i]) == boot.slot)
			rc = sweep_owner(&boot, lost[i]);
	if (rc) {
		kvp_boot_error(&boot, rc, "ctl.sweep", __LINE__,
			"the bookings of a dead process could not be swept");
		return KVP_EXIT_CORRUPT;
	}
	return KVP_EXIT_OK;
}
