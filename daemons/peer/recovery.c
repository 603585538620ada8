/* daemons/peer/recovery.c — attempts: from an address to commands for the indexer. */
#include "daemons/peer/recovery.h"

#include <errno.h>
#include <inttypes.h>
#include <kvpick/clock.h>
#include <kvpick/err.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>

#include "daemons/common/config.h"
#include "daemons/common/log.h"
#include "daemons/peer/recovery_drive.h"
#include "daemons/peer/recovery_put.h"
#include "ipc/http_client.h"
#include "ipc/resolve.h"
#include "shm/region.h"

#define TICK_NS 20000000ull		  /* between looks while something is under way */
#define IDLE_NS 1000000000ull		  /* between looks at the set while nothing is */
#define SETTLE_STEP_NS 50000000ull	  /* between looks at the listeners */
#define ANSWER_NS (60ull * 1000000000ull) /* for the indexer's answers; it is restarted well before */
#define GATE_NS (20ull * 1000000000ull)	  /* from the end to the open gate: the listeners catch up */
#define AGAIN_MAX 5			  /* attempts with one peer for an indexer that was restarted */
#define PATH_MAX_BYTES 1280

enum at {
	AT_CHOICE,  /* nothing under way: ask the drive */
	AT_BEGIN,   /* the indexer notes the listeners */
	AT_RESOLVE, /* the peer's name is being looked up */
	AT_FETCH,   /* an exchange is under way */
	AT_DRAIN,   /* it has ended well; the indexer still works */
	AT_END,	    /* the end is posted */
	AT_GATE,    /* until the gate opens */
	AT_REST
};

struct kvp_recovery {
	struct kvp_boot *boot;
	struct kvp_loop *loop;
	struct kvp_timer tick;
	struct kvp_recovery_hooks hooks;
	struct kvp_drive drive;
	uint64_t seen_sources; /* version of the table of sources */
	uint64_t round_ns;     /* when the recovery began that this is about */
	enum at at;
	int is_polling; /* a callback came from inside the poll */
	/* attempt */
	char url[KVP_DRIVE_URL_MAX];
	struct kvp_http_url to;
	char host[KVP_RESOLVE_TEXT]; /* its address */
	struct kvp_resolve *name;
	uint64_t number, begun_ns, deadline_ns, since_ns, settle_ns, look_ns;
	uint32_t settled; /* times in a row that all listeners were connected */
	uint32_t again;
	struct kvp_cmd_cell *cell; /* begin or end */
	struct kvp_put put;
	/* exchange */
	struct kvp_http_client *http;
	struct kvp_http_call *call;
	struct kvp_dread *read;
	uint32_t role; /* being fetched */
	int is_paused, has_failed;
	uint64_t bytes;
	char why[300];
};

static void tick_at(struct kvp_recovery *r, uint64_t ns);

/* ---- the roles that this node keeps ---- */

static const char *const role_name[KVP_PART_ROLE_CNT] = {
	[KVP_PART_AGGREGATED] = "aggregated", [KVP_PART_PREFILL] = "prefill", [KVP_PART_DECODE] = "decode"};

static int wants_role(const struct kvp_recovery *r, uint32_t role)
{
	const struct kvp_config_derived *eff = &r->boot->config->eff;
	return role == KVP_PART_AGGREGATED ? !eff->disaggregated || eff->selection_on : eff->disaggregated;
}

static uint32_t next_role(const struct kvp_recovery *r, uint32_t from)
{
	while (from < KVP_PART_ROLE_CNT && !wants_role(r, from))
		from++;
	return from;
}

/* ---- an attempt's end ---- */

static void exchange_drop(struct kvp_recovery *r)
{
	if (r->call)
		kvp_http_call_cancel(r->call);
	r->call = NULL;
	kvp_dread_free(r->read);
	r->read = NULL;
	r->is_paused = 0;
}

static void attempt_drop(struct kvp_recovery *r)
{
	exchange_drop(r);
	kvp_resolve_close(r->name);
	r->name = NULL;
	if (r->cell)
		kvp_cmd_end(&r->boot->region->cmd, r->cell);
	r->cell = NULL;
	kvp_put_reset(&r->put, 0);
}

/* The peer failed; the next one. */
__attribute__((format(printf, 2, 3))) static void fail(struct kvp_recovery *r, const char *fmt, ...)
{
	char why[sizeof(r->why)];
	va_list ap;
	va_start(ap, fmt);
	vsnprintf(why, sizeof(why), fmt, ap);
	va_end(ap);
	KVP_LOG_W("recovery.peer_failed", "peer=%s reason=%s bytes=%" PRIu64 " ms=%" PRIu64, r->url, why,
		r->bytes, (kvp_loop_now_ns(r->loop) - r->begun_ns) / 1000000);
	kvp_ctr_add(r->boot->ctr, KVP_CTR_PEER_RECOV_FAILED, 1);
	attempt_drop(r);
	r->again = 0;
	kvp_drive_result(&r->drive, KVP_DRIVE_FAILED);
	r->at = AT_CHOICE;
}

static void rest(struct kvp_recovery *r)
{
	attempt_drop(r);
	if (r->drive.state == KVP_DRIVE_TRYING) {
		int is_from_it =
			r->at >= AT_END && kvp_recov_state(&r->boot->region->recov) == KVP_RECOV_RECOVERED;
		kvp_drive_result(&r->drive, KVP_DRIVE_SUCCEEDED);
		if (is_from_it && r->hooks.fetched)
			r->hooks.fetched(r->hooks.ctx, &r->to, r->host);
	}
	r->at = AT_REST;
	kvp_timer_cancel(r->loop, &r->tick);
	r->hooks.done(r->hooks.ctx);
}

static void begin(struct kvp_recovery *r);

/* What the indexer answered an order with, when it was not KVP_OK. */
static void refused(struct kvp_recovery *r, int rc)
{
	if (rc == KVP_ERR_CLOSED) { /* the recovery was ended elsewhere */
		attempt_drop(r);
		r->at = AT_GATE;
	} else if (rc == KVP_ERR_FENCED && r->again < AGAIN_MAX) {
		r->again++;
		KVP_LOG_N("recovery.again", "peer=%s reason=indexer_was_restarted", r->url);
		attempt_drop(r);
		begin(r);
	} else {
		fail(r, "the indexer refused the records: %s", kvp_strerror(rc));
	}
}

/* ---- exchange ---- */

static int on_part(void *ctx, const char *key, uint32_t key_len, uint32_t block_size)
{
	struct kvp_recovery *r = ctx;
	kvp_put_part(&r->put, r->role, key, key_len, block_size);
	return KVP_OK;
}

static int on_event(void *ctx, const struct kvp_dread_event *e)
{
	struct kvp_recovery *r = ctx;
	return kvp_put_event(&r->put, e);
}

/* A failure seen inside a callback of the client is acted on by the next poll. */
__attribute__((format(printf, 2, 3))) static void note(struct kvp_recovery *r, const char *fmt, ...)
{
	va_list ap;
	va_start(ap, fmt);
	if (!r->has_failed)
		vsnprintf(r->why, sizeof(r->why), fmt, ap);
	va_end(ap);
	r->has_failed = 1;
	tick_at(r, kvp_loop_now_ns(r->loop));
}

static int field_is(const char *v, uint32_t len, const char *want)
{
	return v && strlen(want) == len && strncasecmp(v, want, len) == 0;
}

/* Whether the answer may be a dump of the role. */
static void check_head(struct kvp_recovery *r, struct kvp_http_call *c, int status)
{
	uint32_t len;
	uint64_t max = r->boot->config->recovery_max_dump_bytes, announced = 0;
	if (status < 200 || status > 299) {
		note(r, "status %d", status);
		return;
	}
	const char *v = kvp_http_call_header(c, "content-length", &len);
	for (uint32_t i = 0; v && i < len && v[i] >= '0' && v[i] <= '9' && announced < UINT64_MAX / 16; i++)
		announced = announced * 10 + (uint64_t)(v[i] - '0');
	if (max && announced > max)
		note(r, "peer dump is too large: %" PRIu64 " bytes announced, limit %" PRIu64, announced,
			max);
	v = kvp_http_call_header(c, "content-encoding", &len);
	if (v && !field_is(v, len, "identity"))
		note(r, "content encoding %.*s was not asked for", (int)(len < 40 ? len : 40), v);
	v = kvp_http_call_header(c, "content-type", &len);
	if (v && (len < 16 || strncasecmp(v, "application/json", 16) != 0))
		note(r, "content type %.*s", (int)(len < 60 ? len : 60), v);
	v = kvp_http_call_header(c, "x-kvpick-dump-role", &len);
	if (v ? !field_is(v, len, role_name[r->role]) : r->role != KVP_PART_AGGREGATED)
		note(r, "dump of role %.*s, asked for %s", (int)(v ? (len < 40 ? len : 40) : 4),
			v ? v : "none", role_name[r->role]);
}

static void on_head(void *ctx, struct kvp_http_call *c, int status)
{
	check_head(ctx, c, status);
}

static void on_body(void *ctx, struct kvp_http_call *c, const char *data, uint64_t len)
{
	struct kvp_recovery *r = ctx;
	if (r->has_failed)
		return;
	r->bytes += len;
	if (kvp_dread_feed(r->read, data, len))
		note(r, "%s", kvp_dread_error(r->read));
	if (!r->is_paused && r->put.waiting_bytes > KVP_RECOVERY_AHEAD_BYTES) {
		r->is_paused = 1;
		kvp_http_call_pause(c);
	}
	if (!r->is_polling)
		tick_at(r, kvp_loop_now_ns(r->loop));
}

static void on_done(void *ctx, struct kvp_http_call *c, int status, int err)
{
	struct kvp_recovery *r = ctx;
	(void)c;
	(void)status;
	r->call = NULL;
	if (err == KVP_ERR_LIMIT)
		note(r, "peer dump is too large, or its head is");
	else if (err == KVP_ERR_TIMEOUT)
		note(r, "no whole answer within %" PRIu64 " ms", r->boot->config->recovery_http_timeout_ms);
	else if (err == KVP_ERR_SYS)
		note(r, "no connection: %s", strerror(errno));
	else if (err)
		note(r, "exchange: %s",
			err == KVP_ERR_CLOSED ? "the connection ended early" : kvp_strerror(err));
	else if (!r->has_failed && kvp_dread_end(r->read))
		note(r, "%s", kvp_dread_error(r->read));
	if (!r->has_failed)
		r->at = AT_DRAIN;
	tick_at(r, kvp_loop_now_ns(r->loop));
}

static void fetch(struct kvp_recovery *r, const char *host)
{
	const struct kvp_config *cfg = r->boot->config;
	struct kvp_dread_cfg dc = {on_part, on_event, r};
	char path[PATH_MAX_BYTES], size[64] = "";
	const char *sep = "?";
	if (cfg->recovery_max_dump_bytes) {
		snprintf(size, sizeof(size), "?max_bytes=%" PRIu64, cfg->recovery_max_dump_bytes);
		sep = "&";
	}
	snprintf(path, sizeof(path), "%s/dump%s%s%s", r->to.base, size,
		r->role == KVP_PART_AGGREGATED ? "" : sep, r->role == KVP_PART_AGGREGATED ? "" : "role=");
	if (r->role != KVP_PART_AGGREGATED)
		snprintf(path + strlen(path), sizeof(path) - strlen(path), "%s", role_name[r->role]);
	exchange_drop(r);
	snprintf(r->host, sizeof(r->host), "%s", host);
	r->read = kvp_dread_new(&dc);
	struct kvp_http_call_cfg c = {.host = host,
		.port = r->to.port,
		.path = path,
		.authority = r->to.authority,
		.headers = "Accept: application/json\r\n",
		.timeout_ns = cfg->recovery_http_timeout_ms * 1000000,
		.body_max_bytes = cfg->recovery_max_dump_bytes,
		.on_head = on_head,
		.on_body = on_body,
		.on_done = on_done,
		.ctx = r};
	r->has_failed = 0;
	int rc = r->read ? kvp_http_call(r->http, &c, &r->call) : KVP_ERR_SYS;
	r->at = AT_FETCH;
	if (rc)
		fail(r, "no call could be made: %s", kvp_strerror(rc));
}

/* ---- commands of one cell ---- */

static int post(struct kvp_recovery *r, enum kvp_cmd_type type, uint64_t a, uint64_t b, uint64_t c)
{
	void *payload;
	struct kvp_cmdring *ring = &r->boot->region->cmd;
	if (kvp_cmd_begin(ring, r->boot->owner, &r->cell, &payload)) {
		r->cell = NULL;
		return 0;
	}
	r->cell->arg[0] = a;
	r->cell->arg[1] = b;
	r->cell->arg[2] = c;
	kvp_cmd_post(ring, r->cell, type, 0);
	r->since_ns = kvp_loop_now_ns(r->loop);
	return 1;
}

/* 1: *status and *begun (if it is an answer to that) are set and the cell is free again. */
static int answered(struct kvp_recovery *r, int *status, struct kvp_recov_begun *begun)
{
	struct kvp_cmdring *ring = &r->boot->region->cmd;
	if (!r->cell || !kvp_cmd_done(ring, r->cell))
		return 0;
	*status = r->cell->status;
	if (r->cell->reply_len == sizeof(*begun))
		memcpy(begun, kvp_cmd_buffer(ring, r->cell), sizeof(*begun));
	kvp_cmd_end(ring, r->cell);
	r->cell = NULL;
	return 1;
}

/* ---- steps: each 1 if something was done ---- */

static void begin(struct kvp_recovery *r)
{
	uint64_t now = kvp_loop_now_ns(r->loop);
	const char *why = kvp_http_url_parse(&r->to, r->url);
	r->number = 0;
	r->begun_ns = r->since_ns = now;
	r->settle_ns = now + KVP_RECOVERY_SETTLE_NS;
	r->look_ns = now;
	r->settled = 0;
	r->bytes = 0;
	r->has_failed = 0;
	r->at = AT_BEGIN;
	if (why || kvp_resolve_open(r->loop, r->to.host, 0, &r->name))
		fail(r, "address %s", why ? why : "cannot be looked up");
}

static void new_number(struct kvp_recovery *r)
{
	uint64_t n = 0;
	while (!n)
		if (getrandom(&n, sizeof(n), 0) != (ssize_t)sizeof(n))
			n = kvp_clock_mono_ns();
	r->number = n;
	kvp_put_reset(&r->put, n);
}

/* Until all listeners are connected, twice in a row so that their subscriptions have arrived, or it has been
 * waited for long enough. */
static int step_begin(struct kvp_recovery *r, uint64_t now)
{
	struct kvp_recov_begun b = {0, 0};
	int status;
	if (!r->cell && now >= r->look_ns) {
		if (!r->number)
			new_number(r);
		return post(r, KVP_CMD_RECOV_BEGIN, r->number, 0, 0);
	}
	if (!answered(r, &status, &b)) {
		if (r->cell && now - r->since_ns > ANSWER_NS)
			fail(r, "the indexer does not answer");
		return 0;
	}
	r->look_ns = now + (status == KVP_ERR_AGAIN ? 0 : SETTLE_STEP_NS);
	if (status == KVP_ERR_AGAIN)
		return 0; /* the same number again, at the next tick */
	if (status) {
		refused(r, status);
		return 1;
	}
	r->settled = b.connected >= b.listeners ? r->settled + 1 : 0;
	if (b.listeners && r->settled < 2 && now < r->settle_ns) {
		r->number = 0;
		return 1;
	}
	KVP_LOG_I("recovery.attempt", "peer=%s listeners=%u connected=%u", r->url, b.listeners, b.connected);
	r->role = next_role(r, 0);
	r->deadline_ns = now + r->boot->config->recovery_http_timeout_ms * 1000000;
	r->at = AT_RESOLVE;
	return 1;
}

static int step_resolve(struct kvp_recovery *r, uint64_t now)
{
	const char *host = kvp_resolve_next(r->name, now);
	if (host)
		fetch(r, host);
	else if (now >= r->deadline_ns)
		fail(r, "its name has no address");
	return host != NULL;
}

/* Records of the text go on to the indexer. */
static int step_fetch(struct kvp_recovery *r, uint64_t now)
{
	int any = 0, rc = kvp_put_poll(&r->put, &any);
	if (any)
		r->since_ns = now;
	if (r->has_failed)
		fail(r, "%s", r->why);
	else if (rc)
		refused(r, rc);
	else if (r->is_paused && r->put.waiting_bytes < KVP_RECOVERY_AHEAD_BYTES / 2) {
		r->is_paused = 0;
		if (r->call)
			kvp_http_call_resume(r->call);
	}
	return any;
}

static int step_drain(struct kvp_recovery *r, uint64_t now)
{
	int any = step_fetch(r, now);
	if (r->at != AT_DRAIN)
		return 1;
	if (!kvp_put_is_idle(&r->put)) {
		if (now - r->since_ns > ANSWER_NS)
			fail(r, "the indexer does not answer");
		return any;
	}
	r->role = next_role(r, r->role + 1);
	r->deadline_ns = now + r->boot->config->recovery_http_timeout_ms * 1000000;
	r->at = r->role < KVP_PART_ROLE_CNT ? AT_RESOLVE : AT_END;
	if (r->at == AT_END) {
		const struct kvp_recov_done *d = &r->put.done;
		uint64_t ms = (now - r->begun_ns) / 1000000;
		KVP_LOG_N("recovery.fetched",
			"peer=%s bytes=%" PRIu64 " stored=%" PRIu64 " held=%" PRIu64 " dropped=%" PRIu64
			" parentless=%" PRIu64 " skipped=%" PRIu64 " ms=%" PRIu64,
			r->url, r->bytes, d->stored, d->held, d->dropped, d->parent, d->skipped, ms);
		kvp_ctr_add(r->boot->ctr, KVP_CTR_PEER_RECOV_BYTES, r->bytes);
	}
	return 1;
}

static enum kvp_recov_state state_of(const struct kvp_recovery *r)
{
	switch (r->drive.state == KVP_DRIVE_ENDED ? r->drive.end : KVP_DRIVE_RECOVERED) {
	case KVP_DRIVE_EMPTY:
		return KVP_RECOV_EMPTY;
	case KVP_DRIVE_EXHAUSTED:
		return KVP_RECOV_EXHAUSTED;
	default:
		return KVP_RECOV_RECOVERED;
	}
}

static int step_end(struct kvp_recovery *r, uint64_t now)
{
	struct kvp_recov_begun b;
	int status;
	enum kvp_recov_state to = state_of(r);
	if (!r->cell)
		return post(r, KVP_CMD_RECOV_END, to == KVP_RECOV_RECOVERED ? r->number : 0, (uint64_t)to,
			r->drive.attempts);
	if (!answered(r, &status, &b)) {
		if (now - r->since_ns > ANSWER_NS) {
			kvp_cmd_end(&r->boot->region->cmd, r->cell);
			r->cell = NULL; /* and once more */
		}
		return 0;
	}
	if (status == KVP_ERR_FENCED) {
		refused(r, status);
		return 1;
	}
	if (status && status != KVP_ERR_CLOSED)
		KVP_LOG_E("recovery.end", "error=%s", kvp_strerror(status));
	r->since_ns = now;
	r->at = AT_GATE;
	return 1;
}

/* The gate opens when the listeners have caught up; an indexer that dies before has forgotten the end. */
static int step_gate(struct kvp_recovery *r, uint64_t now)
{
	if (now - r->since_ns < GATE_NS)
		return 0;
	KVP_LOG_W("recovery.gate", "reason=still_shut action=ask_again");
	if (state_of(r) == KVP_RECOV_RECOVERED)
		begin(r);
	else
		r->at = AT_END;
	return 1;
}

/* ---- choosing ---- */

struct names {
	const char *url[KVP_DRIVE_MAX];
	char *text;
	uint32_t cnt;
};

static void name_add(void *ctx, const char *text, uint32_t len)
{
	struct names *n = ctx;
	if (n->cnt == KVP_DRIVE_MAX || len >= KVP_DRIVE_URL_MAX)
		return;
	char *to = n->text + (uint64_t)n->cnt * KVP_DRIVE_URL_MAX;
	memcpy(to, text, len);
	to[len] = 0;
	n->url[n->cnt++] = to;
}

/* The set as discovery has it now; nothing before it was told completely for the first time. */
static void look_at_sources(struct kvp_recovery *r)
{
	struct kvp_region *g = r->boot->region;
	struct names n = {.cnt = 0};
	uint64_t version = kvp_peers_version(&g->sources);
	if (r->drive.kind != KVP_DRIVE_SET || !kvp_gate_is_open(&g->gates, KVP_GATE_PEERS) ||
		(r->drive.is_known && version == r->seen_sources))
		return;
	n.text = malloc((size_t)KVP_DRIVE_MAX * KVP_DRIVE_URL_MAX);
	if (!n.text || kvp_peers_list(&g->sources, name_add, &n)) {
		free(n.text);
		return; /* no memory: at the next look */
	}
	kvp_drive_peers(&r->drive, n.url, n.cnt);
	r->seen_sources = version;
	free(n.text);
}

static int list_given(struct kvp_recovery *r)
{
	struct names n = {.cnt = 0};
	char one[KVP_DRIVE_URL_MAX];
	size_t pos = 0;
	n.text = malloc((size_t)KVP_DRIVE_MAX * KVP_DRIVE_URL_MAX);
	if (!n.text)
		return KVP_ERR_SYS;
	while (kvp_config_list_next(r->boot->config->indexer_peers, &pos, one, sizeof(one)))
		name_add(&n, one, (uint32_t)strlen(one));
	kvp_drive_peers(&r->drive, n.url, n.cnt);
	free(n.text);
	return KVP_OK;
}

static int step_choice(struct kvp_recovery *r, uint64_t now)
{
	struct kvp_drive_step s = kvp_drive_next(&r->drive, now);
	switch (s.what) {
	case KVP_DRIVE_WAIT:
		return 0;
	case KVP_DRIVE_ATTEMPT:
		snprintf(r->url, sizeof(r->url), "%s", s.url);
		kvp_ctr_add(r->boot->ctr, KVP_CTR_PEER_RECOV_ATTEMPTS, 1);
		begin(r);
		return 1;
	case KVP_DRIVE_EMPTY:
		KVP_LOG_W(
			"recovery.empty", "reason=no_peer_to_recover_from effect=begins_with_an_empty_index");
		break;
	case KVP_DRIVE_EXHAUSTED:
		KVP_LOG_W("recovery.exhausted", "attempts=%" PRIu64 " effect=begins_with_what_is_there",
			r->drive.attempts);
		break;
	default:
		break;
	}
	r->at = AT_END;
	return 1;
}

static int step(struct kvp_recovery *r, uint64_t now)
{
	switch (r->at) {
	case AT_CHOICE:
		return step_choice(r, now);
	case AT_BEGIN:
		return step_begin(r, now);
	case AT_RESOLVE:
		return step_resolve(r, now);
	case AT_FETCH:
		return step_fetch(r, now);
	case AT_DRAIN:
		return step_drain(r, now);
	case AT_END:
		return step_end(r, now);
	case AT_GATE:
		return step_gate(r, now);
	case AT_REST:
		break;
	}
	return 0;
}

/* From the beginning: the list once, or the set. */
static int start(struct kvp_recovery *r)
{
	uint64_t seed;
	if (getrandom(&seed, sizeof(seed), 0) != (ssize_t)sizeof(seed))
		seed = kvp_clock_real_ns();
	kvp_drive_init(&r->drive, r->boot->config->indexer_peers[0] ? KVP_DRIVE_LIST : KVP_DRIVE_SET, seed);
	r->at = AT_CHOICE;
	int rc = r->drive.kind == KVP_DRIVE_LIST ? list_given(r) : KVP_OK;
	if (rc)
		r->at = AT_REST;
	else
		tick_at(r, kvp_loop_now_ns(r->loop));
	return rc;
}

int kvp_recovery_poll(struct kvp_recovery *r)
{
	struct kvp_recov_info now;
	int any = 0, is_active = kvp_recov_is_active(&r->boot->region->recov);
	if (r->is_polling || (r->at == AT_REST && !is_active))
		return 0;
	kvp_recov_get(&r->boot->region->recov, &now);
	if (is_active &&
		now.begun_ns != r->round_ns) { /* another one than we know: begun since the last look */
		attempt_drop(r);
		r->at = AT_REST;
		r->round_ns = now.begun_ns;
	}
	if (!is_active) {
		rest(r);
		return 1;
	}
	if (r->at == AT_REST && start(r))
		return 0; /* no memory: at the next look */
	r->is_polling = 1;
	look_at_sources(r);
	while (step(r, kvp_clock_mono_ns()))
		any = 1;
	r->is_polling = 0;
	return any;
}

static void on_tick(void *ctx, struct kvp_timer *t)
{
	struct kvp_recovery *r = ctx;
	(void)t;
	kvp_recovery_poll(r);
	if (r->at != AT_REST)
		tick_at(r, kvp_loop_now_ns(r->loop) + TICK_NS);
}

static void tick_at(struct kvp_recovery *r, uint64_t ns)
{
	kvp_timer_set(r->loop, &r->tick, ns, on_tick, r);
}

int kvp_recovery_open(struct kvp_boot *boot, struct kvp_loop *loop, const struct kvp_recovery_hooks *hooks,
	struct kvp_recovery **out)
{
	struct kvp_recovery *r = calloc(1, sizeof(*r));
	struct kvp_http_client_cfg hc = {.conn_max = 2, .idle_max = 1};
	if (!r)
		return KVP_ERR_SYS;
	*r = (struct kvp_recovery){.boot = boot, .loop = loop, .hooks = *hooks};
	kvp_put_init(&r->put, &boot->region->cmd, boot->owner);
	int rc = kvp_http_client_open(loop, &hc, &r->http);
	rc = rc ? rc : start(r);
	if (rc) {
		kvp_recovery_close(r);
		return rc;
	}
	*out = r;
	return KVP_OK;
}

void kvp_recovery_close(struct kvp_recovery *r)
{
	if (!r)
		return;
	kvp_timer_cancel(r->loop, &r->tick);
	attempt_drop(r);
	kvp_http_client_close(r->http);
	free(r);
}
