/* The reader of dumps: published examples, members in any order, any cut, and everything that must be
 * refused. */
#include "ipc/dump_read.h"

#include <kvpick/err.h>

#include "tests/vec.h"

#define EVENTS_MAX 64
#define BLOCKS_MAX 8

struct event {
	uint64_t worker, parent, ext[BLOCKS_MAX], local[BLOCKS_MAX];
	uint32_t rank, n;
	int op, tier, has_parent, part;
};
struct got {
	struct event ev[EVENTS_MAX];
	uint32_t cnt, part_cnt, size[EVENTS_MAX];
	char key[EVENTS_MAX][64];
	int answer; /* of the callbacks */
};

static uint64_t seed_state;
static uint64_t rnd(uint64_t n)
{
	seed_state += 0x9e3779b97f4a7c15u;
	uint64_t z = seed_state;
	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
	return (z ^ (z >> 31)) % n;
}

static int on_part(void *ctx, const char *key, uint32_t len, uint32_t block_size)
{
	struct got *g = ctx;
	if (g->part_cnt == EVENTS_MAX)
		return KVP_ERR_FULL;
	snprintf(g->key[g->part_cnt], sizeof(g->key[0]), "%.*s", (int)len, key);
	g->size[g->part_cnt++] = block_size;
	return g->answer;
}

static int on_event(void *ctx, const struct kvp_dread_event *e)
{
	struct got *g = ctx;
	if (g->cnt == EVENTS_MAX || e->n > BLOCKS_MAX)
		return KVP_ERR_FULL;
	struct event *o = &g->ev[g->cnt++];
	*o = (struct event){.worker = e->worker_id,
		.parent = e->has_parent ? e->parent : 0,
		.rank = e->dp_rank,
		.n = e->n,
		.op = e->op,
		.tier = e->tier,
		.has_parent = e->has_parent,
		.part = (int)g->part_cnt - 1};
	if (e->n)
		memcpy(o->ext, e->ext, 8ull * e->n);
	if (e->op == KVP_DREAD_STORE)
		memcpy(o->local, e->local, 8ull * e->n);
	return g->answer;
}

/* Reads a text in pieces of at most `piece` bytes, random below that with piece 0. */
static int read_text(const char *text, size_t len, size_t piece, struct got *g, char err[256])
{
	struct kvp_dread_cfg cfg = {on_part, on_event, g};
	struct kvp_dread *d = kvp_dread_new(&cfg);
	int rc = KVP_OK;
	memset(g, 0, sizeof(*g));
	for (size_t at = 0, n; !rc && at < len; at += n) {
		n = piece ? piece : 1 + rnd(40);
		n = n < len - at ? n : len - at;
		char *copy = malloc(n);
		memcpy(copy, text + at, n);
		rc = kvp_dread_feed(d, copy, n);
		free(copy);
	}
	if (!rc)
		rc = kvp_dread_end(d);
	if (rc)
		is_u64((uint64_t)kvp_dread_feed(d, "1", 1), (uint64_t)rc, "the same answer again");
	if (err)
		snprintf(err, 256, "%s", kvp_dread_error(d));
	kvp_dread_free(d);
	return rc;
}

static int read_all(const char *text, struct got *g)
{
	return read_text(text, strlen(text), 4096, g, NULL);
}

/* -- published examples -- */

static void examples(void)
{
	static const char one[] =
		"{\"model:default\":{\"block_size\":16,\"events\":[{\"worker_id\":1,\"storage_tier\":"
		"\"device\",\"event\":{\"event_id\":0,\"data\":{\"stored\":{\"parent_hash\":null,"
		"\"start_position\":null,\"blocks\":[{\"block_hash\":18446744073709551615,\"tokens_hash\":11,"
		"\"mm_extra_info\":null},{\"block_hash\":102,\"tokens_hash\":12,\"mm_extra_info\":null}]}},"
		"\"dp_rank\":0}},{\"worker_id\":1,\"storage_tier\":\"host_pinned\",\"residency_domain\":"
		"\"worker\",\"event\":{\"event_id\":1,\"data\":{\"stored\":{\"parent_hash\":102,"
		"\"start_position\":2,\"blocks\":[{\"block_hash\":103,\"tokens_hash\":13}]}},\"dp_rank\":0}}]"
		"}}";
	struct got g;
	for (size_t piece = 1; piece < 40; piece += 7) {
		ok(read_text(one, sizeof(one) - 1, piece, &g, NULL) == KVP_OK, "pieces of %zu bytes", piece);
		ok(g.part_cnt == 1 && g.size[0] == 16 && strcmp(g.key[0], "model:default") == 0 && g.cnt == 2,
			"a partition, two events");
		ok(g.ev[0].n == 2 && g.ev[0].ext[0] == UINT64_MAX && g.ev[0].local[1] == 12 &&
				!g.ev[0].has_parent && g.ev[0].tier == KVP_DREAD_DEVICE,
			"exact hashes, no parent");
		ok(g.ev[1].n == 1 && g.ev[1].has_parent && g.ev[1].parent == 102 && g.ev[1].ext[0] == 103 &&
				g.ev[1].tier == KVP_DREAD_HOST,
			"a child in the host tier");
	}
}

static void legacy_and_others(void)
{
	struct got g;
	ok(read_all("{\"m:default\":{\"block_size\":4,\"events\":[{\"worker_id\":1,\"event\":{\"event_id\":0,"
		    "\"data\":{\"stored\":{\"parent_hash\":null,\"blocks\":[{\"block_hash\":5,\"tokens_"
		    "hash\":6}]"
		    "}}}}]}}",
		   &g) == KVP_OK &&
			g.cnt == 1 && g.ev[0].rank == 0 && g.ev[0].tier == KVP_DREAD_DEVICE &&
			g.ev[0].ext[0] == 5 && g.ev[0].local[0] == 6,
		"without tier, rank and domain");
	ok(read_all(" { } ", &g) == KVP_OK && g.cnt == 0, "an empty dump");
	ok(read_all("{\"a:b:c\":{\"events\":[],\"block_size\":8}}", &g) == KVP_OK && g.part_cnt == 1 &&
			strcmp(g.key[0], "a:b:c") == 0,
		"a partition without events");
	ok(read_all("{\"m:g\":{\"block_size\":16,\"events\":[{\"worker_id\":3,\"storage_tier\":\"host_"
		    "pinned\","
		    "\"event\":{\"event_id\":1,\"data\":{\"stored\":{\"parent_hash\":1,\"blocks\":[{\"block_"
		    "hash\":2,"
		    "\"tokens_hash\":3,\"mm_extra_info\":{\"mm_objects\":[{\"mm_hash\":9,\"offsets\":[[0,2]]}"
		    "]}}]}},"
		    "\"dp_rank\":1}},{\"worker_id\":3,\"event\":{\"event_id\":2,\"data\":{\"removed\":{"
		    "\"block_hashes\":[2]}},\"dp_rank\":1}},{\"worker_id\":3,\"event\":{\"event_id\":3,"
		    "\"data\":"
		    "\"cleared\",\"dp_rank\":1}}]}}",
		   &g) == KVP_OK &&
			g.cnt == 3 && g.ev[1].op == KVP_DREAD_REMOVE && g.ev[1].ext[0] == 2 &&
			g.ev[1].rank == 1 && g.ev[2].op == KVP_DREAD_CLEAR,
		"stored with multimodal information, removed, cleared");
	ok(read_all("{\"m:g\":{\"x\":[{}],\"block_size\":4,\"events\":["
		    "{\"worker_id\":1,\"residency_domain\":\"cache_owner\",\"event\":{\"new\":[1,{}]}},"
		    "{\"worker_id\":1,\"event\":{\"event_id\":1,\"data\":\"cleared\"},\"state_source\":{"
		    "\"a\":1}},"
		    "{\"worker_id\":1,\"event\":{\"event_id\":1,\"data\":{\"stored\":{\"blocks\":[]}}}}"
		    "]},\"n:g\":{\"block_size\":8,\"events\":[]}}",
		   &g) == KVP_OK &&
			g.cnt == 0 && g.part_cnt == 2,
		"events of cache owners are left out, and a store of nothing");
}

#define EVENT(x) "{\"m:g\":{\"block_size\":4,\"events\":[" x "]}}"
#define INNER(x) EVENT("{\"worker_id\":1,\"event\":{\"event_id\":1,\"data\":" x "}}")
#define BLOCK(x) INNER("{\"stored\":{\"blocks\":[" x "]}}")

static void refused(void)
{
	static const char *const bad[] = {"", "[]", "null", "7", "{", "{\"m:g\":", "{}x", "{}{}",
		"{\"m\":{\"block_size\":4,\"events\":[]}}", "{\"m:g\":[]}",
		"{\"m:g\":{\"error\":\"offline\"}}", "{\"m:g\":{\"block_size\":4}}",
		"{\"m:g\":{\"events\":[]}}", "{\"m:g\":{\"block_size\":0,\"events\":[]}}",
		"{\"m:g\":{\"block_size\":-4,\"events\":[]}}",
		"{\"m:g\":{\"block_size\":4294967296,\"events\":[]}}",
		"{\"m:g\":{\"block_size\":\"4\",\"events\":[]}}",
		"{\"m:g\":{\"block_size\":4,\"events\":{}}}",
		"{\"m:g\":{\"block_size\":4,\"block_size\":4,\"events\":[]}}", EVENT("7"), EVENT("{}"),
		EVENT("{\"worker_id\":1}"), EVENT("{\"worker_id\":-1,\"event\":{}}"),
		EVENT("{\"event\":{\"event_id\":1,\"data\":\"cleared\"}}"),
		EVENT("{\"worker_id\":1,\"residency_domain\":null,\"event\":{\"event_id\":1,\"data\":"
		      "\"cleared\"}}"),
		EVENT("{\"worker_id\":1,\"storage_tier\":\"tape\",\"event\":{\"event_id\":1,\"data\":"
		      "\"cleared\"}}"),
		EVENT("{\"worker_id\":1,\"event\":{\"data\":\"cleared\"}}"), INNER("\"gone\""), INNER("{}"),
		INNER("{\"moved\":{}}"), INNER("{\"stored\":{}}"), INNER("{\"removed\":{}}"),
		INNER("{\"removed\":{\"block_hashes\":[1.5]}}"),
		INNER("{\"removed\":{\"block_hashes\":[18446744073709551616]}}"), BLOCK("{\"block_hash\":1}"),
		BLOCK("{\"tokens_hash\":1}"), BLOCK("{\"block_hash\":1e3,\"tokens_hash\":1}"),
		BLOCK("{\"block_hash\":-1,\"tokens_hash\":1}"),
		BLOCK("{\"block_hash\":1,\"tokens_hash\":18446744073709551616}"),
		BLOCK("{\"block_hash\":1,\"tokens_hash\":1,\"mm_extra_info\":7}"), BLOCK("1"),
		"{\"m:g\":{\"block_size\":4,\"events\":[]}} trailing",
		"{\"m:g\":{\"block_size\":4,\"events\":[],}}",
		"{\"m\xff:g\":{\"block_size\":4,\"events\":[]}}"};
	struct got g;
	char err[256];
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		int rc = read_text(bad[i], strlen(bad[i]), 3, &g, err);
		ok(rc == KVP_ERR_PROTO && err[0], "refused: %.60s: %s", bad[i], err);
	}
	static const char good[] = BLOCK("{\"block_hash\":1,\"tokens_hash\":1}");
	int whole = 0;
	for (size_t n = 0; n + 1 < sizeof(good); n++)
		whole += read_text(good, n, 5, &g, NULL) != KVP_ERR_PROTO;
	ok(!whole, "cut off anywhere it is refused");
}

/* Memory is bounded whatever comes. */
static void limits(void)
{
	struct got g = {.cnt = 0};
	struct kvp_dread_cfg cfg = {on_part, on_event, &g};
	static char piece[65536];
	struct kvp_dread *d = kvp_dread_new(&cfg);
	int rc = kvp_dread_feed(d, "{\"", 2);
	memset(piece, 'a', sizeof(piece));
	for (int i = 0; !rc && i < 100; i++)
		rc = kvp_dread_feed(d, piece, sizeof(piece));
	ok(rc == KVP_ERR_LIMIT, "an endless key: %s", kvp_dread_error(d));
	kvp_dread_free(d);
	d = kvp_dread_new(&cfg);
	rc = kvp_dread_feed(d, "{\"m:g\":{\"x\":", 12);
	memset(piece, '[', sizeof(piece));
	for (int i = 0; !rc && i < 100; i++)
		rc = kvp_dread_feed(d, piece, sizeof(piece));
	ok(rc == KVP_ERR_LIMIT, "endless nesting: %s", kvp_dread_error(d));
	kvp_dread_free(d);
	d = kvp_dread_new(&cfg);
	memset(piece, ' ', sizeof(piece));
	for (rc = 0; !rc;)
		rc = kvp_dread_feed(d, piece, sizeof(piece));
	ok(rc == KVP_ERR_LIMIT, "endless white space: %s", kvp_dread_error(d));
	kvp_dread_free(d);
	static const char all[] = BLOCK("{\"block_hash\":1,\"tokens_hash\":1}");
	d = kvp_dread_new(&cfg);
	g.answer = KVP_ERR_CLOSED;
	ok(kvp_dread_feed(d, all, sizeof(all) - 1) == KVP_ERR_CLOSED,
		"what a callback answers is the result");
	kvp_dread_free(d);
}

/* -- random dumps with their members in any order -- */

static char text[1 << 18];
static size_t text_len;
static void put(const char *s)
{
	size_t n = strlen(s);
	memcpy(text + text_len, s, n);
	text_len += n;
}
static void put_u64(uint64_t v)
{
	char t[24];
	snprintf(t, sizeof(t), "%llu", (unsigned long long)v);
	put(t);
}

static void shuffle(int *a, int n)
{
	for (int i = n - 1; i > 0; i--) {
		int k = (int)rnd((uint64_t)i + 1), t = a[i];
		a[i] = a[k];
		a[k] = t;
	}
}

static void put_data(const struct event *e)
{
	if (e->op == KVP_DREAD_CLEAR) {
		put("\"cleared\"");
		return;
	}
	put(e->op == KVP_DREAD_STORE ? "{\"stored\":{" : "{\"removed\":{\"block_hashes\":[");
	int parent_first = (int)rnd(2);
	for (int k = 0; e->op == KVP_DREAD_STORE && k < 2; k++) {
		if (k)
			put(",");
		if (k == parent_first) {
			put("\"parent_hash\":");
			if (e->has_parent)
				put_u64(e->parent);
			else
				put("null");
			continue;
		}
		put("\"blocks\" : [");
		for (uint32_t i = 0; i < e->n; i++) {
			int swap = (int)rnd(2);
			put(i ? ",{\"" : "{\"");
			put(swap ? "tokens_hash\":" : "block_hash\":");
			put_u64(swap ? e->local[i] : e->ext[i]);
			put(swap ? ",\"block_hash\":" : ",\"tokens_hash\":");
			put_u64(swap ? e->ext[i] : e->local[i]);
			put("}");
		}
		put("]");
	}
	for (uint32_t i = 0; e->op == KVP_DREAD_REMOVE && i < e->n; i++) {
		put(i ? "," : "");
		put_u64(e->ext[i]);
	}
	put(e->op == KVP_DREAD_STORE ? "}}" : "]}}");
}

static void put_event(const struct event *e)
{
	static const char *const tier[] = {"device", "host_pinned", "disk", "external"};
	int outer[] = {0, 1, 2, 3}, inner[] = {0, 1, 2, 3};
	shuffle(outer, 4);
	shuffle(inner, 4);
	put("{");
	for (int i = 0; i < 4; i++) {
		put(i ? ", " : "");
		if (outer[i] == 0) {
			put("\"worker_id\":");
			put_u64(e->worker);
		} else if (outer[i] == 1) {
			put("\"storage_tier\":\"");
			put(tier[e->tier]);
			put("\"");
		} else if (outer[i] == 2) {
			put("\"other\":{\"worker_id\":[1,{\"event\":null}]}");
		} else {
			put("\"event\":{");
			for (int k = 0; k < 4; k++) {
				put(k ? "," : "");
				if (inner[k] == 0)
					put("\"event_id\":17");
				else if (inner[k] == 1)
					put("\"more\":[true]");
				else if (inner[k] == 2)
					put("\"data\":");
				else
					put("\"dp_rank\":");
				if (inner[k] == 2)
					put_data(e);
				if (inner[k] == 3)
					put_u64(e->rank);
			}
			put("}");
		}
	}
	put("}");
}

static uint64_t any_hash(void)
{
	return rnd(4) ? rnd(UINT64_MAX) : UINT64_MAX - rnd(3);
}

static void random_event(struct event *e, int part)
{
	*e = (struct event){.worker = any_hash(), .rank = (uint32_t)rnd(UINT32_MAX), .part = part};
	e->op = (int)rnd(3);
	e->tier = (int)rnd(4);
	e->has_parent = e->op == KVP_DREAD_STORE && rnd(2);
	e->parent = e->has_parent ? any_hash() : 0;
	e->n = e->op == KVP_DREAD_CLEAR ? 0 : 1 + (uint32_t)rnd(BLOCKS_MAX);
	for (uint32_t i = 0; i < e->n; i++) {
		e->ext[i] = any_hash();
		e->local[i] = e->op == KVP_DREAD_STORE ? any_hash() : 0;
	}
}

static void random_dumps(void)
{
	struct got want, g;
	int bad = 0;
	for (int round = 0; round < 400; round++) {
		memset(&want, 0, sizeof(want));
		text_len = 0;
		put("{");
		int parts = (int)rnd(4);
		for (int p = 0; p < parts; p++) {
			int size_first = (int)rnd(2), cnt = (int)rnd(12);
			snprintf(want.key[want.part_cnt], sizeof(want.key[0]), "model%d:g:%d", p, round);
			want.size[want.part_cnt++] = 1 + (uint32_t)rnd(UINT32_MAX);
			put(p ? ",\"" : "\"");
			put(want.key[p]);
			put(size_first ? "\":{\"block_size\":" : "\":{\"events\":[");
			if (size_first) {
				put_u64(want.size[p]);
				put(",\"events\":[");
			}
			for (int i = 0; i < cnt; i++) {
				struct event *e = &want.ev[want.cnt++];
				random_event(e, p);
				put(i ? "," : "");
				put_event(e);
			}
			put("]");
			if (!size_first) {
				put(",\"block_size\":");
				put_u64(want.size[p]);
			}
			put("}");
		}
		put("}");
		bad += read_text(text, text_len, rnd(3) ? 0 : 4096, &g, NULL) != KVP_OK ||
		       memcmp(&g, &want, sizeof(g)) != 0;
	}
	ok(!bad, "400 random dumps are read as they were meant (%d were not)", bad);
}

int main(void)
{
	seed_state = tap_seed(20261130);
	examples();
	legacy_and_others();
	refused();
	limits();
	random_dumps();
	return done();
}
