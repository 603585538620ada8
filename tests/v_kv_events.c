/* v_kv_events — vectors of an independent implementation: payloads, replay exchanges, cursor decisions. */
#include <sys/stat.h>

#include "ipc/json_in.h"
#include "tests/zmq_fixture.h"

static struct kvp_json_val load(struct kvp_json *p, const char *path)
{
	struct stat st;
	struct kvp_json_val v = {NULL, 0};
	FILE *f = fopen(path, "rb");
	if (!f || fstat(fileno(f), &st)) {
		printf("Bail out! cannot read %s\n", path);
		exit(1);
	}
	char *text = malloc((size_t)st.st_size);
	size_t n = fread(text, 1, (size_t)st.st_size, f);
	fclose(f);
	if (kvp_json_parse(p, text, n, 128, &v, NULL) != KVP_OK) {
		printf("Bail out! cannot parse %s\n", path);
		exit(1);
	}
	free(text);
	return v;
}

/* Present and not null? */
static int get(struct kvp_json_val obj, const char *key, struct kvp_json_val *out)
{
	return kvp_json_get(obj, key, out) == KVP_OK && kvp_json_type(*out) != KVP_JSON_NULL;
}

static const char *get_text(struct kvp_json_val obj, const char *key)
{
	struct kvp_json_val v;
	const char *s;
	size_t n;
	return get(obj, key, &v) && kvp_json_str(v, &s, &n) == KVP_OK ? s : NULL;
}

static uint64_t get_num(struct kvp_json_val obj, const char *key)
{
	struct kvp_json_val v;
	uint64_t u = 0;
	if (!get(obj, key, &v) || kvp_json_u64(v, &u) != KVP_OK) {
		printf("Bail out! no number %s\n", key);
		exit(1);
	}
	return u;
}

static uint64_t decimal(struct kvp_json_val v)
{
	const char *s = "";
	size_t n;
	kvp_json_str(v, &s, &n);
	return strtoull(s, NULL, 10);
}

/* Hex digits -> exact allocation. */
static uint8_t *unhex(const char *s, size_t *len)
{
	*len = strlen(s) / 2;
	uint8_t *p = malloc(*len ? *len : 1);
	for (size_t i = 0; i < *len; i++) {
		char two[3] = {s[2 * i], s[2 * i + 1], 0};
		p[i] = (uint8_t)strtoul(two, NULL, 16);
	}
	return p;
}

/* ---- batches ---- */

static int same_text(struct kvp_kv_str got, const char *want)
{
	return want ? got.p && got.len == strlen(want) && !memcmp(got.p, want, got.len) : !got.p;
}

static int same_u64s(const uint64_t *got, uint32_t cnt, struct kvp_json_val want)
{
	struct kvp_json_iter it = kvp_json_each(want);
	uint32_t i = 0;
	for (; kvp_json_next(&it); i++)
		if (i >= cnt || got[i] != decimal(it.val))
			return 0;
	return i == cnt;
}

static int same_mm(const struct kvp_kv_event *ev, struct kvp_json_val want)
{
	struct kvp_json_iter it = kvp_json_each(want);
	for (uint32_t i = 0; kvp_json_next(&it); i++) {
		struct kvp_hash_mm none = {NULL, 0}, mm = i < ev->mm_cnt ? ev->mm[i] : none;
		if (!same_u64s(mm.hash, mm.cnt, it.val))
			return 0;
	}
	return 1;
}

static const char *kind_name(enum kvp_kv_kind k)
{
	static const char *const name[] = {
		"stored", "removed", "cleared", "tier_cleared", "ignored", "unknown", "malformed"};
	return name[k];
}

static void check_stored(const char *name, const struct kvp_kv_event *ev, struct kvp_json_val want)
{
	struct kvp_json_val v;
	uint32_t tok[4096];
	size_t n = 0;
	int same = get(want, "token_ids", &v) && kvp_json_u32s(v, tok, 4096, &n) == KVP_OK &&
		   n == ev->tok_cnt && (!n || !memcmp(tok, ev->tok, n * sizeof(*tok)));
	ok(same, "%s: tokens", name);
	is_u64(ev->block_size, get_num(want, "block_size"), "%s: block size", name);
	if (get(want, "parent_hash", &v))
		ok(ev->has_parent && ev->parent == decimal(v), "%s: parent", name);
	else
		ok(!ev->has_parent, "%s: no parent", name);
	ok(same_text(ev->lora, get_text(want, "lora_name")), "%s: LoRA", name);
	ok(same_text(ev->salt, get_text(want, "cache_namespace")), "%s: salt", name);
	ok((ev->window == KVP_HASH_WINDOW_EAGLE) == (kvp_json_get(want, "is_eagle", &v) == KVP_OK),
		"%s: window", name);
	if (get(want, "block_mm_hashes", &v))
		ok(same_mm(ev, v), "%s: multimodal objects", name);
	else
		ok(!ev->mm, "%s: no multimodal objects", name);
}

static void check_blocks(const char *name, const struct kvp_kv_op *op, struct kvp_json_val want)
{
	struct kvp_hasher h;
	struct kvp_json_iter it = kvp_json_each(want);
	kvp_hasher_init(&h, op->tok, op->tok_cnt, op->block_size, op->window, op->seed);
	kvp_hasher_set_mm(&h, op->mm, op->mm_cnt, NULL);
	ok(op->kind == KVP_KV_OP_STORE && op->ext_cnt == kvp_json_len(want), "%s: number of blocks", name);
	for (uint32_t i = 0; kvp_json_next(&it) && i < op->ext_cnt; i++) {
		struct kvp_json_val bh, th;
		uint64_t local = 0;
		ok(get(it.val, "block_hash", &bh) && get(it.val, "tokens_hash", &th) &&
				kvp_hasher_local(&h, i, 1, &local) == 1 && local == decimal(th) &&
				op->ext[i] == decimal(bh),
			"%s: hashes of block %u", name, i);
	}
}

static void check_event(const char *name, struct kvp_kv_norm *norm, const struct kvp_kv_event *ev,
	uint32_t rank, struct kvp_json_val want)
{
	struct kvp_json_val v;
	struct kvp_kv_op op = {.dp_rank = 0};
	is_str(kind_name(ev->kind), get_text(want, "type"), "%s: kind", name);
	if (get(want, "block_hashes", &v))
		ok(same_u64s(ev->hash, ev->hash_cnt, v), "%s: block hashes", name);
	if (get_text(want, "tag"))
		ok(same_text(ev->tag, get_text(want, "tag")), "%s: tag", name);
	if (ev->kind == KVP_KV_STORED)
		check_stored(name, ev, want);
	if (ev->kind == KVP_KV_STORED || ev->kind == KVP_KV_REMOVED) {
		enum kvp_kv_tier tier;
		int has_tier = kvp_kv_tier_of(ev->medium, &tier) == KVP_OK;
		is_str(has_tier ? kvp_kv_tier_name(tier) : "none",
			get_text(want, "tier") ? get_text(want, "tier") : "none", "%s: tier", name);
		ok(ev->has_group == get(want, "group_idx", &v) &&
				(!ev->has_group || ev->group_idx == get_num(want, "group_idx")),
			"%s: group", name);
		ok(same_text(ev->group_kind, get_text(want, "kv_cache_spec_kind")), "%s: group kind", name);
		if (get(want, "kv_cache_spec_sliding_window", &v))
			ok(ev->has_window &&
					ev->sliding_window == get_num(want, "kv_cache_spec_sliding_window"),
				"%s: sliding window", name);
	}
	enum kvp_kv_reason why = kvp_kv_normalise(norm, ev, rank, &op);
	if (get_text(want, "dropped"))
		is_str(kvp_kv_reason_name(why), get_text(want, "dropped"), "%s: reason", name);
	else if (get(want, "indexed_blocks", &v) && kvp_json_len(v))
		check_blocks(name, &op, v);
	else if (ev->kind == KVP_KV_STORED)
		ok(why != KVP_KV_REASON_OK || op.kind == KVP_KV_OP_ATTACH, "%s: nothing is indexed (%s)",
			name, kvp_kv_reason_name(why));
	else if (ev->kind == KVP_KV_REMOVED)
		ok(why == KVP_KV_REASON_OK && op.kind == KVP_KV_OP_REMOVE && op.ext_cnt == ev->hash_cnt,
			"%s: removed", name);
	else if (ev->kind == KVP_KV_CLEARED)
		ok(why == KVP_KV_REASON_OK && op.kind == KVP_KV_OP_CLEAR && op.dp_rank == rank, "%s: cleared",
			name);
	else
		is_str(kvp_kv_reason_name(why), "unknown_event", "%s: unknown", name);
}

static void test_batch(struct kvp_kv_dec *d, struct kvp_json_val t)
{
	struct kvp_json_val expect, reg, v;
	const char *name = get_text(t, "name");
	size_t len;
	uint8_t *payload = unhex(get_text(t, "payload_hex"), &len);
	struct kvp_kv_batch b = {.rank = 77};
	int rc = kvp_kv_decode(d, payload, len, &b);
	kvp_json_get(t, "expect", &expect);
	kvp_json_get(t, "registered", &reg);
	if (!strcmp(get_text(expect, "decode"), "error")) {
		ok(rc == KVP_ERR_PROTO && b.rank == 77, "%s: refused as a whole", name);
		free(payload);
		return;
	}
	if (!ok(rc == KVP_OK, "%s: framed", name)) {
		free(payload);
		return;
	}
	double ts = -1;
	kvp_json_get(expect, "ts", &v);
	ok(kvp_json_double(v, &ts) == KVP_OK && ts == b.ts, "%s: time", name);
	int64_t rank = 0;
	if (get(expect, "data_parallel_rank", &v) && kvp_json_i64(v, &rank) == KVP_OK)
		ok(b.has_rank && b.rank == (uint32_t)rank, "%s: rank", name);
	else
		ok(!b.has_rank, "%s: no rank", name);
	uint32_t effective = b.has_rank ? b.rank : (uint32_t)get_num(reg, "dp_rank");
	is_u64(effective, get_num(expect, "effective_dp_rank"), "%s: effective rank", name);
	struct kvp_kv_norm *norm = kvp_kv_norm_new((uint32_t)get_num(reg, "block_size"));
	kvp_json_get(expect, "events", &v);
	is_u64(b.event_cnt, kvp_json_len(v), "%s: number of events", name);
	struct kvp_json_iter it = kvp_json_each(v);
	for (uint32_t i = 0; kvp_json_next(&it) && i < b.event_cnt; i++)
		check_event(name, norm, &b.event[i], effective, it.val);
	kvp_kv_norm_free(norm);
	free(payload);
}

/* ---- external hashes ---- */

static void test_external(struct kvp_kv_dec *d, struct kvp_json_val list)
{
	struct kvp_json_iter it = kvp_json_each(list);
	while (kvp_json_next(&it)) {
		size_t len;
		uint8_t *hash = unhex(get_text(it.val, "msgpack_hex"), &len), buf[128];
		static const char head[] = "\x92\x01\x91\x92\xac"
					   "BlockRemoved"
					   "\x91";
		struct kvp_json_val want;
		struct kvp_kv_batch b;
		memcpy(buf, head, sizeof(head) - 1);
		memcpy(buf + sizeof(head) - 1, hash, len);
		kvp_json_get(it.val, "u64", &want);
		ok(kvp_kv_decode(d, buf, sizeof(head) - 1 + len, &b) == KVP_OK && b.event_cnt == 1 &&
				b.event[0].hash_cnt == 1 && b.event[0].hash[0] == decimal(want),
			"external hash: %s", get_text(it.val, "desc"));
		free(hash);
	}
}

/* ---- replay exchanges ---- */

static void send_raw(struct fx *f, zmq_msg_t *id)
{
	const struct kvp_json_val *replies = f->raw_ctx;
	struct kvp_json_iter it = kvp_json_each(*replies);
	while (kvp_json_next(&it)) {
		struct kvp_json_iter part = kvp_json_each(it.val);
		size_t left = kvp_json_len(it.val);
		fx_send_id(f, id);
		while (kvp_json_next(&part)) {
			const char *hex;
			size_t n;
			kvp_json_str(part.val, &hex, &n);
			uint8_t *p = unhex(hex, &n);
			zmq_send(f->router, p, n, --left ? ZMQ_SNDMORE : 0);
			free(p);
		}
	}
}

static void check_replay(
	struct fx *f, struct kvp_json_val expect, const char *name, uint64_t live, uint32_t from)
{
	const struct kvp_zmq_stats *st = kvp_zmq_sub_stats(f->sub);
	struct kvp_json_val v;
	uint32_t n = from, live_applied = 0;
	kvp_json_get(expect, "applied", &v);
	struct kvp_json_iter it = kvp_json_each(v);
	int same = 1;
	for (; kvp_json_next(&it); n++) {
		uint64_t want = 0;
		kvp_json_u64(it.val, &want);
		same &= n < f->cnt && f->seq[n] == want && f->src[n] == KVP_ZMQ_REPLAYED;
	}
	if (n < f->cnt)
		live_applied = f->src[n] == KVP_ZMQ_LIVE && f->seq[n] == live && n + 1 == f->cnt;
	ok(same && (n == f->cnt || live_applied), "%s: replayed batches in order", name);
	if (kvp_json_get(expect, "watermark", &v) == KVP_OK) {
		ok(!live_applied && st->stale == 1, "%s: the live batch is stale", name);
		is_u64(kvp_zmq_sub_cursor(f->sub)->w, get_num(expect, "watermark"), "%s: watermark", name);
	} else {
		ok(live_applied, "%s: the live batch is applied", name);
		is_u64(f->w_before_live, get_num(expect, "watermark_after_replay"),
			"%s: watermark after replay", name);
		is_u64(kvp_zmq_sub_cursor(f->sub)->w, live, "%s: watermark", name);
	}
	int complete = 0;
	kvp_json_get(expect, "complete", &v);
	kvp_json_bool(v, &complete);
	const char *reason = complete ? "complete" : get_text(expect, "reason");
	for (int r = 0; r < KVP_ZMQ_INCOMPLETE_CNT; r++)
		if (st->incomplete[r])
			is_str(kvp_zmq_incomplete_name((enum kvp_zmq_incomplete)r), reason, "%s: outcome",
				name);
	is_u64(st->ended[KVP_ZMQ_CAUSE_END], 1, "%s: ended by its marker", name);
}

static void test_exchange(struct kvp_json_val t)
{
	struct kvp_json_val gap, expect, v, replies;
	const char *name = get_text(t, "name");
	struct kvp_zmq_sub_cfg cfg = {.replay_endpoint = "yes"};
	struct fx f;
	fx_open(&f, &cfg, FX_RAW);
	kvp_json_get(t, "dealer_receives", &replies);
	kvp_json_get(t, "gap", &gap);
	kvp_json_get(t, "expect", &expect);
	f.raw = send_raw;
	f.raw_ctx = &replies;
	uint64_t start = 0, live = get_num(gap, "live_seq");
	if (get(gap, "watermark", &v)) {
		start = get_num(gap, "watermark") + 1;
		kvp_zmq_sub_after_snapshot(f.sub);
		fx_publish(&f, start - 1);
		fx_until(&f, f.cnt == 1);
	}
	uint32_t from = f.cnt;
	fx_publish(&f, live);
	fx_until(&f, f.requests == 1);
	fx_until(&f, kvp_zmq_sub_stats(f.sub)->stale + kvp_zmq_sub_stats(f.sub)->applied == from + 1);
	is_u64(f.request_start, start, "%s: first batch asked for", name);
	check_replay(&f, expect, name, live, from);
	fx_close(&f);
}

/* ---- cursor ---- */

static void test_step(struct kvp_json_val t, uint32_t idx)
{
	struct kvp_json_val v;
	struct kvp_zmq_cursor c;
	struct kvp_zmq_gap gap;
	if (!get(t, "seq", &v)) /* wrong frames: t_zmq_sub, over a socket */
		return;
	uint64_t seq = get_num(t, "seq");
	int has_w = get(t, "watermark", &v), no_endpoint = kvp_json_get(t, "replay_endpoint", &v) == KVP_OK;
	kvp_zmq_cursor_init(&c, !no_endpoint, 1000);
	if (has_w)
		kvp_zmq_cursor_applied(&c, get_num(t, "watermark"));
	c.after_snapshot = get(t, "after_peer_snapshot", &v) != 0;
	const char *observe = get_text(t, "observe"), *action = get_text(t, "action");
	int restart = strstr(action, "restart suspected") != NULL;
	if (has_w) { /* the vector has no live number: take the one that makes the observation possible */
		c.live = restart ? c.w : seq - 1 < c.w ? seq - 1 : c.w;
		c.has_live = 1;
	}
	enum kvp_zmq_verdict got = kvp_zmq_cursor_live(&c, seq, 1, &gap), want = KVP_ZMQ_APPLY;
	if (restart)
		want = KVP_ZMQ_RESET;
	else if (!strcmp(observe, "stale"))
		want = KVP_ZMQ_STALE;
	else if (!strncmp(action, "replay from", 11))
		want = KVP_ZMQ_REPLAY;
	ok(got == want, "cursor %u: %s, %s", idx, observe, action);
	if (want == KVP_ZMQ_REPLAY) {
		uint64_t from = strtoull(action + 12, NULL, 10);
		ok(gap.start == from && c.start == from && c.target == seq, "cursor %u: range of the replay",
			idx);
		kvp_zmq_cursor_replay_end(&c, KVP_ZMQ_CAUSE_END, 1);
	}
	if (no_endpoint)
		ok(gap.missing == 4 && gap.why == KVP_ZMQ_NO_ENDPOINT, "cursor %u: size of the gap", idx);
	if ((want == KVP_ZMQ_APPLY || want == KVP_ZMQ_REPLAY) && !get(t, "payload", &v))
		kvp_zmq_cursor_applied(&c, seq);
	if (!restart)
		is_u64(c.w, get_num(t, "watermark_after"), "cursor %u: watermark", idx);
}

int main(void)
{
	struct kvp_json *p = kvp_json_new(), *p2 = kvp_json_new();
	struct kvp_json_val root = load(p, "tests/vectors/kv_events.json"), list;
	struct kvp_json_val hashes = load(p2, "tests/vectors/hashes.json");
	struct kvp_kv_dec *d = kvp_kv_dec_new();
	kvp_json_get(root, "batches", &list);
	is_u64(kvp_json_len(list), 70, "70 payloads");
	struct kvp_json_iter it = kvp_json_each(list);
	while (kvp_json_next(&it))
		test_batch(d, it.val);
	kvp_json_get(hashes, "external_hash", &list);
	test_external(d, list);
	kvp_json_get(root, "replay_exchanges", &list);
	it = kvp_json_each(list);
	while (kvp_json_next(&it))
		test_exchange(it.val);
	kvp_json_get(root, "cursor", &list);
	kvp_json_get(list, "steps", &list);
	it = kvp_json_each(list);
	for (uint32_t i = 0; kvp_json_next(&it); i++)
		test_step(it.val, i);
	kvp_kv_dec_free(d);
	kvp_json_free(p);
	kvp_json_free(p2);
	return done();
}
