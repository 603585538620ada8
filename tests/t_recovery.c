/* The fetching side of a recovery in one process: peers that the test plays over HTTP on the same loop, an
 * indexer that it plays on the command ring, and the table of sources as discovery would write it. */
#include "daemons/peer/recovery_drive.c"
#include "daemons/peer/recovery_put.c"

#include "daemons/peer/recovery.c"

#include "ipc/http_server.h"
#include "tests/tap.h"

#include <unistd.h>

#define OWNER KVP_OWNER(2, 1)
#define WAIT_NS 8000000000ull
#define BIG_BLOCKS 10000u

static struct kvp_region region;
static struct kvp_config config;
static struct kvp_boot boot;
static struct kvp_loop *loop;
static struct kvp_recovery *rec;
static struct kvp_http_server *server;

static struct world {
	/* the peers */
	char asked[64][128];
	uint32_t asked_cnt;
	struct kvp_http_req *held;
	/* the indexer */
	int is_deaf;	 /* answers nothing */
	int loses_index; /* 1: is emptied right after the end */
	int put_status;	 /* one answer to a put instead of KVP_OK */
	uint32_t begins, puts, recs, ends, role_recs[KVP_PART_ROLE_CNT];
	uint64_t number, end_number, end_state, end_peers, blocks, bad, waiting_max;
	uint64_t last[KVP_PART_ROLE_CNT]; /* last external hash of a chain */
	char key[64];
	/* the node */
	uint32_t done, fetched;
} w;

/* -- peers -- */

static const char store[] =
	"{\"m:g\":{\"block_size\":4,\"events\":[{\"worker_id\":1,\"event\":{\"event_id\":0,\"data\":"
	"{\"stored\":{\"parent_hash\":null,\"blocks\":[{\"block_hash\":1,\"tokens_hash\":1001},"
	"{\"block_hash\":2,\"tokens_hash\":1002}]}}}}]}}";

static void reply(struct kvp_http_req *r, int status, const char *extra, const char *text)
{
	kvp_http_reply_extra(r, status, "application/json", extra, text, strlen(text));
}

/* One event of many blocks, chained: block i has hash i + 1. */
static void reply_big(struct kvp_http_req *r)
{
	static char text[1 << 20];
	size_t n = (size_t)snprintf(text, sizeof(text),
		"{\"m:g\":{\"block_size\":4,\"events\":[{\"worker_id\":1,\"event\":{\"event_id\":0,\"data\":{"
		"\"stored\":{"
		"\"blocks\":[");
	for (uint32_t i = 0; i < BIG_BLOCKS; i++)
		n += (size_t)snprintf(text + n, sizeof(text) - n, "%s{\"block_hash\":%u,\"tokens_hash\":%u}",
			i ? "," : "", i + 1, i + 1001);
	snprintf(text + n, sizeof(text) - n, "]}}}}]}}");
	reply(r, 200, NULL, text);
}

/* Megabytes of small events. */
static void reply_many(struct kvp_http_req *r)
{
	static char text[1 << 20];
	size_t n = 0;
	kvp_http_reply_begin(r, 200, "application/json", NULL, NULL);
	kvp_http_reply_chunk(r, "{\"m:g\":{\"block_size\":4,\"events\":[", 33);
	for (uint32_t i = 0; i < 60000; i++) {
		n += (size_t)snprintf(text + n, sizeof(text) - n,
			"%s{\"worker_id\":1,\"event\":{\"event_id\":0,\"data\":{\"stored\":{\"parent_hash\":%"
			"s%.0u,\"blocks\":["
			"{\"block_hash\":%u,\"tokens_hash\":%u}]}}}}",
			i ? "," : "", i ? "" : "null", i, i + 1, i + 1001);
		if (n > sizeof(text) - 1000) {
			kvp_http_reply_chunk(r, text, n);
			n = 0;
		}
	}
	kvp_http_reply_chunk(r, text, n);
	kvp_http_reply_chunk(r, "]}}", 3);
	kvp_http_reply_end(r);
}

static void on_request(void *ctx, struct kvp_http_req *r)
{
	(void)ctx;
	if (w.asked_cnt < 64)
		snprintf(w.asked[w.asked_cnt++], 128, "%.*s?%.*s", (int)r->path_len, r->path,
			(int)r->query_len, r->query ? r->query : "");
	int prefill = r->query && memmem(r->query, r->query_len, "role=prefill", 12);
	if (!memcmp(r->path, "/good", 5))
		reply(r, 200, NULL, store);
	else if (!memcmp(r->path, "/held", 5))
		w.held = r;
	else if (!memcmp(r->path, "/role", 5))
		reply(r, 200, prefill ? "x-kvpick-dump-role: prefill\r\n" : "x-kvpick-dump-role: decode\r\n",
			store);
	else if (!memcmp(r->path, "/other", 6))
		reply(r, 200, prefill ? "x-kvpick-dump-role: decode\r\n" : "x-kvpick-dump-role: prefill\r\n",
			store);
	else if (!memcmp(r->path, "/big", 4))
		reply_big(r);
	else if (!memcmp(r->path, "/many", 5))
		reply_many(r);
	else
		reply(r, 503, NULL, "{}");
}

static const char *at(const char *kind)
{
	static char text[4][64];
	static int n;
	char *to = text[n++ % 4];
	snprintf(to, 64, "http://127.0.0.1:%u/%s", kvp_http_server_port(server), kind);
	return to;
}

/* -- the indexer -- */

static void take_records(struct kvp_cmd_cell *c)
{
	const uint8_t *p = kvp_cmd_buffer(&region.cmd, c);
	struct kvp_recov_head h;
	memcpy(&h, p, sizeof(h));
	w.bad += c->arg[0] != w.number || h.block_size != 4 || h.role >= KVP_PART_ROLE_CNT;
	snprintf(w.key, sizeof(w.key), "%.*s", (int)h.key_len, (const char *)p + sizeof(h));
	uint64_t off = sizeof(h) + KVP_RECOV_KEY_BYTES(h.key_len);
	for (uint32_t i = 0; i < h.rec_cnt && h.role < KVP_PART_ROLE_CNT; i++) {
		const struct kvp_recov_rec *r = (const void *)(p + off);
		const uint64_t *local = (const void *)(r + 1), *ext = local + r->n;
		uint64_t first = w.last[h.role];
		w.bad += r->worker_id != 1 || r->op != KVP_RECOV_STORE ||
			 (uint64_t)r->has_parent != (first != 0);
		w.bad += r->parent != first;
		for (uint32_t k = 0; k < r->n; k++)
			w.bad += ext[k] != first + k + 1 || local[k] != ext[k] + 1000;
		w.last[h.role] = first + r->n;
		w.blocks += r->n;
		w.recs++;
		w.role_recs[h.role]++;
		off += KVP_RECOV_REC_BYTES(r->op, r->n);
	}
	w.bad += off != c->len;
}

static void indexer(void)
{
	struct kvp_cmd_cell *c;
	while (!w.is_deaf && kvp_cmd_next(&region.cmd, &c) == KVP_OK) {
		struct kvp_recov_begun begun = {0, 0};
		int status = KVP_OK;
		uint32_t len = 0;
		if (c->type == KVP_CMD_RECOV_BEGIN) {
			w.begins++;
			w.number = c->arg[0];
			memset(w.last, 0, sizeof(w.last));
			memcpy(kvp_cmd_buffer(&region.cmd, c), &begun, sizeof(begun));
			len = sizeof(begun);
		} else if (c->type == KVP_CMD_RECOV_PUT) {
			w.puts++;
			status = w.put_status;
			w.put_status = KVP_OK;
			if (!status)
				take_records(c);
		} else {
			w.ends++;
			w.end_number = c->arg[0];
			w.end_state = c->arg[1];
			w.end_peers = c->arg[2];
			kvp_recov_end(&region.recov, (enum kvp_recov_state)c->arg[1], 9);
			if (w.loses_index && w.loses_index--)
				kvp_recov_refill(&region.recov, 10);
		}
		kvp_cmd_reply(&region.cmd, c, status, len);
	}
}

static void on_fetched(void *ctx, const struct kvp_http_url *from, const char *host)
{
	(void)ctx;
	w.fetched += strcmp(host, "127.0.0.1") == 0 && from->port == kvp_http_server_port(server) && !w.done;
}

static void on_finished(void *ctx)
{
	(void)ctx;
	w.done++;
}

static void turn(void)
{
	kvp_loop_run_once(loop, 2000000);
	kvp_recovery_poll(rec);
	if (rec->put.waiting_bytes > w.waiting_max)
		w.waiting_max = rec->put.waiting_bytes;
	indexer();
}

#define UNTIL(cond)                                                                                          \
	for (uint64_t until = kvp_clock_mono_ns() + WAIT_NS; !(cond) && kvp_clock_mono_ns() < until;)        \
	turn()
static void turns(int n)
{
	while (n--)
		turn();
}

static void list(const char *url)
{
	kvp_peers_add(&region.sources, OWNER, url, (uint32_t)strlen(url));
}
static void unlist(const char *url)
{
	kvp_peers_drop(&region.sources, url, (uint32_t)strlen(url));
}

/* -- a node at its start -- */

static int fd;
static void node_open(const char *peers)
{
	struct kvp_geom g = {.slot_max = 4,
		.rank_max = 64,
		.index_rank_max = 64,
		.resv_max = 64,
		.block_max = 10000,
		.active_block_max = 1024,
		.queued_max = 16};
	memset(&w, 0, sizeof(w));
	memset(&config, 0, sizeof(config));
	if (kvp_region_geom(&g) || kvp_region_create(&g, &fd) ||
		kvp_region_join(fd, KVP_REGION_INDEXER, &region))
		exit(1);
	kvp_recov_begin(&region.recov, 1);
	kvp_cmd_attach(&region.cmd, OWNER);
	config.recovery_http_timeout_ms = 10000;
	config.recovery_max_dump_bytes = 64 << 20;
	config.eff.selection_on = 1;
	snprintf(config.indexer_peers, sizeof(config.indexer_peers), "%s", peers);
	boot = (struct kvp_boot){.config = &config,
		.region = &region,
		.owner = OWNER,
		.ctr = kvp_region_own_column(&region, 2)};
	struct kvp_http_server_cfg sc = {.ip = "127.0.0.1", .on_request = on_request};
	if (kvp_loop_open(&loop, 0) || kvp_http_server_open(loop, &sc, &server))
		exit(1);
}

static void begin_recovery(void)
{
	struct kvp_recovery_hooks hooks = {on_finished, on_fetched, NULL};
	if (kvp_recovery_open(&boot, loop, &hooks, &rec))
		exit(1);
}

static void stop(void)
{
	kvp_recovery_close(rec);
	uint32_t cnt[KVP_CMD_STATES];
	kvp_cmd_count(&region.cmd, cnt);
	is_u64(cnt[0], KVP_CMD_CELLS, "no cell is left behind");
	kvp_http_server_close(server);
	kvp_loop_close(loop);
	kvp_region_leave(&region);
	close(fd);
}

/* -- claims -- */

static void found_peers(void)
{
	node_open("");
	begin_recovery();
	list(at("bad"));
	turns(20);
	is_u64(w.begins, 0, "nothing before discovery has listed all peers");
	kvp_gate_open(&region.gates, KVP_GATE_PEERS);
	UNTIL(w.asked_cnt == 1 && rec->drive.state == KVP_DRIVE_BACK_OFF);
	ok(w.asked_cnt == 1 && rec->drive.state == KVP_DRIVE_BACK_OFF, "the one peer fails: a pause");
	uint64_t before = kvp_clock_mono_ns();
	list(at("good"));
	UNTIL(w.done);
	ok(w.end_state == KVP_RECOV_RECOVERED && w.end_number == w.number && w.number,
		"a peer that joins is asked");
	ok(kvp_clock_mono_ns() - before < KVP_DRIVE_WAIT_MIN_NS, "before the pause is over");
	ok(w.blocks == 2 && !w.bad && strcmp(w.key, "m:g") == 0, "its blocks are handed over");
	turns(20);
	ok(w.done == 1 && w.ends == 1 && w.fetched == 1, "once");
	stop();
	node_open("");
	kvp_gate_open(&region.gates, KVP_GATE_PEERS);
	begin_recovery();
	UNTIL(w.done);
	ok(w.end_state == KVP_RECOV_EMPTY && !w.end_number && !w.asked_cnt && !w.fetched,
		"no peer: begins empty");
	stop();
	node_open("");
	kvp_gate_open(&region.gates, KVP_GATE_PEERS);
	list(at("held"));
	begin_recovery();
	UNTIL(w.held);
	unlist(at("held"));
	turns(100);
	ok(w.held && !w.done, "the peer being asked vanishes: it is still listened to");
	reply(w.held, 200, NULL, store);
	UNTIL(w.done);
	ok(w.end_state == KVP_RECOV_RECOVERED && w.blocks == 2, "and recovered from");
	stop();
}

static void roles(void)
{
	node_open("");
	config.eff.disaggregated = 1;
	config.eff.selection_on = 0;
	kvp_gate_open(&region.gates, KVP_GATE_PEERS);
	list(at("good"));
	begin_recovery();
	UNTIL(w.asked_cnt == 1 && rec->drive.state == KVP_DRIVE_BACK_OFF);
	ok(!w.recs && strstr(w.asked[0], "max_bytes=67108864&role=prefill"),
		"a peer that does not name the role is not believed");
	list(at("other"));
	unlist(at("good"));
	UNTIL(w.asked_cnt == 2 && rec->drive.state == KVP_DRIVE_BACK_OFF);
	ok(!w.recs && !memcmp(w.asked[1], "/other", 6), "nor is one that names another");
	list(at("role"));
	unlist(at("other"));
	UNTIL(w.done);
	ok(w.end_state == KVP_RECOV_RECOVERED && w.role_recs[KVP_PART_PREFILL] == 1 &&
			w.role_recs[KVP_PART_DECODE] == 1 && !w.role_recs[KVP_PART_AGGREGATED] && !w.bad,
		"prefill and decode are fetched one after the other");
	stop();
}

static void indexer_restarts(void)
{
	char peers[128];
	node_open("");
	snprintf(peers, sizeof(peers), "%s,%s", at("good"), at("bad"));
	snprintf(config.indexer_peers, sizeof(config.indexer_peers), "%s", peers);
	w.put_status = KVP_ERR_FENCED;
	begin_recovery();
	UNTIL(w.done);
	ok(w.asked_cnt == 2 && w.begins >= 2 && w.blocks == 2 && w.end_state == KVP_RECOV_RECOVERED &&
			strstr(w.asked[1], "/good"),
		"an indexer that forgot the attempt: the same peer is asked again");
	is_u64(w.end_peers, 1, "which counts as one peer");
	stop();
	node_open("");
	snprintf(config.indexer_peers, sizeof(config.indexer_peers), "%s", at("good"));
	w.put_status = KVP_ERR_CLOSED;
	begin_recovery();
	UNTIL(w.puts);
	turns(10);
	ok(!w.ends && !w.done, "an indexer that has ended the recovery is not told its end");
	kvp_recov_end(&region.recov, KVP_RECOV_EXHAUSTED, 5);
	UNTIL(w.done);
	ok(w.done == 1 && !w.ends, "and the open gate is the end here, too");
	stop();
	node_open("");
	snprintf(config.indexer_peers, sizeof(config.indexer_peers), "%s", at("bad"));
	begin_recovery();
	UNTIL(w.done);
	ok(w.end_state == KVP_RECOV_EXHAUSTED && w.end_peers == 1, "a list that failed is told as exhausted");
	stop();
}

static void index_lost(void)
{
	node_open("");
	snprintf(config.indexer_peers, sizeof(config.indexer_peers), "%s", at("good"));
	w.loses_index = 1;
	begin_recovery();
	UNTIL(w.done);
	ok(w.ends == 2 && w.asked_cnt == 2 && w.done == 1 && !kvp_recov_is_active(&region.recov),
		"an index that is lost before we saw the gate open is recovered again");
	kvp_recov_refill(&region.recov, 11);
	UNTIL(w.done == 2);
	ok(w.ends == 3 && w.asked_cnt == 3 && w.done == 2, "and one that is lost later");
	stop();
}

static void long_events(void)
{
	node_open("");
	snprintf(config.indexer_peers, sizeof(config.indexer_peers), "%s", at("big"));
	begin_recovery();
	UNTIL(w.done);
	ok(w.blocks == BIG_BLOCKS && w.recs == 3 && !w.bad,
		"a long event comes in pieces, each under the last one");
	stop();
	node_open("");
	snprintf(config.indexer_peers, sizeof(config.indexer_peers), "%s", at("many"));
	w.is_deaf = 0;
	begin_recovery();
	UNTIL(w.begins && rec->at == AT_FETCH);
	w.is_deaf = 1;
	UNTIL(rec->is_paused);
	turns(200);
	ok(rec->is_paused && w.waiting_max < 2 * KVP_RECOVERY_AHEAD_BYTES,
		"an indexer that is behind: reading pauses, %llu bytes wait",
		(unsigned long long)w.waiting_max);
	w.is_deaf = 0;
	UNTIL(w.done);
	ok(w.blocks == 60000 && !w.bad && w.end_state == KVP_RECOV_RECOVERED, "and goes on: nothing is lost");
	stop();
}

int main(void)
{
	found_peers();
	roles();
	indexer_restarts();
	index_lost();
	long_events();
	return done();
}
