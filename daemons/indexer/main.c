/* daemons/indexer/main.c — kvpick-indexer: the apply thread's loop over commands, operations and timers. */
#include <errno.h>
#include <kvpick/clock.h>
#include <kvpick/err.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemons/common/apply_config.h"
#include "daemons/common/boot.h"
#include "daemons/common/config.h"
#include "daemons/indexer/ahead.h"
#include "daemons/indexer/dump.h"
#include "daemons/indexer/indexer.h"
#include "daemons/indexer/listener.h"
#include "shm/region.h"
#include "shm/sweep.h"

enum {
	OPS_PER_TURN = 256,   /* operations of one ring between two looks at the command ring */
	BLKS_PER_TURN = 8192, /* or blocks, whichever comes first */
	CMDS_PER_TURN = 64,
	LOOKS_PER_IDLE_TURN = 1024, /* upkeep of the tree: under a millisecond, merges included about two */
	LOOKS_PER_TURN = 16,
	ENDS_PER_TURN = 2048, /* blocks of bookings over their age: some tenths of a millisecond */
	SLEEP_MS = KVP_SLEEP_MAX_MS,
	TOUR_AGE_MAX = 60, /* looks of the gauges' timer: seconds */
};
#define RECOVERY_SPARE_MS 60000ull /* a peer daemon is restarted within that */
#define RECOVERY_MS_MAX 1000000000ull
#define EXPIRE_EVERY_S 60 /* or as often as the limit itself: then nothing counts twice as long */
#define LAPSES_A_LEASE 12 /* looks for leases that ran out */
#define GAUGES_EVERY_NS 1000000000ull
#define SLOW_TURN_NS 10000000ull
#define TTL_MAX_S 9e9

struct daemon {
	struct kvp_boot boot;
	struct kvp_idx idx;
	struct kvp_mark mark;
	struct kvp_memo memo;
	struct kvp_radix_w *radix;
	struct kvp_radix_w *predicted; /* NULL: no predictions beside KV events */
	struct kvp_idx_ahead ahead;
	struct kvp_idx_listeners *listeners;
	uint32_t thread_cnt, next_ring;
	int signal_fd;
	uint64_t seen_version;			/* of the catalogue */
	uint64_t expire_ns, lapse_ns, gauges_ns, beat_ns; /* next times */
};

static void wake_self(void *ctx)
{
	struct daemon *d = ctx;
	kvp_wake(&d->boot, d->boot.slot);
}

static void listener_failed(void *ctx, const char *text)
{
	struct daemon *d = ctx;
	kvp_boot_error(&d->boot, KVP_ERR_SYS, "listener", __LINE__, text);
}

/* -- start -- */

/* The tree of predictions: what fails its check is forgotten, it would have ended soon. */
static int open_predicted(struct daemon *d, uint8_t *priv)
{
	struct kvp_region *r = d->boot.region;
	struct kvp_geom g;
	if (!kvp_region_predicted_geom(&r->geom, &g))
		return KVP_OK;
	void *pub = (void *)(uintptr_t)r->predicted.base;
	int rc = kvp_radix_w_open(pub, priv, &g, KVP_RADIX_RECOVER, NULL, &d->predicted, NULL);
	if (rc == KVP_ERR_CORRUPT) {
		KVP_LOG_W("indexer.predicted", "state=corrupt action=emptied");
		rc = kvp_radix_w_open(pub, priv, &g, KVP_RADIX_RESET, NULL, &d->predicted, NULL);
	}
	return rc;
}

static int open_tree(struct daemon *d)
{
	struct kvp_region *r = d->boot.region;
	struct kvp_boot_index x;
	struct kvp_radix_report rep = {.runs = 0};
	struct stat st;
	kvp_boot_index_layout(&r->geom, &x);
	if (fstat(d->boot.index_fd, &st) || (uint64_t)st.st_size < x.bytes)
		return KVP_ERR_LAYOUT;
	uint8_t *mem =
		mmap(NULL, x.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, d->boot.index_fd, 0);
	if (mem == MAP_FAILED)
		return KVP_ERR_SYS;
	int rc = kvp_mark_join(mem + x.mark_off, &r->geom, &d->mark);
	rc = rc ? rc : kvp_memo_join(mem + x.memo_off, &r->geom, &d->memo);
	if (rc == KVP_ERR_CORRUPT) {
		KVP_LOG_W("indexer.memo", "state=corrupt action=emptied");
		kvp_boot_error(&d->boot, rc, "indexer", __LINE__,
			"listeners' memory failed its check and was emptied");
		rc = KVP_OK;
	}
	if (rc)
		return rc;
	/* The region is mapped writable in this role; the reader's handle only says so by its type. */
	void *pub = (void *)(uintptr_t)r->radix.base;
	rc = kvp_radix_w_open(
		pub, mem + x.radix_off, &r->geom, KVP_RADIX_RECOVER, d->boot.ctr, &d->radix, &rep);
	if (rc == KVP_ERR_CORRUPT) {
		KVP_LOG_W("indexer.tree", "state=corrupt action=emptied");
		kvp_boot_error(&d->boot, rc, "indexer", __LINE__, "tree failed its check and was emptied");
		for (uint32_t i = 0; i < r->geom.rank_max; i++) {
			uint32_t gen = kvp_cat_rank_gen(&r->cat, i);
			kvp_mark_reset(&d->mark, i, (gen & 1) ? gen : 0); /* everything is to be replayed */
			kvp_memo_clear(&d->memo, i);
		}
		kvp_recov_refill(&r->recov, kvp_clock_mono_ns()); /* from a peer, if there is one to ask */
		rc = kvp_radix_w_open(
			pub, mem + x.radix_off, &r->geom, KVP_RADIX_RESET, d->boot.ctr, &d->radix, &rep);
	}
	if (!rc)
		KVP_LOG_I("indexer.tree", "runs=%llu blocks=%llu dropped=%llu repeated=%llu ms=%llu",
			(unsigned long long)rep.runs, (unsigned long long)rep.blocks,
			(unsigned long long)rep.runs_dropped, (unsigned long long)rep.ops_repeated,
			(unsigned long long)(rep.duration_ns / 1000000));
	return rc ? rc : open_predicted(d, mem + x.predicted_off);
}

/* Without KV events bookings feed the tree; with them and a time to live for predictions, a tree beside
 * it. */
static int open_routed(struct daemon *d)
{
	const struct kvp_config *c = d->boot.config;
	const struct kvp_geom *g = &d->boot.region->geom;
	double ttl_s = c->use_kv_events ? c->predicted_ttl_secs : c->ttl_secs;
	struct kvp_routed_cfg cfg = {.ttl_ns = ttl_s < TTL_MAX_S ? (uint64_t)(ttl_s * 1e9) : UINT64_MAX,
		.entry_max = g->block_max,
		.slot_max = g->index_rank_max,
		.salt = g->salt[0] ^ g->salt[1],
		.ctr = d->boot.ctr};
	if (!c->use_kv_events && c->approximate_cache_policy == KVP_APPROX_LRU)
		cfg.policy = KVP_ROUTED_LRU;
	if (c->use_kv_events && !d->predicted)
		return KVP_OK;
	return kvp_idx_routed_open(&d->idx, c->use_kv_events ? d->predicted : d->radix, &cfg);
}

static int open_signals(struct daemon *d)
{
	sigset_t set;
	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGINT);
	if (sigprocmask(SIG_BLOCK, &set, NULL)) /* before threads exist: they inherit it */
		return KVP_ERR_SYS;
	d->signal_fd = signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC);
	return d->signal_fd < 0 ? KVP_ERR_SYS : KVP_OK;
}

/* A list of peers comes to its end, and whoever asks them answers in time. Peers that are yet to be found are
 * waited for. */
static uint64_t patience_ns(const struct kvp_config *c)
{
	uint64_t ms = c->recovery_http_timeout_ms;
	if (!c->indexer_peers[0])
		return 0;
	return (ms < RECOVERY_MS_MAX ? 2 * ms + RECOVERY_SPARE_MS : RECOVERY_MS_MAX) * 1000000;
}

static int open_all(struct daemon *d)
{
	struct kvp_region *r = d->boot.region;
	const struct kvp_config *c = d->boot.config;
	struct kvp_idx_cfg cfg = {
		.queueing = c->eff.queueing_on ? KVP_WREC_QUEUEING_ON : KVP_WREC_QUEUEING_OFF,
		.events = c->use_kv_events ? KVP_WREC_EVENTS_ON : KVP_WREC_EVENTS_OFF};
	kvp_boot_files(); /* each subscription costs several */
	int rc = open_signals(d);
	rc = rc ? rc : open_tree(d);
	if (!rc &&
		kvp_idx_ahead_open(&d->ahead, d->radix,
			c->huge_pages == KVP_HUGE_TRY ? KVP_RADIX_HUGE_TRY : KVP_RADIX_HUGE_OFF, d->boot.ctr))
		KVP_LOG_W("indexer.ahead", "state=off errno=%d", errno);
	rc = rc ? rc : kvp_idx_open(&d->idx, &r->cat, d->radix, &r->book, &d->mark, d->boot.ctr, &cfg);
	if (!rc && cfg.events == KVP_WREC_EVENTS_ON) {
		d->thread_cnt = c->eff.threads ? c->eff.threads : 1;
		struct kvp_idx_listeners_cfg lc = {.threads = d->thread_cnt,
			.gate = kvp_recov_is_active(&r->recov) ? KVP_IDX_GATE_SHUT : KVP_IDX_GATE_OPEN,
			.ctr = d->boot.ctr,
			.wake = wake_self,
			.failed = listener_failed,
			.ctx = d,
			.rcvhwm = c->kv_recv_hwm ? (int)c->kv_recv_hwm : -1,
			.stall_ms = (uint32_t)c->kv_replay_timeout_ms,
			.cooldown_ms = c->kv_replay_cooldown_ms ? (uint32_t)c->kv_replay_cooldown_ms
								: KVP_ZMQ_NO_COOLDOWN,
			.payload_max = c->kv_max_payload_bytes,
			.loss = c->kv_clear_on_loss ? KVP_ZMQ_LOSS_CLEAR : KVP_ZMQ_LOSS_KEEP,
			.placeholder = kvp_placeholder_from_config(c)};
		rc = kvp_idx_listeners_open(&lc, &d->listeners);
		d->idx.listeners = d->listeners;
	}
	d->idx.memo = &d->memo;
	rc = rc ? rc : open_routed(d);
	rc = rc ? rc : kvp_idx_recovery_open(
			  &d->idx, &r->recov, r->geom.block_max, patience_ns(c), kvp_clock_mono_ns());
	if (!rc)
		kvp_idx_unmatched_begin(&d->idx, &r->hits);
	rc = rc ? rc : kvp_idx_recover(&d->idx);
	if (rc)
		return rc;
	kvp_queue_attach(&r->queue, d->boot.owner, d->boot.slots, d->boot.ctr);
	uint64_t routed = kvp_idx_routed_recover(&d->idx);
	kvp_radix_w_set_ready(d->radix, 1);
	if (d->predicted)
		kvp_radix_w_set_ready(d->predicted, 1);
	uint32_t again = kvp_cmd_attach(&r->cmd, d->boot.owner);
	KVP_LOG_I("indexer.started",
		"workers=%u ranks=%u partitions=%u threads=%u commands_again=%u routed_blocks=%llu",
		d->idx.cat.worker_cnt, d->idx.cat.rank_cnt, kvp_cat_part_cnt(&r->cat), d->thread_cnt, again,
		(unsigned long long)routed);
	return KVP_OK;
}

/* -- work -- */

static void command(struct daemon *d, struct kvp_cmd_cell *c)
{
	struct kvp_cmdring *ring = &d->boot.region->cmd;
	struct kvp_idx *idx = &d->idx;
	char *buf = kvp_cmd_buffer(ring, c);
	uint32_t len;
	int status;
	switch (c->type) {
	case KVP_CMD_PING:
		kvp_cmd_reply(ring, c, KVP_OK, c->len);
		return;
	case KVP_CMD_ROUTED: {
		struct kvp_cmd_routed routed;
		memcpy(&routed, c->arg, sizeof(routed));
		kvp_idx_routed(
			idx, &routed, (const uint64_t *)(const void *)buf, c->len, kvp_clock_mono_ns());
		kvp_cmd_reply(ring, c, KVP_OK, 0);
		return;
	}
	case KVP_CMD_WORKER_POST:
		if (c->arg[0] >= KVP_PART_ROLE_CNT || c->arg[1] > KVP_CMD_BY_API) {
			kvp_cmd_reply(ring, c, KVP_ERR_INVAL, 0);
			return;
		}
		status = kvp_idx_worker_post(idx, (enum kvp_part_role)c->arg[0],
			(enum kvp_cmd_post_by)c->arg[1], buf, c->len);
		break;
	case KVP_CMD_WORKER_PATCH:
		status = kvp_idx_worker_patch(idx, c->worker_id, buf, c->len);
		break;
	case KVP_CMD_WORKER_DELETE:
		status = kvp_idx_worker_delete(idx, c->worker_id);
		break;
	case KVP_CMD_RECOV_BEGIN:
		status = kvp_idx_recovery_begin(idx, c, buf, &len, kvp_clock_mono_ns());
		kvp_cmd_reply(ring, c, status, len);
		return;
	case KVP_CMD_RECOV_PUT:
		status = kvp_idx_recovery_put(idx, c, buf, &len, kvp_clock_mono_ns());
		kvp_cmd_reply(ring, c, status, len);
		return;
	case KVP_CMD_RECOV_END:
		status = kvp_idx_recovery_end(idx, c, kvp_clock_mono_ns());
		kvp_cmd_reply(ring, c, status, 0);
		return;
	case KVP_CMD_DUMP:
		status = kvp_idx_dump(idx, c, buf, &len);
		kvp_cmd_reply(ring, c, status, len);
		return;
	case KVP_CMD_NAMES:
		status = kvp_idx_names(idx, c, buf, &len);
		kvp_cmd_reply(ring, c, status, len);
		return;
	default:
		kvp_boot_error(&d->boot, KVP_ERR_PROTO, "indexer", __LINE__, "command of an unknown type");
		kvp_cmd_reply(ring, c, KVP_ERR_PROTO, 0);
		return;
	}
	kvp_ctr_add(d->boot.ctr, KVP_CTR_IDX_CMD_DONE, 1);
	if (kvp_jw_done(&idx->jw) || idx->jw.len > KVP_CMD_PAYLOAD_MAX) {
		kvp_cmd_reply(ring, c, KVP_ERR_SYS, 0);
		return;
	}
	memcpy(buf, idx->jw.buf, idx->jw.len);
	kvp_cmd_reply(ring, c, status, (uint32_t)idx->jw.len);
}

static uint32_t commands(struct daemon *d)
{
	struct kvp_cmd_cell *c;
	uint32_t n = 0;
	while (n < CMDS_PER_TURN && kvp_cmd_next(&d->boot.region->cmd, &c) == KVP_OK) {
		command(d, c);
		n++;
	}
	return n;
}

/* A few operations of each ring in turn, so that no thread waits for another one's flood. */
static uint32_t operations(struct daemon *d)
{
	uint32_t done = 0;
	for (uint32_t i = 0; i < d->thread_cnt; i++) {
		struct kvp_idx_ring *ring =
			kvp_idx_listeners_ring(d->listeners, (d->next_ring + i) % d->thread_cnt);
		const struct kvp_idx_msg *m;
		uint32_t n = 0, blk = 0;
		for (; n < OPS_PER_TURN && blk < BLKS_PER_TURN && (m = kvp_idx_ring_peek(ring));
			n++, done++) {
			uint64_t now = m->op == KVP_IDX_MARK ? kvp_clock_mono_ns() : 0;
			if (kvp_idx_apply(&d->idx, m, now) == KVP_ERR_AGAIN) {
				done++;
				break;
			}
			blk += m->n;
			kvp_idx_ring_consume(ring, m);
		}
	}
	d->next_ring++;
	return done;
}

static int has_operations(struct daemon *d)
{
	for (uint32_t i = 0; i < d->thread_cnt; i++)
		if (kvp_idx_ring_peek(kvp_idx_listeners_ring(d->listeners, i)))
			return 1;
	return 0;
}

static uint64_t expire_every_ns(const struct kvp_config *c)
{
	uint64_t limit_s = c->active_request_expiry_secs;
	return (limit_s < EXPIRE_EVERY_S ? limit_s : EXPIRE_EVERY_S) * 1000000000ull;
}

static void timers(struct daemon *d, uint64_t now)
{
	const struct kvp_config *c = d->boot.config;
	if (now >= d->beat_ns) {
		kvp_slot_beat(d->boot.slots, d->boot.slot, now / 1000000);
		d->beat_ns = now + SLEEP_MS * 1000000ull;
	}
	if (now >= d->gauges_ns) {
		kvp_idx_gauges(&d->idx);
		kvp_idx_unmatched(&d->idx);
		kvp_radix_tour_age(d->radix, TOUR_AGE_MAX);
		d->gauges_ns = now + GAUGES_EVERY_NS;
	}
	if (now >= d->expire_ns) {
		uint32_t n = kvp_resv_expire(
			&d->boot.region->book, now, c->active_request_expiry_secs * 1000000000ull);
		kvp_ctr_add(d->boot.ctr, KVP_CTR_IDX_EXPIRED, n);
		kvp_queue_nudge(&d->boot.region->queue); /* also the recheck of whoever was overlooked */
		d->expire_ns = now + expire_every_ns(c);
	}
	if (c->eff.epp_on && now >= d->lapse_ns) {
		uint64_t lease_ns = c->lease_secs * 1000000000ull;
		if (kvp_resv_lapse(&d->boot.region->book, now, lease_ns))
			kvp_queue_nudge(&d->boot.region->queue);
		d->lapse_ns = now + lease_ns / LAPSES_A_LEASE;
	}
}

/* Workers came, changed or went: whoever waits may have a rank now, or none to wait for. */
static void workers_changed(struct daemon *d)
{
	uint64_t now = kvp_cat_version(&d->boot.region->cat);
	if (now == d->seen_version)
		return;
	d->seen_version = now;
	kvp_queue_nudge(&d->boot.region->queue);
}

static void sleep_until_work(struct daemon *d)
{
	struct kvp_cmd_cell *c;
	struct pollfd fd[2] = {
		{.fd = d->boot.wake_fd, .events = POLLIN}, {.fd = d->signal_fd, .events = POLLIN}};
	kvp_slot_sleep(d->boot.slots);
	if (kvp_cmd_next(&d->boot.region->cmd, &c) == KVP_OK) {
		kvp_slot_awake(d->boot.slots);
		command(d, c);
		return;
	}
	if (!has_operations(d))
		poll(fd, 2, SLEEP_MS);
	kvp_slot_awake(d->boot.slots);
}

static void signals(struct daemon *d)
{
	struct signalfd_siginfo info;
	if (read(d->signal_fd, &info, sizeof(info)) != (ssize_t)sizeof(info) ||
		d->idx.state == KVP_IDX_STOPPING)
		return;
	d->idx.state = KVP_IDX_STOPPING;
	kvp_boot_control(&d->boot, KVP_CTL_DRAIN);
	KVP_LOG_I("indexer.stopping", "signal=%u", info.ssi_signo);
}

/* Ends when asked to and nothing is left to answer. */
static void run(struct daemon *d)
{
	uint64_t now = kvp_clock_mono_ns();
	d->expire_ns = now + expire_every_ns(d->boot.config);
	kvp_book_publish(&d->boot.region->book, &d->boot.region->lifecycle); /* leases that run out */
	while (d->idx.state != KVP_IDX_STOPPING) {
		uint64_t start = now;
		uint32_t done = commands(d);
		done += operations(d);
		if (d->idx.lost_cnt) {
			kvp_idx_clear_some(&d->idx, 1);
			done++;
		}
		done += kvp_idx_routed_tend(&d->idx, now, ENDS_PER_TURN);
		done += kvp_radix_w_tend(d->radix, done ? LOOKS_PER_TURN : LOOKS_PER_IDLE_TURN);
		if (done)
			kvp_idx_ahead_note(&d->ahead);
		timers(d, now);
		if (d->idx.recovery.gate)
			kvp_idx_recovery_tend(&d->idx, now, !has_operations(d));
		workers_changed(d);
		now = kvp_clock_mono_ns();
		kvp_ctr_max(d->boot.ctr, KVP_CTR_LOOP_MAX_NS, now - start);
		kvp_ctr_add(d->boot.ctr, KVP_CTR_LOOP_SLOW, now - start > SLOW_TURN_NS);
		signals(d);
		if (!done) {
			sleep_until_work(d);
			now = kvp_clock_mono_ns();
		}
	}
	commands(d);
}

int main(int argc, char **argv)
{
	static struct daemon d;
	if (argc == 2 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "--version") == 0)) {
		if (argv[1][2] == 'v')
			kvp_config_print_version(stdout, KVP_BIN_INDEXER);
		else
			kvp_config_print_help(stdout, KVP_BIN_INDEXER);
		return KVP_EXIT_OK;
	}
	int rc = kvp_boot_child(argc, argv, KVP_ROLE_INDEXER, &d.boot);
	if (rc)
		return kvp_boot_exit(rc);
	kvp_config_log_setup(d.boot.config, "indexer", -1);
	rc = open_all(&d);
	if (rc) {
		KVP_LOG_E("indexer.start", "error=%s errno=%d", kvp_strerror(rc), errno);
		if (rc == KVP_ERR_CORRUPT)
			kvp_boot_control(&d.boot, KVP_CTL_FAIL);
		return kvp_boot_exit(rc);
	}
	kvp_boot_control(&d.boot, KVP_CTL_RUN);
	run(&d);
	if (d.listeners)
		kvp_idx_listeners_close(d.listeners);
	kvp_idx_ahead_close(&d.ahead);
	kvp_boot_control(&d.boot, KVP_CTL_HALT);
	return KVP_EXIT_OK;
}
