/* t_zmq_sub — the listener against a real XPUB and ROUTER, and what the vectors leave out of the cursor. */
#include <sys/eventfd.h>
#include <unistd.h>

#include "ipc/zmq_monitor.h"
#include "tests/zmq_fixture.h"

#define STATS(f) (*kvp_zmq_sub_stats((f)->sub))

static int delivered(const struct fx *f, const uint64_t *want, uint32_t n)
{
	int same = f->cnt == n && !memcmp(f->seq, want, n * sizeof(*want));
	for (uint32_t i = 0; !same && i < f->cnt; i++)
		printf("# delivered %" PRIu64 "\n", f->seq[i]);
	return same;
}
#define SEQS(...) (const uint64_t[]){__VA_ARGS__}, sizeof((const uint64_t[]){__VA_ARGS__}) / 8

static void test_endpoints(void)
{
	static const char *const good[] = {"tcp://*:5558", "tcp://127.0.0.1:0", "ipc:///tmp/x",
		"tcp://h:65535", "tcp://[::1]:5557", "tcp://[fd00::1%eth0]:1", "inproc://a", "tcp://a.b.c:1"};
	static const char *const bad[] = {"tcp://host", "tcp://:5558", "udp://h:1", "not-an-endpoint",
		"tcp://::1:5", "tcp://h:65536", "tcp://h:", "tcp://h:-1", "tcp://h:5x", "tcp://[::1:5",
		"tcp://[]:5", "ipc://", "inproc://", "", "tcp://h :1", "tcp://[::1]5:1", "://h:1",
		"tcp://h:000001"};
	char err[96], out[64], lim[KVP_ZMQ_ENDPOINT_MAX + 2];
	for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++)
		ok(kvp_zmq_endpoint_check(good[i], err, sizeof(err)) == KVP_OK, "%s is an endpoint", good[i]);
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		err[0] = 0;
		ok(kvp_zmq_endpoint_check(bad[i], err, sizeof(err)) == KVP_ERR_INVAL && err[0],
			"'%s' is not: %s", bad[i], err);
	}
	memset(lim, 'x', sizeof(lim));
	memcpy(lim, "ipc://", 6);
	lim[KVP_ZMQ_ENDPOINT_MAX + 1] = 0;
	ok(kvp_zmq_endpoint_check(lim, NULL, 0) == KVP_ERR_INVAL, "1025 bytes are too long");
	lim[KVP_ZMQ_ENDPOINT_MAX] = 0;
	ok(kvp_zmq_endpoint_check(lim, NULL, 0) == KVP_OK, "1024 bytes are not");
	ok(kvp_zmq_endpoint_advance("tcp://[::1]:5557", 3, out, sizeof(out)) == KVP_OK, "advance");
	is_str(out, "tcp://[::1]:5560", "port + 3");
	ok(kvp_zmq_endpoint_advance("tcp://h:65530", 5, out, sizeof(out)) == KVP_OK,
		"advance to the last port");
	is_str(out, "tcp://h:65535", "65535");
	ok(kvp_zmq_endpoint_advance("tcp://h:65530", 6, out, sizeof(out)) == KVP_ERR_LIMIT, "65536 is over");
	ok(kvp_zmq_endpoint_advance("tcp://h:1", 4294967295u, out, sizeof(out)) == KVP_ERR_LIMIT, "and 2^32");
	ok(kvp_zmq_endpoint_advance("inproc://a", 2, out, sizeof(out)) == KVP_OK, "inproc");
	is_str(out, "inproc://a_dp2", "suffix");
	ok(kvp_zmq_endpoint_advance("ipc:///a", 0, out, sizeof(out)) == KVP_OK, "delta 0 copies");
	ok(kvp_zmq_endpoint_advance("ipc:///a", 1, out, sizeof(out)) == KVP_ERR_INVAL, "ipc has no ports");
	ok(kvp_zmq_endpoint_advance("tcp://h:1", 1, out, 9) == KVP_ERR_FULL, "no room");
	ok(kvp_zmq_endpoint_advance("tcp://h", 1, out, sizeof(out)) == KVP_ERR_INVAL, "bad endpoint");
}

static enum kvp_zmq_reply parse(const char *const *text, const size_t *len, uint32_t n, uint64_t *seq)
{
	struct kvp_zmq_frame f[6];
	for (uint32_t i = 0; i < n; i++)
		f[i] = (struct kvp_zmq_frame){text[i], len[i]};
	return kvp_zmq_reply_parse(f, n, seq);
}
#define PARSE(n, seq, l, ...) parse((const char *const[]){__VA_ARGS__}, l, n, seq)
#define LEN(...) ((const size_t[]){__VA_ARGS__})

static void test_reply_shapes(void)
{
	uint64_t s = 0;
	const char *five = "\0\0\0\0\0\0\0\5", *end = "\xff\xff\xff\xff\xff\xff\xff\xff";
	ok(PARSE(4, &s, LEN(0, 2, 8, 3), "", "kv", five, "abc") == KVP_ZMQ_REPLY_BATCH && s == 5,
		"four frames");
	ok(PARSE(3, &s, LEN(0, 8, 3), "", five, "abc") == KVP_ZMQ_REPLY_BATCH && s == 5, "three frames");
	ok(PARSE(3, &s, LEN(2, 8, 3), "kv", five, "abc") == KVP_ZMQ_REPLY_BATCH, "topic, no delimiter");
	ok(PARSE(2, &s, LEN(8, 3), five, "abc") == KVP_ZMQ_REPLY_BATCH, "neither");
	ok(PARSE(4, &s, LEN(0, 0, 8, 0), "", "", end, "") == KVP_ZMQ_REPLY_END, "newest end");
	ok(PARSE(3, &s, LEN(0, 8, 0), "", end, "") == KVP_ZMQ_REPLY_END, "older end");
	ok(PARSE(2, &s, LEN(8, 0), end, "") == KVP_ZMQ_REPLY_END, "older end without delimiter");
	ok(PARSE(2, &s, LEN(0, 0), "", "") == KVP_ZMQ_REPLY_END, "oldest end");
	ok(PARSE(1, &s, LEN(0), "") == KVP_ZMQ_REPLY_END, "a single empty frame");
	ok(PARSE(4, &s, LEN(0, 0, 8, 3), "", "", end, "abc") == KVP_ZMQ_REPLY_END, "end with a payload");
	ok(PARSE(3, &s, LEN(0, 7, 3), "", five, "abc") == KVP_ZMQ_REPLY_BAD, "seven-byte number");
	ok(PARSE(5, &s, LEN(0, 0, 0, 8, 3), "", "", "", five, "abc") == KVP_ZMQ_REPLY_BAD, "five frames");
	ok(PARSE(1, &s, LEN(3), "abc") == KVP_ZMQ_REPLY_BAD, "one frame");
}

static void test_restart_guard(void)
{
	struct kvp_zmq_cursor c;
	struct kvp_zmq_gap gap;
	uint64_t t = 0, s = 1000000000ull;
	kvp_zmq_cursor_init(&c, 0, 1);
	for (int i = 0; i < 3; i++) {
		kvp_zmq_cursor_live(&c, 9, t, &gap);
		kvp_zmq_cursor_applied(&c, 9);
		ok(kvp_zmq_cursor_live(&c, 0, t, &gap) == KVP_ZMQ_RESET, "restart %d is believed", i + 1);
		ok(kvp_zmq_cursor_live(&c, 0, t, &gap) == KVP_ZMQ_APPLY, "and its first batch applied");
		kvp_zmq_cursor_applied(&c, 0);
		t += 10 * s;
	}
	struct kvp_zmq_cursor later = c;
	kvp_zmq_cursor_live(&c, 9, t, &gap);
	ok(kvp_zmq_cursor_live(&c, 0, 59 * s, &gap) == KVP_ZMQ_FAIL, "the fourth within a minute is not");
	c = later;
	for (int i = 0; i < 20; i++) {
		t = 60 * s + (uint64_t)i * 21 * s;
		kvp_zmq_cursor_live(&c, 9, t, &gap);
		if (kvp_zmq_cursor_live(&c, 0, t, &gap) != KVP_ZMQ_RESET)
			ok(0, "restart %d, 21 s after the one before, is believed", i);
	}
	ok(1, "a restart every 21 s is always believed");
	kvp_zmq_cursor_init(&c, 1, 100);
	kvp_zmq_cursor_live(&c, 5, 0, &gap);
	kvp_zmq_cursor_replay_end(&c, KVP_ZMQ_CAUSE_TIMEOUT, 0);
	ok(kvp_zmq_cursor_live(&c, 8, 99, &gap) == KVP_ZMQ_APPLY && gap.why == KVP_ZMQ_COOLDOWN, "cooldown");
	ok(kvp_zmq_cursor_live(&c, 7, 99, &gap) == KVP_ZMQ_RESET, "restart");
	ok(kvp_zmq_cursor_live(&c, 7, 99, &gap) == KVP_ZMQ_REPLAY, "a restart ends the cooldown");
	kvp_zmq_cursor_replay_end(&c, KVP_ZMQ_CAUSE_TIMEOUT, 99);
	kvp_zmq_cursor_set_replay(&c, 1);
	ok(kvp_zmq_cursor_live(&c, 9, 99, &gap) == KVP_ZMQ_REPLAY, "a moved replay address ends it, too");
	/* a replay that runs ahead of the live stream is no restart */
	for (uint64_t i = 0; i < 30; i++)
		kvp_zmq_cursor_replayed(&c, i, 1);
	ok(kvp_zmq_cursor_replay_end(&c, KVP_ZMQ_CAUSE_END, 99) == KVP_ZMQ_COMPLETE, "replay up to 29");
	ok(kvp_zmq_cursor_live(&c, 10, 99, &gap) == KVP_ZMQ_STALE, "live 10 behind watermark 29 is stale");
	ok(kvp_zmq_cursor_live(&c, 30, 99, &gap) == KVP_ZMQ_APPLY, "live 30 goes on");
}

static void test_gap(enum fx_mode mode, const char *name, enum kvp_zmq_cause cause)
{
	struct kvp_zmq_sub_cfg cfg = {.replay_endpoint = "yes", .cooldown_ms = 60000};
	struct fx f;
	fx_open(&f, &cfg, mode);
	for (uint64_t s = 0; s < 6; s++) {
		fx_keep(&f, s);
		if (s < 3 || s > 4)
			fx_publish(&f, s);
	}
	fx_until(&f, STATS(&f).applied + STATS(&f).stale == 4);
	ok(delivered(&f, SEQS(0, 1, 2, 3, 4, 5)), "%s: 0..5 delivered once, in order", name);
	is_u64(STATS(&f).gaps, 1, "%s: one gap", name);
	is_u64(STATS(&f).missing, 2, "%s: of two batches", name);
	is_u64(f.request_start, 3, "%s: asked from 3", name);
	is_u64(STATS(&f).replayed, 3, "%s: three replayed, the newest, too", name);
	is_u64(STATS(&f).ended[cause], 1, "%s: how it ended", name);
	is_u64(STATS(&f).incomplete[KVP_ZMQ_COMPLETE], 1, "%s: complete", name);
	f.mode = FX_OLD;
	fx_keep(&f, 8);
	fx_publish(&f, 8); /* a second gap: no cooldown after a complete replay */
	fx_until(&f, f.cnt == 9);
	ok(f.requests == 2 && f.request_start == 6 && f.seq[8] == 8, "%s: the next gap is repaired, too",
		name);
	fx_publish(&f, 9);
	fx_until(&f, f.cnt == 10);
	ok(kvp_zmq_sub_state(f.sub) == KVP_ZMQ_ACTIVE, "%s: live goes on", name);
	fx_close(&f);
}

static void test_no_answer(enum fx_mode mode, const char *name, enum kvp_zmq_cause cause)
{
	/* A short time-out only where it is what is waited for. */
	struct kvp_zmq_sub_cfg cfg = {
		.replay_endpoint = "yes", .stall_ms = mode == FX_SILENT ? 200 : 0, .cooldown_ms = 60000};
	struct fx f;
	fx_open(&f, &cfg, mode);
	fx_publish(&f, 0);
	fx_publish(&f, 5);
	fx_publish(&f, 6);
	fx_publish(&f, 9);
	fx_until(&f, f.cnt == 4);
	ok(delivered(&f, SEQS(0, 5, 6, 9)), "%s: the live stream continues", name);
	is_u64(f.requests, 1, "%s: one request", name);
	is_u64(STATS(&f).ended[cause], 1, "%s: how it ended", name);
	is_u64(STATS(&f).incomplete[KVP_ZMQ_EMPTY], 1, "%s: empty", name);
	is_u64(STATS(&f).gaps, 2, "%s: both gaps counted", name);
	is_u64(STATS(&f).cooldown, 1, "%s: the second one falls into the cooldown", name);
	/* An answer to the request given up: to a socket that is gone, or dropped; never delivered. */
	f.mode = FX_OLD;
	fx_keep(&f, 1);
	fx_keep(&f, 30);
	fx_answer(&f, &f.id);
	fx_publish(&f, 10);
	fx_until(&f, f.cnt == 5);
	ok(delivered(&f, SEQS(0, 5, 6, 9, 10)), "%s: a late answer has no effect", name);
	fx_close(&f);
}

static void test_unasked(void)
{
	struct kvp_zmq_sub_cfg cfg = {.replay_endpoint = "yes"};
	struct fx f;
	fx_open(&f, &cfg, FX_OLD);
	fx_publish(&f, 0);
	fx_keep(&f, 0);
	fx_keep(&f, 3);
	fx_publish(&f, 3);
	fx_until(&f, f.cnt == 4);
	uint64_t before = STATS(&f).replies_dropped;
	fx_reply(&f, &f.id, 4, fx_payload, sizeof(fx_payload));
	fx_until(&f, STATS(&f).replies_dropped == before + 1);
	is_u64(f.cnt, 4, "a reply that nobody asked for is dropped");
	f.last = 9;
	fx_publish(&f, 9);
	fx_until(&f, f.cnt == 10);
	ok(delivered(&f, SEQS(0, 1, 2, 3, 4, 5, 6, 7, 8, 9)), "and does not disturb the next replay");
	fx_close(&f);
}

static void test_no_endpoint(void)
{
	struct kvp_zmq_sub_cfg cfg = {.replay_endpoint = NULL};
	struct fx f;
	uint64_t wire = __builtin_bswap64(1);
	fx_open(&f, &cfg, FX_NEW);
	fx_publish(&f, 3);
	fx_publish(&f, 5);
	fx_publish(&f, 5);
	fx_publish_raw(&f, "1234", 4, fx_payload, sizeof(fx_payload));
	zmq_send(f.pub, "kv", 2, ZMQ_SNDMORE);
	zmq_send(f.pub, &wire, 8, 0);
	for (int i = 0; i < 9; i++)
		zmq_send(f.pub, &wire, 8, i < 8 ? ZMQ_SNDMORE : 0);
	wire = UINT64_MAX;
	fx_publish_raw(&f, &wire, 8, fx_payload, sizeof(fx_payload));
	wire = __builtin_bswap64(6);
	fx_publish_raw(&f, &wire, 8, "\xc1", 1);
	fx_publish(&f, 7);
	fx_until(&f, f.cnt == 3);
	ok(delivered(&f, SEQS(3, 5, 7)), "without replay the batches that came are applied");
	is_u64(STATS(&f).late_start, 1, "the first one above 0");
	is_u64(STATS(&f).gaps, 2, "gaps: 4, and 6 that could not be framed");
	is_u64(STATS(&f).no_endpoint, 3, "none of them repaired");
	is_u64(STATS(&f).duplicate, 1, "duplicate");
	is_u64(STATS(&f).bad_frames, 4, "wrong frames");
	is_u64(STATS(&f).unframed, 1, "unframed payload");
	is_u64(kvp_zmq_sub_cursor(f.sub)->w, 7, "watermark");
	ok(kvp_zmq_sub_is_connected(f.sub), "the handshake was seen");
	/* The address of a replay socket becomes known: the next gap is repaired. */
	fx_keep(&f, 8);
	fx_keep(&f, 10);
	ok(kvp_zmq_sub_set_replay(f.sub, "nonsense") == KVP_ERR_INVAL, "a bad replay address is refused");
	ok(kvp_zmq_sub_set_replay(f.sub, f.replay) == KVP_OK, "a good one accepted");
	fx_publish(&f, 10);
	fx_until(&f, f.cnt == 6);
	ok(delivered(&f, SEQS(3, 5, 7, 8, 9, 10)), "replay from the new address");
	f.mode = FX_SILENT;
	fx_publish(&f, 20);
	fx_until(&f, f.requests == 2);
	ok(kvp_zmq_sub_set_replay(f.sub, NULL) == KVP_OK, "the address is taken away during a replay");
	fx_until(&f, f.cnt == 7);
	is_u64(STATS(&f).ended[KVP_ZMQ_CAUSE_ABORTED], 1, "the replay ends at once");
	fx_close(&f);
}

/* With CLEAR a rank is emptied before what follows a loss, once, and only where something was known. */
static void test_loss(void)
{
	struct kvp_zmq_sub_cfg cfg = {.replay_endpoint = NULL, .loss = KVP_ZMQ_LOSS_CLEAR};
	struct fx f;
	fx_open(&f, &cfg, FX_NEW);
	fx_publish(&f, 3);
	fx_publish(&f, 4);
	fx_until(&f, f.cnt == 2);
	is_u64(f.resets, 0, "a late start is no loss");
	f.again = 2;
	fx_publish(&f, 7);
	fx_publish(&f, 8);
	fx_until(&f, f.cnt == 4);
	ok(delivered(&f, SEQS(3, 4, 7, 8)) && f.resets == 1 && f.losses == 1 && f.reset_at == 2,
		"a gap without replay: cleared once, before the next batch, when there is room");
	fx_close(&f);
	cfg.replay_endpoint = "yes";
	fx_open(&f, &cfg, FX_NEW);
	fx_keep(&f, 0);
	fx_keep(&f, 3);
	fx_publish(&f, 0);
	fx_publish(&f, 3);
	fx_until(&f, f.cnt == 4);
	is_u64(f.resets, 0, "a complete replay: nothing is lost");
	f.first = 6;
	f.last = 8;
	f.again = 1;
	fx_publish(&f, 8);
	fx_until(&f, f.cnt == 7);
	ok(delivered(&f, SEQS(0, 1, 2, 3, 6, 7, 8)) && f.losses == 1 && f.resets == 1 && f.reset_at == 4,
		"a replay that begins too late: cleared once, before its first batch");
	fx_publish(&f, 12);
	fx_until(&f, f.cnt == 8);
	ok(STATS(&f).cooldown == 1 && f.losses == 2 && f.reset_at == 7, "a gap in the cooldown, too");
	fx_close(&f);
	fx_open(&f, &cfg, FX_NEW); /* it keeps nothing */
	fx_publish(&f, 0);
	fx_publish(&f, 3);
	fx_until(&f, f.cnt == 2);
	ok(STATS(&f).incomplete[KVP_ZMQ_EMPTY] == 1 && f.losses == 1 && f.reset_at == 1,
		"an empty replay: cleared before the live batch");
	fx_close(&f);
}

static void test_no_cooldown(void)
{
	struct kvp_zmq_sub_cfg cfg = {
		.replay_endpoint = "yes", .stall_ms = 100, .cooldown_ms = KVP_ZMQ_NO_COOLDOWN};
	struct fx f;
	fx_open(&f, &cfg, FX_SILENT);
	fx_publish(&f, 0);
	fx_publish(&f, 5);
	fx_publish(&f, 9);
	fx_until(&f, f.cnt == 3);
	ok(f.requests == 2 && STATS(&f).cooldown == 0 && STATS(&f).ended[KVP_ZMQ_CAUSE_TIMEOUT] == 2,
		"without a cooldown each gap is asked for");
	fx_close(&f);
}

static void test_restart(void)
{
	struct kvp_zmq_sub_cfg cfg = {.replay_endpoint = "yes"};
	struct fx f;
	fx_open(&f, &cfg, FX_NEW);
	for (uint64_t s = 0; s < 10; s++)
		fx_publish(&f, s);
	fx_until(&f, f.cnt == 10);
	fx_engine_stop(&f);
	fx_engine(&f); /* same ports, empty */
	fx_subscribed(&f);
	fx_publish(&f, 0);
	fx_until(&f, f.cnt == 11);
	ok(f.resets == 1 && f.reset_at == 10 && f.seq[10] == 0,
		"a restarted engine: reset, then its batch 0");
	is_u64(kvp_zmq_sub_cursor(f.sub)->w, 0, "watermark");
	is_u64(STATS(&f).restarts, 1, "counted");
	for (uint64_t s = 1; s < 5; s++)
		fx_publish(&f, s);
	fx_until(&f, f.cnt == 15);
	f.first = 0;
	f.last = 2;
	fx_publish(&f, 2); /* again a new engine, whose first two batches were lost on the way */
	fx_until(&f, f.cnt == 18);
	ok(f.resets == 2 && f.request_start == 0 && f.seq[15] == 0 && f.seq[17] == 2,
		"a restart above 0: reset, replay from 0");
	fx_publish(&f, 1);
	fx_until(&f, f.resets == 3);
	fx_publish(&f, 0);
	fx_until(&f, kvp_zmq_sub_state(f.sub) == KVP_ZMQ_FAILED);
	ok(f.resets == 3 && strstr(kvp_zmq_sub_error(f.sub), "several publishers"), "the fourth fails: %s",
		kvp_zmq_sub_error(f.sub));
	is_u64(kvp_zmq_sub_work(f.sub, 10), 0, "a failed listener does nothing");
	uint32_t had = f.cnt, asked = f.requests;
	f.last = 6;
	ok(kvp_zmq_sub_retry(f.sub) == KVP_OK && kvp_zmq_sub_state(f.sub) == KVP_ZMQ_CATCHING_UP &&
			!*kvp_zmq_sub_error(f.sub),
		"tried again: connecting");
	fx_until(&f, f.cnt == had + 7);
	ok(f.resets == 4 && f.reset_at == had && f.requests == asked + 1 && f.request_start == 0,
		"reset first, then everything is asked for without waiting for a live batch");
	fx_until(&f, kvp_zmq_sub_state(f.sub) == KVP_ZMQ_ACTIVE);
	fx_publish(&f, 7);
	fx_until(&f, f.cnt == had + 8);
	fx_publish(&f, 3);
	fx_until(&f, kvp_zmq_sub_state(f.sub) == KVP_ZMQ_FAILED);
	ok(f.resets == 4, "a number that goes back soon after fails again, without a reset");
	is_u64(STATS(&f).retries, 1, "counted");
	fx_close(&f);
}

/* What an earlier process had applied is known; what came since is fetched, live batch or not. */
static void test_fetch(void)
{
	struct kvp_zmq_resume at = {1, 1, 4, 4}, unset = {0, 0, 0, 0};
	struct kvp_zmq_sub_cfg cfg = {.replay_endpoint = "yes",
		.resume = &at,
		.gate = KVP_ZMQ_GATE_SHUT,
		.fetch = KVP_ZMQ_FETCH_AT_ONCE};
	struct fx f;
	fx_open(&f, &cfg, FX_NEW);
	fx_keep(&f, 0);
	fx_keep(&f, 7);
	kvp_zmq_sub_ready(f.sub);
	fx_until(&f, f.cnt == 3);
	ok(delivered(&f, SEQS(5, 6, 7)), "what was missed is fetched from the watermark on");
	ok(f.request_start == 5 && f.src[0] == KVP_ZMQ_REPLAYED, "by replay");
	fx_keep(&f, 8);
	fx_until(&f, f.cnt == 4);
	ok(f.requests == 2 && f.request_start == 8,
		"and once more: the first answer may have been older than the subscription");
	fx_until(&f, STATS(&f).incomplete[KVP_ZMQ_COMPLETE] == 2);
	fx_publish(&f, 9);
	fx_until(&f, f.cnt == 5);
	ok(f.requests == 2 && STATS(&f).gaps == 0 && STATS(&f).fetches == 2, "then the live stream goes on");
	fx_close(&f);

	cfg.resume = &unset;
	cfg.gate = KVP_ZMQ_GATE_OPEN;
	cfg.replay_endpoint = "yes";
	fx_open(&f, &cfg, FX_NEW);
	fx_until(&f, STATS(&f).incomplete[KVP_ZMQ_COMPLETE] == 1);
	ok(f.requests == 1 && f.request_start == 0 && f.cnt == 0,
		"unset: from 0; an empty answer is complete");
	fx_publish(&f, 0);
	fx_publish(&f, 1);
	fx_until(&f, f.cnt == 2);
	ok(f.requests == 1, "a live batch makes the second one needless");
	fx_close(&f);
}

/* A replay service that does not answer costs time, not batches, and no cooldown. */
static void test_fetch_silent(void)
{
	struct kvp_zmq_resume at = {1, 1, 4, 4};
	struct kvp_zmq_sub_cfg cfg = {
		.replay_endpoint = "yes", .resume = &at, .fetch = KVP_ZMQ_FETCH_AT_ONCE, .stall_ms = 50};
	struct fx f;
	fx_open(&f, &cfg, FX_SILENT);
	fx_until(&f, STATS(&f).ended[KVP_ZMQ_CAUSE_TIMEOUT] == 1);
	f.mode = FX_NEW;
	fx_keep(&f, 5);
	fx_publish(&f, 6);
	fx_until(&f, f.cnt == 2);
	ok(delivered(&f, SEQS(5, 6)), "after a fetch in vain a gap is repaired as ever");
	fx_close(&f);

	struct kvp_zmq_sub_cfg no_replay = {.resume = &at, .fetch = KVP_ZMQ_FETCH_AT_ONCE};
	fx_open(&f, &no_replay, FX_NEW);
	fx_publish(&f, 5);
	fx_until(&f, f.cnt == 1);
	is_u64(STATS(&f).fetches, 0, "no fetch without a replay endpoint");
	fx_close(&f);
}

static void test_gate(void)
{
	struct kvp_zmq_sub_cfg cfg = {.replay_endpoint = "yes", .gate = KVP_ZMQ_GATE_SHUT};
	struct fx f;
	fx_open(&f, &cfg, FX_NEW);
	ok(kvp_zmq_sub_state(f.sub) == KVP_ZMQ_BUFFERING, "gate shut: buffering");
	fx_publish(&f, 7);
	fx_publish(&f, 8);
	fx_until(&f, kvp_zmq_sub_is_connected(f.sub));
	fx_pump(&f);
	ok(f.cnt == 0, "nothing is delivered");
	kvp_zmq_sub_after_snapshot(f.sub);
	kvp_zmq_sub_ready(f.sub);
	ok(kvp_zmq_sub_state(f.sub) == KVP_ZMQ_CATCHING_UP, "gate open: catching up");
	fx_until(&f, f.cnt == 2 && kvp_zmq_sub_state(f.sub) == KVP_ZMQ_ACTIVE);
	ok(delivered(&f, SEQS(7, 8)) && !f.requests, "buffered batches, no replay after a snapshot");
	fx_keep(&f, 9);
	fx_keep(&f, 12);
	fx_publish(&f, 12);
	fx_until(&f, f.cnt == 6);
	ok(f.requests == 1 && f.request_start == 9, "later gaps are repaired");
	fx_close(&f);
}

static void test_no_room(void)
{
	struct kvp_zmq_sub_cfg cfg = {.replay_endpoint = "yes"};
	struct fx f;
	fx_open(&f, &cfg, FX_NEW);
	f.again = 3;
	fx_publish(&f, 0);
	fx_until(&f, kvp_zmq_sub_is_blocked(f.sub));
	ok(f.cnt == 0, "the consumer has no room");
	fx_until(&f, f.cnt == 1);
	for (uint64_t s = 1; s < 6; s++)
		fx_keep(&f, s);
	f.again = 4;
	fx_publish(&f, 5);
	fx_until(&f, f.cnt == 6);
	ok(delivered(&f, SEQS(0, 1, 2, 3, 4, 5)),
		"refused batches come again, live and replayed, none twice");
	f.again = 2;
	fx_publish(&f, 0);
	fx_until(&f, f.cnt == 7);
	ok(f.resets == 1 && f.seq[6] == 0, "a refused reset comes again, before its batch");
	fx_close(&f);
}

static void test_register_again(void)
{
	struct kvp_zmq_sub_cfg cfg = {.replay_endpoint = "yes"};
	struct fx f;
	fx_open(&f, &cfg, FX_NEW);
	for (uint64_t s = 0; s < 10; s++) {
		fx_publish(&f, s);
		fx_keep(&f, s);
	}
	fx_until(&f, f.cnt == 10);
	kvp_zmq_sub_close(f.sub);
	f.sub = NULL;
	f.cnt = 0;
	fx_open_sub(&f, &cfg);
	fx_keep(&f, 10);
	fx_publish(&f, 10);
	fx_until(&f, f.cnt == 11);
	ok(f.requests == 1 && f.request_start == 0 && f.seq[0] == 0 && f.seq[10] == 10,
		"a new registration starts unset: replay from 0");
	fx_close(&f);
}

static void test_poll_many(void)
{
	struct kvp_zmq_sub_cfg cfg = {.replay_endpoint = NULL};
	struct fx f[3];
	struct kvp_zmq_sub *sub[200] = {NULL};
	int wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), is_woken = 5, fd[2];
	uint64_t one = 1;
	for (int i = 0; i < 3; i++) {
		fx_open(&f[i], &cfg, FX_NEW);
		sub[i * 70] = f[i].sub;
	}
	kvp_zmq_sub_fds(sub[0], fd);
	ok(fd[0] >= 0 && fd[1] == -1, "descriptors of the sockets");
	fx_publish(&f[0], 0);
	fx_publish(&f[2], 0);
	uint64_t end = fx_now_ms() + 10000;
	while ((f[0].cnt < 1 || f[2].cnt < 1) && fx_now_ms() < end)
		if (kvp_zmq_sub_poll(sub, 200, wake, 1000, 64, &is_woken) < 0 || is_woken)
			ok(0, "poll without a wake-up");
	ok(f[0].cnt == 1 && f[1].cnt == 0 && f[2].cnt == 1, "each listener got its own");
	ok(write(wake, &one, sizeof(one)) == sizeof(one), "wake");
	ok(kvp_zmq_sub_poll(sub, 200, wake, -1, 64, &is_woken) == 0 && is_woken,
		"poll without limit is woken");
	for (int i = 0; i < 3; i++)
		fx_close(&f[i]);
	close(wake);
}

/* A frame over the limit ends the connection, for good as far as the library is concerned. */
static void test_long_frame(void)
{
	struct kvp_zmq_sub_cfg cfg = {.replay_endpoint = "yes"};
	struct fx f;
	size_t len = KVP_ZMQ_MSG_MAX_BYTES + 1;
	char *payload = calloc(1, len);
	uint64_t wire = __builtin_bswap64(1);
	fx_open(&f, &cfg, FX_NEW);
	fx_publish(&f, 0);
	fx_until(&f, f.cnt == 1);
	fx_publish_raw(&f, &wire, 8, payload, len);
	fx_until(&f, (kvp_zmq_sub_look(f.sub), kvp_zmq_sub_state(f.sub) == KVP_ZMQ_FAILED));
	ok(kvp_zmq_sub_stats(f.sub)->received == 1, "a frame over the limit never arrives: %s",
		kvp_zmq_sub_error(f.sub));
	for (uint64_t seq = 0; seq < 3; seq++)
		fx_keep(&f, seq);
	ok(kvp_zmq_sub_retry(f.sub) == KVP_OK, "the listener is tried again");
	fx_subscribed(&f);
	fx_until(&f, f.cnt == 3 && kvp_zmq_sub_state(f.sub) == KVP_ZMQ_ACTIVE);
	ok(delivered(&f, SEQS(0, 1, 2)), "and fetches what it has missed");
	kvp_zmq_sub_close(f.sub);
	f.sub = NULL;
	cfg.frame_max = len;
	cfg.replay_endpoint = NULL;
	fx_open_sub(&f, &cfg);
	fx_publish_raw(&f, &wire, 8, payload, len);
	fx_until(&f, kvp_zmq_sub_stats(f.sub)->received == 1);
	ok(kvp_zmq_sub_stats(f.sub)->unframed == 1, "with a higher limit it comes, and is judged as a batch");
	fx_close(&f);
	free(payload);
}

/* A publisher that goes and comes is not given up. */
static void test_away(void)
{
	struct kvp_zmq_sub_cfg cfg = {.replay_endpoint = NULL};
	struct fx f;
	fx_open(&f, &cfg, FX_NEW);
	fx_until(&f, kvp_zmq_sub_is_connected(f.sub));
	fx_engine_stop(&f);
	fx_until(&f, !kvp_zmq_sub_is_connected(f.sub));
	uint64_t end = fx_now_ms() + KVP_ZMQ_GIVEN_UP_MS + 300;
	while (fx_now_ms() < end) {
		kvp_zmq_sub_poll(&f.sub, 1, -1, 20, 64, NULL);
		kvp_zmq_sub_look(f.sub);
	}
	ok(kvp_zmq_sub_state(f.sub) == KVP_ZMQ_ACTIVE, "a publisher that is away is waited for");
	fx_engine(&f);
	fx_subscribed(&f);
	fx_publish(&f, 0);
	fx_until(&f, f.cnt == 1);
	fx_close(&f);
}

static void test_open_errors(void)
{
	void *zmq = kvp_zmq_ctx_new(4);
	struct fx f = {.cnt = 0};
	struct kvp_zmq_sub *s = NULL;
	struct kvp_zmq_sub_cfg cfg = {.zmq = zmq,
		.endpoint = "tcp://h",
		.on_batch = fx_on_batch,
		.on_reset = fx_on_reset,
		.ctx = &f};
	ok(kvp_zmq_sub_open(&cfg, &s) == KVP_ERR_INVAL && !s, "bad endpoint");
	cfg.endpoint = "tcp://127.0.0.1:1";
	cfg.replay_endpoint = "tcp://h";
	ok(kvp_zmq_sub_open(&cfg, &s) == KVP_ERR_INVAL && !s, "bad replay endpoint");
	cfg.replay_endpoint = NULL;
	cfg.on_reset = NULL;
	ok(kvp_zmq_sub_open(&cfg, &s) == KVP_ERR_INVAL && !s, "no callback");
	cfg.on_reset = fx_on_reset;
	char long_path[256] = "ipc:///tmp/";
	memset(long_path + strlen(long_path), 'x', 200);
	cfg.endpoint = long_path;
	ok(kvp_zmq_sub_open(&cfg, &s) == KVP_OK && kvp_zmq_sub_state(s) == KVP_ZMQ_FAILED &&
			*kvp_zmq_sub_error(s),
		"a path that ZMQ refuses is registered, and failed: %s", s ? kvp_zmq_sub_error(s) : "");
	ok(kvp_zmq_sub_retry(s) == KVP_ERR_SYS && kvp_zmq_sub_state(s) == KVP_ZMQ_FAILED &&
			*kvp_zmq_sub_error(s) && kvp_zmq_sub_stats(s)->retries == 1,
		"tried again it fails again");
	is_u64(f.resets, 0, "without a reset");
	kvp_zmq_sub_close(s);
	kvp_zmq_sub_close(NULL);
	zmq_ctx_term(zmq);
}

int main(void)
{
	test_endpoints();
	test_reply_shapes();
	test_restart_guard();
	test_open_errors();
	test_gap(FX_NEW, "newest framing", KVP_ZMQ_CAUSE_END);
	test_gap(FX_OLD, "older framing", KVP_ZMQ_CAUSE_END);
	test_gap(FX_NO_DELIMITER, "no delimiter", KVP_ZMQ_CAUSE_END);
	test_gap(FX_OLDEST_END, "oldest end marker", KVP_ZMQ_CAUSE_END);
	test_gap(FX_NO_END, "no end marker", KVP_ZMQ_CAUSE_TIMEOUT);
	test_no_answer(FX_SILENT, "no answer", KVP_ZMQ_CAUSE_TIMEOUT);
	test_no_answer(FX_GARBAGE, "garbage", KVP_ZMQ_CAUSE_BROKEN);
	test_unasked();
	test_no_endpoint();
	test_loss();
	test_no_cooldown();
	test_restart();
	test_fetch();
	test_fetch_silent();
	test_gate();
	test_no_room();
	test_register_again();
	test_poll_many();
	test_long_frame();
	test_away();
	return done();
}
