#include "daemons/discovery/catalog.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum state { IDLE, POSTED, DELETED }; /* a command of the entry is under way */

struct entry {
	uint64_t worker_id;
	char *json; /* wanted; NULL = not */
	uint32_t len;
	unsigned told : 1, schedulable : 1, refused : 1, tried : 1; /* told: json, as it is */
	enum state state;
	struct kvp_cmd_cell *cell;
	uint64_t deadline_ns;
};

struct kvp_catalog {
	struct kvp_catalog_cfg cfg;
	struct kvp_json *json;
	struct entry *entry; /* by worker_id */
	uint32_t cnt, flying;
	int is_set, is_passing, has_ids, failed_in_pass;
	uint64_t retry_ns;
	struct kvp_catalog_stat stat;
};

static int by_id(const void *x, const void *y)
{
	const struct entry *a = x, *b = y;
	return (a->worker_id > b->worker_id) - (a->worker_id < b->worker_id);
}

/* ---- the file of our ids ---- */

static int keep_ids(const struct kvp_catalog *c)
{
	char path[1200];
	if (!c->cfg.ids_path)
		return KVP_OK;
	int n = snprintf(path, sizeof(path), "%s.new", c->cfg.ids_path);
	int fd = n > 0 && (size_t)n < sizeof(path)
			 ? open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600)
			 : -1;
	FILE *out = fd < 0 ? NULL : fdopen(fd, "w");
	if (!out) {
		if (fd >= 0)
			close(fd);
		return KVP_ERR_SYS;
	}
	fprintf(out, "%" PRIu64 "\n", c->cfg.region_gen);
	for (uint32_t i = 0; i < c->cnt; i++)
		fprintf(out, "%" PRIu64 "\n", c->entry[i].worker_id);
	int bad = fflush(out) | ferror(out);
	bad |= fclose(out);
	return bad || rename(path, c->cfg.ids_path) ? KVP_ERR_SYS : KVP_OK;
}

/* A file that breaks off names fewer ids: what it does not name stays registered until it is deleted by
 * hand. */
static int read_ids(struct kvp_catalog *c)
{
	FILE *in = c->cfg.ids_path ? fopen(c->cfg.ids_path, "re") : NULL;
	uint64_t v;
	uint32_t cap = 0;
	int rc = KVP_OK;
	if (!in)
		return KVP_OK;
	if (fscanf(in, "%" SCNu64, &v) == 1 && v == c->cfg.region_gen) {
		while (!rc && fscanf(in, "%" SCNu64, &v) == 1) {
			if (c->cnt == cap) {
				cap = cap ? 2 * cap : 256;
				struct entry *grown = realloc(c->entry, cap * sizeof(*grown));
				rc = grown ? KVP_OK : KVP_ERR_SYS;
				c->entry = grown ? grown : c->entry;
			}
			if (!rc)
				c->entry[c->cnt++] = (struct entry){.worker_id = v};
		}
		c->has_ids = c->cnt > 0;
	}
	fclose(in);
	if (c->cnt)
		qsort(c->entry, c->cnt, sizeof(*c->entry), by_id);
	return rc;
}

int kvp_catalog_open(struct kvp_catalog **out, const struct kvp_catalog_cfg *cfg)
{
	struct kvp_catalog *c = calloc(1, sizeof(*c));
	if (!c)
		return KVP_ERR_SYS;
	c->cfg = *cfg;
	c->json = kvp_json_new();
	if (!c->json || read_ids(c)) {
		kvp_catalog_close(c);
		return KVP_ERR_SYS;
	}
	*out = c;
	return KVP_OK;
}

void kvp_catalog_close(struct kvp_catalog *c)
{
	if (!c)
		return;
	for (uint32_t i = 0; i < c->cnt; i++) {
		if (c->entry[i].state != IDLE)
			kvp_cmd_end(c->cfg.ring, c->entry[i].cell);
		free(c->entry[i].json);
	}
	free(c->entry);
	kvp_json_free(c->json);
	free(c);
}

/* ---- what is wanted ---- */

static void drop_news(struct entry *e, uint32_t cnt)
{
	for (uint32_t i = 0; i < cnt; i++)
		free(e[i].json);
	free(e);
}

/* read_wanted makes sorted entries of a picture. */
static int read_wanted(const struct kvp_catalog_want *want, uint32_t cnt, struct entry **out, uint64_t *twice)
{
	struct entry *e = calloc((size_t)cnt + 1, sizeof(*e));
	int rc = e ? KVP_OK : KVP_ERR_SYS;
	for (uint32_t i = 0; i < cnt && !rc; i++) {
		e[i].worker_id = want[i].worker_id;
		e[i].len = want[i].len;
		e[i].json = malloc((size_t)want[i].len + 1);
		rc = !e[i].json ? KVP_ERR_SYS : want[i].len > KVP_CMD_PAYLOAD_MAX ? KVP_ERR_LIMIT : KVP_OK;
		if (!rc)
			memcpy(e[i].json, want[i].json, want[i].len);
	}
	if (!rc)
		qsort(e, cnt, sizeof(*e), by_id);
	for (uint32_t i = 1; i < cnt && !rc; i++)
		if (e[i].worker_id == e[i - 1].worker_id) {
			*twice = e[i].worker_id;
			rc = KVP_ERR_EXISTS;
		}
	if (rc && e)
		drop_news(e, cnt);
	else if (!rc)
		*out = e;
	return rc;
}

/* is_schedulable_now asks the catalogue: somebody may have deleted or changed the worker meanwhile. */
static int is_schedulable_now(const struct kvp_catalog *c, uint64_t worker_id)
{
	struct kvp_cat_worker_info *w = c->cfg.cat ? malloc(sizeof(*w)) : NULL;
	uint32_t idx;
	int yes = !c->cfg.cat;
	if (w)
		yes = kvp_cat_worker_find(c->cfg.cat, worker_id, &idx) == KVP_OK &&
		      kvp_cat_worker_info(c->cfg.cat, idx, w) == KVP_OK && w->worker_id == worker_id &&
		      w->lifecycle == KVP_LIFE_SCHEDULABLE;
	free(w);
	return yes;
}

/* take gives a newly wanted entry what is known of its id. */
static void take(const struct kvp_catalog *c, const struct entry *old, struct entry *e)
{
	int same = old->json && old->len == e->len && memcmp(old->json, e->json, old->len) == 0;
	e->told = same && old->told;
	e->schedulable = same && old->schedulable && is_schedulable_now(c, old->worker_id);
	e->refused = same && old->refused;
	e->state = old->state;
	e->cell = old->cell;
	e->deadline_ns = old->deadline_ns;
}

int kvp_catalog_set(struct kvp_catalog *c, const struct kvp_catalog_want *want, uint32_t cnt, uint64_t *twice)
{
	struct entry *now = NULL;
	int rc = read_wanted(want, cnt, &now, twice);
	if (rc)
		return rc;
	struct entry *all = realloc(now, ((size_t)cnt + c->cnt + 1) * sizeof(*all));
	if (!all) {
		drop_news(now, cnt);
		return KVP_ERR_SYS;
	}
	uint32_t n = cnt;
	for (uint32_t i = 0; i < c->cnt; i++) {
		struct entry key = {.worker_id = c->entry[i].worker_id}, *old = &c->entry[i];
		struct entry *e = cnt ? bsearch(&key, all, cnt, sizeof(key), by_id) : NULL;
		if (e)
			take(c, old, e);
		free(old->json);
		old->json = NULL;
		old->len = 0;
		if (!e)
			all[n++] = *old;
	}
	for (uint32_t i = 0; i < n; i++)
		all[i].tried = 0;
	qsort(all, n, sizeof(*all), by_id);
	free(c->entry);
	c->entry = all;
	c->cnt = n;
	c->stat.wanted = cnt;
	c->is_set = c->is_passing = 1;
	c->failed_in_pass = keep_ids(c) != KVP_OK; /* else a successor would not know them: later once more */
	return KVP_OK;
}

/* ---- passes ---- */

static int send(struct kvp_catalog *c, struct entry *e, enum state as, uint64_t now_ns)
{
	void *payload;
	if (kvp_cmd_begin(c->cfg.ring, c->cfg.owner, &e->cell, &payload) != KVP_OK)
		return 0;
	e->cell->worker_id = e->worker_id;
	if (as == POSTED)
		memcpy(payload, e->json, e->len);
	kvp_cmd_post(c->cfg.ring, e->cell, as == POSTED ? KVP_CMD_WORKER_POST : KVP_CMD_WORKER_DELETE,
		as == POSTED ? e->len : 0);
	e->state = as;
	e->tried = 1;
	e->told = as == POSTED; /* unless the wish changes while it is under way: see take */
	e->deadline_ns = now_ns + KVP_CATALOG_REPLY_NS;
	c->flying++;
	return 1;
}

static int reply_is_schedulable(struct kvp_catalog *c, const char *text, size_t len)
{
	struct kvp_json_val root, v;
	return kvp_json_parse(c->json, text, len, KVP_JSON_DEPTH_MAX, &root, NULL) == KVP_OK &&
	       kvp_json_get(root, "lifecycle", &v) == KVP_OK && kvp_json_str_is(v, "schedulable");
}

/* answered judges the answer to a command; 1 = it did what it should. */
static int answered(struct kvp_catalog *c, struct entry *e, int status,
	void (*refused)(void *ctx, uint64_t worker_id, int status, const char *text, size_t len), void *ctx)
{
	const char *text = kvp_cmd_buffer(c->cfg.ring, e->cell);
	size_t len = status < 0 ? 0 : e->cell->reply_len;
	if (e->state == DELETED)
		return (status >= 200 && status < 300) || status == 404;
	e->schedulable = status >= 200 && status < 300 && reply_is_schedulable(c, text, len);
	e->refused = status >= 400;
	if (status >= 200 && status < 300)
		return 1;
	e->told = 0;
	if (refused)
		refused(ctx, e->worker_id, status, text, len);
	return 0;
}

static void collect(struct kvp_catalog *c, uint64_t now_ns,
	void (*refused)(void *ctx, uint64_t worker_id, int status, const char *text, size_t len), void *ctx)
{
	uint32_t kept = 0;
	for (uint32_t i = 0; i < c->cnt; i++) {
		struct entry *e = &c->entry[i];
		int done = e->state != IDLE && kvp_cmd_done(c->cfg.ring, e->cell);
		int gone = 0;
		if (e->state != IDLE && (done || now_ns >= e->deadline_ns)) {
			int good = answered(c, e, done ? e->cell->status : KVP_ERR_TIMEOUT, refused, ctx);
			gone = good && e->state == DELETED && !e->json;
			c->failed_in_pass |= !good;
			kvp_cmd_end(c->cfg.ring, e->cell);
			e->state = IDLE;
			c->flying--;
		}
		if (!gone)
			c->entry[kept++] = *e;
	}
	c->cnt = kept;
}

/* wants_post: it is new, has changed, or was not schedulable when it was told last. */
static int wants_post(const struct entry *e)
{
	return e->json && e->state == IDLE && !e->tried && !(e->told && e->schedulable);
}

/* go_on sends what the window takes; 1 = the pass has ended. */
static int go_on(struct kvp_catalog *c, uint64_t now_ns)
{
	int posting = 0;
	for (uint32_t i = 0; i < c->cnt; i++) {
		struct entry *e = &c->entry[i];
		if (wants_post(e) && (c->flying >= KVP_CATALOG_WINDOW || !send(c, e, POSTED, now_ns)))
			return 0;
		posting |= e->state == POSTED;
	}
	for (uint32_t i = 0; i < c->cnt && !posting; i++) {
		struct entry *e = &c->entry[i];
		if (!e->json && e->state == IDLE && !e->tried &&
			(c->flying >= KVP_CATALOG_WINDOW || !send(c, e, DELETED, now_ns)))
			return 0;
	}
	return c->flying == 0;
}

static void end_pass(struct kvp_catalog *c, uint64_t now_ns)
{
	c->is_passing = 0;
	c->stat.passes++;
	c->stat.failed += (uint64_t)(c->failed_in_pass != 0);
	c->retry_ns = c->failed_in_pass ? now_ns + KVP_CATALOG_RETRY_NS : 0;
	if (keep_ids(c) && !c->retry_ns)
		c->retry_ns = now_ns + KVP_CATALOG_RETRY_NS;
}

void kvp_catalog_tend(struct kvp_catalog *c, uint64_t now_ns,
	void (*refused)(void *ctx, uint64_t worker_id, int status, const char *text, size_t len), void *ctx)
{
	if (c->flying)
		collect(c, now_ns, refused, ctx);
	if (!c->is_passing && c->retry_ns && now_ns >= c->retry_ns) {
		c->retry_ns = 0;
		c->is_passing = 1;
		c->failed_in_pass = 0;
		for (uint32_t i = 0; i < c->cnt; i++)
			c->entry[i].tried = 0;
	}
	if (c->is_passing && go_on(c, now_ns))
		end_pass(c, now_ns);
}

int kvp_catalog_is_settled(const struct kvp_catalog *c)
{
	return c->is_set && !c->is_passing;
}

int kvp_catalog_has_ids(const struct kvp_catalog *c)
{
	return c->has_ids;
}

void kvp_catalog_stat(const struct kvp_catalog *c, struct kvp_catalog_stat *out)
{
	*out = c->stat;
	for (uint32_t i = 0; i < c->cnt; i++) {
		out->schedulable += c->entry[i].json && c->entry[i].schedulable;
		out->refused += c->entry[i].json && c->entry[i].refused;
	}
}
