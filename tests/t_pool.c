/* Where requests may go: endpoints of the catalogue, subset hints, ports of ranks. */
#include "daemons/extproc/pool.h"
#include "tests/procs.h"
#include "tests/tap.h"

#include <stdlib.h>

#define S(text) KVP_EXTPROC_STR(text)

static struct kvp_geom geom = {.slot_max = 8,
	.rank_max = 64,
	.index_rank_max = 64,
	.resv_max = 64,
	.block_max = 10000,
	.active_block_max = 1024,
	.queued_max = 16,
	.part_max = 4,
	.region_gen = 7,
	.salt = {1, 2}};

static const char *record = "{}"; /* of the workers put next */

static enum kvp_part_role role_put; /* and their role */

static void put(struct kvp_cat_writer *w, uint64_t id, const char *endpoint, const char *model,
	enum kvp_lifecycle life, uint32_t ranks)
{
	static struct kvp_cat_worker_info info;
	uint32_t idx;
	memset(&info, 0, sizeof(info));
	info.worker_id = id;
	info.lifecycle = life;
	info.role = role_put;
	info.size = ranks;
	info.endpoint_len = (uint32_t)snprintf(info.endpoint, sizeof(info.endpoint), "%s", endpoint);
	info.model_len = (uint32_t)snprintf(info.model, sizeof(info.model), "%s", model);
	info.group_len = (uint32_t)snprintf(info.group, sizeof(info.group), "default");
	if (kvp_cat_w_worker_slot(w, id, &idx) ||
		kvp_cat_w_worker_put(w, idx, &info, record, (uint32_t)strlen(record)))
		exit(1);
}

static void drop(struct kvp_cat_writer *w, uint64_t id)
{
	uint32_t idx;
	if (kvp_cat_worker_find(&w->cat, id, &idx) || kvp_cat_w_worker_drop(w, idx))
		exit(1);
}

/* ids_text: "all" where nothing narrows them. */
static const char *ids_text(const uint64_t *ids, uint32_t n)
{
	static char text[200];
	size_t len = 0;
	if (!ids)
		return "all";
	text[0] = 0;
	for (uint32_t i = 0; i < n; i++)
		len += (size_t)snprintf(text + len, sizeof(text) - len, "%s%d", i ? "," : "", (int)ids[i]);
	return text;
}

/* domain_text gives the ids of a worker's transfer domain as text. */
static const char *domain_text(struct kvp_pool *p, uint64_t of, const struct kvp_extproc_str *e, uint32_t cnt)
{
	const struct kvp_pool_member *m = kvp_pool_worker(p, of);
	const uint64_t *ids;
	uint32_t n;
	if (!m ||
		kvp_pool_allow(p, e ? KVP_EXTPROC_HINT_PRESENT : KVP_EXTPROC_HINT_ABSENT, e, cnt, &ids, &n) ||
		kvp_pool_narrow(p, m->domain, &ids, &n))
		return "error";
	return ids_text(ids, n);
}

/* counts gives the workers of the three roles, as the next request sees them. */
static const char *counts(struct kvp_pool p[KVP_PART_ROLE_CNT])
{
	static char text[64];
	for (int i = 0; i < KVP_PART_ROLE_CNT; i++)
		if (kvp_pool_refresh(&p[i]))
			return "error";
	snprintf(text, sizeof(text), "%u %u %u", p[0].cnt, p[KVP_PART_PREFILL].cnt, p[KVP_PART_DECODE].cnt);
	return text;
}

static void as(struct kvp_cat_writer *w, uint64_t id, enum kvp_part_role role, enum kvp_lifecycle life)
{
	char at[32];
	role_put = role;
	snprintf(at, sizeof(at), "10.0.2.%d:80", (int)id);
	put(w, id, at, "m", life, 1);
	role_put = KVP_PART_AGGREGATED;
}

/* Whether a role has a worker is asked for every request. */
static void role_counters(struct kvp_cat_writer *w)
{
	struct kvp_pool p[KVP_PART_ROLE_CNT];
	uint32_t idx;
	for (int i = 0; i < KVP_PART_ROLE_CNT; i++)
		kvp_pool_open(&p[i], &w->cat, (enum kvp_part_role)i, (struct kvp_str){"m", 1},
			(struct kvp_str){"default", 7});
	is_str(counts(p), "0 0 0", "Roles: counters: nobody is there");
	as(w, 31, KVP_PART_PREFILL, KVP_LIFE_SCHEDULABLE);
	is_str(counts(p), "0 1 0", "Roles: counters independent: a prefill worker comes");
	as(w, 32, KVP_PART_DECODE, KVP_LIFE_SCHEDULABLE);
	as(w, 33, KVP_PART_DECODE, KVP_LIFE_SCHEDULABLE);
	is_str(counts(p), "0 1 2", "Roles: counters independent: two decode workers come");
	as(w, 34, KVP_PART_AGGREGATED, KVP_LIFE_SCHEDULABLE);
	is_str(counts(p), "1 1 2", "Roles: counters independent: one without a role comes");
	as(w, 33, KVP_PART_DECODE, KVP_LIFE_SCHEDULABLE);
	is_str(counts(p), "1 1 2", "Roles: counters: who comes twice counts once");
	as(w, 33, KVP_PART_PREFILL, KVP_LIFE_SCHEDULABLE);
	is_str(counts(p), "1 2 1",
		"Roles: counters independent: a relabelled one leaves a role for the other");
	as(w, 31, KVP_PART_PREFILL, KVP_LIFE_DRAINING);
	is_str(counts(p), "1 1 1", "Roles: counters independent: one that drains counts no more");
	drop(w, 31);
	is_str(counts(p), "1 1 1", "Roles: counters saturating: and is not taken off again when it goes");
	drop(w, 33);
	is_str(counts(p), "1 0 1", "Roles: counters independent: the last prefill worker goes");
	ok(kvp_cat_worker_find(&w->cat, 33, &idx) == KVP_ERR_NOTFOUND, "Roles: counters: it can't go twice");
	kvp_cat_worker_find(&w->cat, 32, &idx);
	drop(w, 32);
	ok(kvp_cat_w_worker_drop(w, idx) != KVP_OK, "Roles: counters: nor can the record of before");
	is_str(counts(p), "1 0 0", "Roles: counters saturating: no role is below nothing");
	drop(w, 34);
	is_str(counts(p), "0 0 0", "Roles: counters independent: and nobody is left");
	for (int i = 0; i < KVP_PART_ROLE_CNT; i++)
		kvp_pool_close(&p[i]);
}

static void domains(struct kvp_cat_writer *w, struct kvp_pool *p)
{
	static const char *const text[] = {"{\"kv_transfer_domain\":\"a\"}", "{\"kv_transfer_domain\":\"b\"}",
		"{\"kv_transfer_domain\":null}", "{}"};
	struct kvp_extproc_str two[] = {S("10.0.1.0:80"), S("10.0.1.3:80")};
	char at[32];
	for (uint64_t i = 0; i < 5; i++) {
		record = text[i < 4 ? i : 0];
		snprintf(at, sizeof(at), "10.0.1.%d:80", (int)i);
		put(w, 20 + i, at, "m", KVP_LIFE_SCHEDULABLE, 1);
	}
	ok(kvp_pool_read_domains(p) == KVP_OK && kvp_pool_refresh(p) == KVP_OK && p->cnt == 5,
		"with domains");
	is_str(domain_text(p, 20, NULL, 0), "20,22,23,24", "a worker's domain, and who has none");
	is_str(domain_text(p, 21, NULL, 0), "21,22,23", "another domain");
	is_str(domain_text(p, 22, NULL, 0), "all", "who has none goes with everybody");
	is_str(domain_text(p, 21, two, 2), "23", "of those that a hint leaves");
	is_str(domain_text(p, 20, two, 1), "20", "one");
	is_str(domain_text(p, 21, two, 1), "", "or none");
}

/* allowed gives the ids that a hint leaves as text; "all" without a list. */
static const char *allowed(struct kvp_pool *p, const struct kvp_extproc_str *e, uint32_t cnt)
{
	const uint64_t *ids;
	uint32_t n;
	if (kvp_pool_allow(p, e ? KVP_EXTPROC_HINT_PRESENT : KVP_EXTPROC_HINT_ABSENT, e, cnt, &ids, &n))
		return "error";
	return ids_text(ids, n);
}

static void hints(struct kvp_pool *p)
{
	static const struct {
		struct kvp_extproc_str e[2];
		const char *want;
	} row[] = {
		{{S("10.0.0.1:8000"), S("-")}, "1"},
		{{S("10.0.0.1"), S("-")}, "1,5"},
		{{S("10.0.0.1:9999"), S("-")}, ""},
		{{S("fd00::2"), S("-")}, "2"},
		{{S("[fd00::2]"), S("-")}, "2"},
		{{S("[fd00:0:0::2]:8000"), S("-")}, "2"},
		{{S("[fd00::2]:8001"), S("-")}, ""},
		{{S("10.0.0.3:8000"), S("10.0.0.1:8001")}, "3,5"},
		{{S("10.0.0.3"), S("10.0.0.3:8000")}, "3"},
		{{S("Engine-Four:80"), S("-")}, "4"},
		{{S("engine-four"), S("-")}, "4"},
		{{S("10.0.0.99"), S("10.0.0.1:")}, ""},
		{{S("[10.0.0.1]:8000"), S(":8000")}, ""},
		{{S("fd00::2:8000"), S("10.0.0.1:80000")}, ""},
		{{S("10.0.0.1:0"), S("10.0.0.1:8 0")}, ""},
	};
	for (size_t i = 0; i < sizeof(row) / sizeof(row[0]); i++)
		is_str(allowed(p, row[i].e, 2), row[i].want, "hint %.*s, %.*s", (int)row[i].e[0].len,
			row[i].e[0].p, (int)row[i].e[1].len, row[i].e[1].p);
	is_str(allowed(p, row[0].e, 0), "", "an empty hint leaves nobody");
	is_str(allowed(p, NULL, 0), "all", "no hint: everybody");
}

static void ports(struct kvp_pool *p)
{
	const struct kvp_pool_member *m = kvp_pool_worker(p, 3);
	char to[KVP_POOL_TEXT];
	uint32_t rank = 99;
	ok(kvp_pool_destination(m, 3, KVP_POOL_ONE_PORT, to, sizeof(to)) && strcmp(to, "10.0.0.3:8000") == 0,
		"all ranks behind one port");
	ok(kvp_pool_destination(m, 3, KVP_POOL_RANK_PORTS, to, sizeof(to)) &&
			strcmp(to, "10.0.0.3:8003") == 0,
		"a port for each rank");
	ok(kvp_pool_at(p, (struct kvp_extproc_str)S("10.0.0.3:8002"), KVP_POOL_RANK_PORTS, &rank) == m &&
			rank == 2,
		"and back");
	ok(!kvp_pool_at(p, (struct kvp_extproc_str)S("10.0.0.3:8002"), KVP_POOL_ONE_PORT, &rank),
		"which is nobody's without");
	ok(!kvp_pool_at(p, (struct kvp_extproc_str)S("10.0.0.3:8004"), KVP_POOL_RANK_PORTS, &rank),
		"a port beyond the ranks is nobody's");
	ok(!kvp_pool_destination(m, 60000, KVP_POOL_RANK_PORTS, to, sizeof(to)), "no port above 65535");
	m = kvp_pool_worker(p, 2);
	ok(kvp_pool_destination(m, 0, KVP_POOL_ONE_PORT, to, sizeof(to)) && strcmp(to, "[fd00::2]:8000") == 0,
		"IPv6 keeps its brackets");
	ok(!kvp_pool_destination(m, 0, KVP_POOL_ONE_PORT, to, 10), "too little room is told");
}

int main(void)
{
	uint64_t bytes = kvp_catalogue_footprint(&geom);
	void *mem = shared(bytes);
	struct kvp_cat cat;
	struct kvp_cat_writer w;
	struct kvp_pool p;
	if (kvp_catalogue_new(mem, &geom) || kvp_catalogue_join(mem, &geom, &cat) ||
		kvp_cat_w_open(&cat, &w))
		return 1;
	kvp_pool_open(
		&p, &cat, KVP_PART_AGGREGATED, (struct kvp_str){"m", 1}, (struct kvp_str){"default", 7});
	ok(kvp_pool_refresh(&p) == KVP_OK && p.cnt == 0, "an empty catalogue is an empty pool");
	ok(!kvp_pool_any(&p, NULL, 0) && !kvp_pool_worker(&p, 1), "with nobody in it");
	put(&w, 4, "http://Engine-Four:80/", "m", KVP_LIFE_SCHEDULABLE, 1);
	put(&w, 3, "10.0.0.3:8000", "m", KVP_LIFE_SCHEDULABLE, 4);
	put(&w, 2, "http://[fd00::2]:8000/v1?x=1", "m", KVP_LIFE_SCHEDULABLE, 1);
	put(&w, 1, "http://10.0.0.1:8000", "m", KVP_LIFE_SCHEDULABLE, 1);
	put(&w, 5, "https://10.0.0.1:8001", "m", KVP_LIFE_SCHEDULABLE, 1);
	put(&w, 6, "http://10.0.0.6:8000", "other", KVP_LIFE_SCHEDULABLE, 1);
	put(&w, 7, "http://10.0.0.7:8000", "m", KVP_LIFE_DRAINING, 1);
	ok(kvp_pool_refresh(&p) == KVP_OK && p.cnt == 5 && !p.unusable, "schedulable workers of the model");
	hints(&p);
	ports(&p);
	uint32_t seen = 0;
	const uint64_t two[] = {1, 5};
	for (int i = 0; i < 10; i++)
		seen |= 1u << kvp_pool_any(&p, NULL, 0)->worker_id;
	is_u64(seen, 0x3e, "everybody has a turn");
	seen = 0;
	for (int i = 0; i < 4; i++)
		seen |= 1u << kvp_pool_any(&p, two, 2)->worker_id;
	is_u64(seen, 1u << 1 | 1u << 5, "of those allowed, too");
	ok(!kvp_pool_any(&p, two, 0), "nobody is allowed, nobody is given");
	put(&w, 8, "http://10.0.0.8", "m", KVP_LIFE_SCHEDULABLE, 1);
	put(&w, 9, "http://fd00::9:8000", "m", KVP_LIFE_SCHEDULABLE, 1);
	put(&w, 10, "grpc://", "m", KVP_LIFE_SCHEDULABLE, 1);
	drop(&w, 1);
	ok(kvp_pool_refresh(&p) == KVP_OK && p.cnt == 4 && p.unusable == 3,
		"no port, no brackets, nothing at all");
	is_str(allowed(&p, NULL, 0), "2,3,4,5", "then selections are told whom they may choose");
	ok(!kvp_pool_worker(&p, 1) && kvp_pool_worker(&p, 5), "a worker that left is gone");
	for (uint64_t i = 2; i <= 10; i++)
		drop(&w, i);
	domains(&w, &p);
	kvp_pool_close(&p);
	for (uint64_t i = 20; i < 25; i++)
		drop(&w, i);
	role_counters(&w);
	kvp_cat_w_close(&w);
	return done();
}
