#include "daemons/discovery/catalog.h"

#include <kvpick/hash.h>
#include <kvpick/point.h>

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BUCKETS_MIN 256u
#define LINES_SPARE 4096u /* of the file of ids, beyond twice the entries */

enum state { IDLE, POSTED, DELETED }; /* a command of the entry is under way */
enum queue { POSTS, DELETES, QUEUES };

struct entry {
	uint64_t worker_id;
	char *json; /* wanted; NULL = not */
	uint32_t len;
	enum kvp_part_role role;
	uint64_t owner;
	unsigned told : 1;	  /* json, as it is */
	unsigned schedulable : 1; /* as answered to what was told */
	unsigned refused : 1, failed : 1;
	unsigned is_kept : 1; /* the file says that it is ours */
	unsigned is_ours : 1; /* a command about it may have been executed */
	unsigned is_queued[QUEUES];
	struct entry *queue_next[QUEUES], *next; /* next: of the bucket */
	enum state state;
	uint32_t stamp;	 /* of the picture that named it */
	uint64_t record; /* hash of the record that was answered */
	struct kvp_cmd_cell *cell;
	uint64_t deadline_ns;
};

struct kvp_catalog {
	struct kvp_catalog_cfg cfg;
	struct kvp_json *json;
	struct entry **bucket;
	uint32_t bucket_cnt, cnt, stamp;
	struct {
		struct entry *first, **end;
	} queue[QUEUES];
	struct entry *flying[KVP_CATALOG_WINDOW];
	uint32_t flying_cnt, posting_cnt;
	int is_set, is_passing, has_ids, failed_in_pass;
	uint64_t retry_ns;
	FILE *ids;
	uint32_t lines, compared;
	struct kvp_catalog_stat stat;
	char record[KVP_CAT_RECORD_MAX];
};

/* ---- entries ---- */

static struct entry **place(const struct kvp_catalog *c, uint64_t worker_id)
{
	uint64_t h = worker_id * 0x9e3779b97f4a7c15ull;
	struct entry **at = &c->bucket[h >> 32 & (c->bucket_cnt - 1)];
	while (*at && (*at)->worker_id != worker_id)
		at = &(*at)->next;
	return at;
}

static int grow(struct kvp_catalog *c)
{
	struct entry **old = c->bucket;
	uint32_t old_cnt = c->bucket_cnt, cnt = old_cnt ? 2 * old_cnt : BUCKETS_MIN;
	struct entry **b = calloc(cnt, sizeof(*b));
	if (!b)
		return KVP_ERR_SYS;
	c->bucket = b;
	c->bucket_cnt = cnt;
	for (uint32_t i = 0; i < old_cnt; i++)
		for (struct entry *e = old[i], *next; e; e = next) {
			next = e->next;
			e->next = NULL;
			*place(c, e->worker_id) = e;
		}
	free(old);
	return KVP_OK;
}

static struct entry *get(struct kvp_catalog *c, uint64_t worker_id)
{
	if (c->cnt >= c->bucket_cnt && grow(c))
		return NULL;
	struct entry **at = place(c, worker_id);
	if (!*at) {
		*at = calloc(1, sizeof(**at));
		if (*at) {
			(*at)->worker_id = worker_id;
			c->cnt++;
		}
	}
	return *at;
}

/* forget_idle frees an entry of which nothing is wanted, under way, queued or registered. */
static void forget_idle(struct kvp_catalog *c, struct entry *e)
{
	if (e->json || e->state != IDLE || e->is_ours || e->is_queued[POSTS] || e->is_queued[DELETES])
		return;
	struct entry **at = place(c, e->worker_id);
	*at = e->next;
	c->cnt--;
	free(e);
}

static void push(struct kvp_catalog *c, struct entry *e, enum queue q)
{
	c->is_passing = 1;
	if (e->is_queued[q])
		return;
	e->is_queued[q] = 1;
	e->queue_next[q] = NULL;
	*c->queue[q].end = e;
	c->queue[q].end = &e->queue_next[q];
}

static struct entry *pop(struct kvp_catalog *c, enum queue q)
{
	struct entry *e = c->queue[q].first;
	c->queue[q].first = e->queue_next[q];
	if (!c->queue[q].first)
		c->queue[q].end = &c->queue[q].first;
	e->is_queued[q] = 0;
	return e;
}

/* What is to be done about an entry that nothing is under way for. */
static int needs_post(const struct entry *e)
{
	return e->json && e->state == IDLE && !(e->told && e->schedulable);
}

static int needs_delete(const struct entry *e)
{
	return !e->json && e->state == IDLE && e->is_ours;
}

static void queue_up(struct kvp_catalog *c, struct entry *e)
{
	if (needs_post(e))
		push(c, e, POSTS);
	else if (needs_delete(e))
		push(c, e, DELETES);
	else
		forget_idle(c, e);
}

/* Marks of a wanted entry are counted. */
static void mark(struct kvp_catalog *c, struct entry *e, int schedulable, int refused)
{
	if (e->json) {
		c->stat.schedulable += (uint32_t)schedulable - e->schedulable;
		c->stat.refused += (uint32_t)refused - e->refused;
	}
	e->schedulable = schedulable != 0;
	e->refused = refused != 0;
}

/* ---- the file of our ids: a generation, then +id and -id as they come and go ---- */

static int write_ids(struct kvp_catalog *c)
{
	char path[1200];
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
	for (uint32_t i = 0; i < c->bucket_cnt; i++)
		for (struct entry *e = c->bucket[i]; e; e = e->next)
			if (e->is_ours)
				fprintf(out, "+%" PRIu64 "\n", e->worker_id);
	if (fflush(out) || ferror(out) || rename(path, c->cfg.ids_path)) {
		fclose(out);
		return KVP_ERR_SYS;
	}
	if (c->ids)
		fclose(c->ids);
	c->ids = out;
	c->lines = c->cnt;
	return KVP_OK;
}

/* keep makes the file say whether an entry is ours; what can't be written is tried again with the next
 * one. */
static void keep(struct kvp_catalog *c, struct entry *e, int is_ours)
{
	if (!c->cfg.ids_path || e->is_kept == (unsigned)is_ours)
		return;
	int bad = !c->ids || c->lines > 2 * c->cnt + LINES_SPARE ? write_ids(c) != KVP_OK : 0;
	if (!bad) {
		fprintf(c->ids, "%c%" PRIu64 "\n", is_ours ? '+' : '-', e->worker_id);
		bad = fflush(c->ids) || ferror(c->ids);
		c->lines++;
	}
	if (bad && c->ids) {
		fclose(c->ids);
		c->ids = NULL;
	}
	c->failed_in_pass |= bad;
	e->is_kept = bad ? e->is_kept : is_ours != 0;
}

/* A file that breaks off names fewer ids: what it does not name stays registered until it is deleted by
 * hand. */
static int read_ids(struct kvp_catalog *c)
{
	FILE *in = c->cfg.ids_path ? fopen(c->cfg.ids_path, "re") : NULL;
	uint64_t v;
	char sign;
	int rc = KVP_OK;
	if (!in)
		return KVP_OK;
	if (fscanf(in, "%" SCNu64, &v) == 1 && v == c->cfg.region_gen)
		while (!rc && fscanf(in, " %c%" SCNu64, &sign, &v) == 2) {
			struct entry *e = get(c, v);
			rc = e ? KVP_OK : KVP_ERR_SYS;
			if (e)
				e->is_ours = e->is_kept = sign == '+';
			if (e)
				forget_idle(c, e);
		}
	c->has_ids = c->cnt > 0;
	fclose(in);
	return rc;
}

int kvp_catalog_open(struct kvp_catalog **out, const struct kvp_catalog_cfg *cfg)
{
	struct kvp_catalog *c = calloc(1, sizeof(*c));
	if (!c)
		return KVP_ERR_SYS;
	c->cfg = *cfg;
	for (int q = 0; q < QUEUES; q++)
		c->queue[q].end = &c->queue[q].first;
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
	for (uint32_t i = 0; i < c->bucket_cnt; i++)
		for (struct entry *e = c->bucket[i], *next; e; e = next) {
			next = e->next;
			if (e->state != IDLE)
				kvp_cmd_end(c->cfg.ring, e->cell);
			free(e->json);
			free(e);
		}
	if (c->ids)
		fclose(c->ids);
	free(c->bucket);
	kvp_json_free(c->json);
	free(c);
}

/* ---- what is wanted ---- */

/* is_as_told asks the catalogue: somebody may have deleted or changed the worker meanwhile. */
static int is_as_told(struct kvp_catalog *c, const struct entry *e)
{
	uint32_t idx, len = 0;
	struct kvp_cat_worker_info *w = malloc(sizeof(*w));
	int yes = w && kvp_cat_worker_find(c->cfg.cat, e->worker_id, &idx) == KVP_OK &&
		  kvp_cat_worker_read(c->cfg.cat, idx, w, c->record, sizeof(c->record), &len) == KVP_OK &&
		  w->worker_id == e->worker_id && w->lifecycle == KVP_LIFE_SCHEDULABLE &&
		  w->role == e->role && kvp_hash_bytes(c->record, len, 0) == e->record;
	free(w);
	return yes;
}

static int stray(struct kvp_catalog *c, struct entry *e)
{
	if (!c->cfg.cat || !e->json || e->state != IDLE || !e->told || !e->schedulable || is_as_told(c, e))
		return 0;
	e->told = 0;
	mark(c, e, 0, (int)e->refused);
	c->stat.strayed++;
	return 1;
}

static int want_one(struct kvp_catalog *c, const struct kvp_catalog_want *want)
{
	struct entry *e = get(c, want->worker_id);
	if (!e)
		return KVP_ERR_SYS;
	if (e->json)
		e->owner = want->owner;
	if (e->json && e->role == want->role && e->len == want->len &&
		memcmp(e->json, want->json, e->len) == 0)
		return KVP_OK;
	char *json = malloc((size_t)want->len + 1);
	if (!json) {
		forget_idle(c, e);
		return KVP_ERR_SYS;
	}
	memcpy(json, want->json, want->len);
	mark(c, e, 0, 0);
	c->stat.wanted += !e->json;
	free(e->json);
	e->json = json;
	e->len = want->len;
	e->role = want->role;
	e->owner = want->owner;
	e->told = 0;
	return KVP_OK;
}

static void unwant(struct kvp_catalog *c, struct entry *e)
{
	if (e->json) {
		mark(c, e, 0, 0);
		c->stat.wanted--;
		free(e->json);
		e->json = NULL;
		e->told = 0;
	}
	queue_up(c, e);
}

int kvp_catalog_put(struct kvp_catalog *c, const struct kvp_catalog_want *want)
{
	if (want->len > KVP_CMD_PAYLOAD_MAX)
		return KVP_ERR_LIMIT;
	const struct entry *had = c->cnt ? *place(c, want->worker_id) : NULL;
	if (had && had->json && had->owner != want->owner)
		return KVP_ERR_EXISTS;
	int rc = want_one(c, want);
	if (rc)
		return rc;
	struct entry *e = get(c, want->worker_id);
	if (!e->told)
		queue_up(c, e);
	return KVP_OK;
}

void kvp_catalog_drop(struct kvp_catalog *c, uint64_t worker_id, uint64_t owner)
{
	struct entry *e = c->cnt ? *place(c, worker_id) : NULL;
	if (e && (!e->json || e->owner == owner))
		unwant(c, e);
}

static int by_id(const void *x, const void *y)
{
	const uint64_t *a = x, *b = y;
	return (*a > *b) - (*a < *b);
}

/* All ids, sorted, of a picture (want) or of everything there is (want NULL). */
static uint64_t *all_ids(const struct kvp_catalog *c, const struct kvp_catalog_want *want, uint32_t cnt)
{
	uint64_t *id = malloc(((size_t)cnt + 1) * sizeof(*id));
	uint32_t n = 0;
	for (uint32_t i = 0; id && want && i < cnt; i++)
		id[n++] = want[i].worker_id;
	for (uint32_t i = 0; id && !want && i < c->bucket_cnt; i++)
		for (const struct entry *e = c->bucket[i]; e; e = e->next)
			id[n++] = e->worker_id;
	if (id && n)
		qsort(id, n, sizeof(*id), by_id);
	return id;
}

/* Nothing is changed before this has found nothing against it. */
static int check_picture(
	const struct kvp_catalog *c, const struct kvp_catalog_want *want, uint32_t cnt, uint64_t *twice)
{
	for (uint32_t i = 0; i < cnt; i++)
		if (want[i].len > KVP_CMD_PAYLOAD_MAX)
			return KVP_ERR_LIMIT;
	const struct kvp_catalog_want none = {.worker_id = 0};
	uint64_t *id = all_ids(c, cnt ? want : &none, cnt);
	int rc = id ? KVP_OK : KVP_ERR_SYS;
	for (uint32_t i = 1; !rc && i < cnt; i++)
		if (id[i] == id[i - 1]) {
			*twice = id[i];
			rc = KVP_ERR_EXISTS;
		}
	free(id);
	return rc;
}

int kvp_catalog_set(struct kvp_catalog *c, const struct kvp_catalog_want *want, uint32_t cnt, uint64_t *twice)
{
	int rc = check_picture(c, want, cnt, twice);
	c->stamp++;
	for (uint32_t i = 0; i < cnt && !rc; i++) {
		rc = want_one(c, &want[i]);
		if (!rc)
			get(c, want[i].worker_id)->stamp = c->stamp;
	}
	uint64_t *id = rc ? NULL : all_ids(c, NULL, c->cnt);
	if (!id)
		return rc ? rc : KVP_ERR_SYS;
	/* In the order of the ids, so that the same picture gives the same commands. */
	for (uint32_t i = 0, n = c->cnt; i < n; i++) {
		struct entry *e = *place(c, id[i]);
		if (e->stamp != c->stamp) {
			unwant(c, e);
			continue;
		}
		stray(c, e);
		queue_up(c, e);
	}
	free(id);
	c->is_set = c->is_passing = 1;
	c->failed_in_pass = 0;
	return KVP_OK;
}

uint32_t kvp_catalog_compare(struct kvp_catalog *c)
{
	uint32_t n = 0;
	int is_turn = c->compared++ % KVP_CATALOG_INCOMPLETE_TURN == 0;
	for (uint32_t i = 0; i < c->bucket_cnt; i++)
		for (struct entry *e = c->bucket[i]; e; e = e->next)
			if (stray(c, e)) {
				push(c, e, POSTS);
				n++;
			} else if (is_turn && needs_post(e) && !e->failed && !e->is_queued[POSTS]) {
				push(c, e, POSTS); /* not schedulable when it was told */
			}
	return n;
}

/* ---- passes ---- */

static int send(struct kvp_catalog *c, struct entry *e, enum state as, uint64_t now_ns)
{
	void *payload;
	if (kvp_cmd_begin(c->cfg.ring, c->cfg.owner, &e->cell, &payload) != KVP_OK)
		return 0;
	e->is_ours = 1;
	keep(c, e, 1);
	KVP_POINT("discovery:kept");
	e->cell->worker_id = e->worker_id;
	e->cell->arg[0] = as == POSTED ? (uint64_t)e->role : 0;
	if (as == POSTED)
		memcpy(payload, e->json, e->len);
	kvp_cmd_post(c->cfg.ring, e->cell, as == POSTED ? KVP_CMD_WORKER_POST : KVP_CMD_WORKER_DELETE,
		as == POSTED ? e->len : 0);
	e->state = as;
	e->failed = 0;
	e->told = as == POSTED; /* unless the wish changes while it is under way */
	e->deadline_ns = now_ns + KVP_CATALOG_REPLY_NS;
	c->flying[c->flying_cnt++] = e;
	c->posting_cnt += as == POSTED;
	c->stat.posts += as == POSTED;
	c->stat.deletes += as == DELETED;
	KVP_POINT("discovery:sent");
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
	int good = status >= 200 && status < 300;
	if (e->state == DELETED) {
		good |= status == 404;
		if (good) {
			e->is_ours = 0;
			keep(c, e, 0);
		}
		return good;
	}
	if (e->told)
		mark(c, e, good && reply_is_schedulable(c, text, len), status >= 400);
	e->record = good ? kvp_hash_bytes(text, len, 0) : 0;
	if (good)
		return 1;
	e->told = 0;
	if (refused)
		refused(ctx, e->worker_id, status, text, len);
	return 0;
}

static void collect(struct kvp_catalog *c, uint64_t now_ns,
	void (*refused)(void *ctx, uint64_t worker_id, int status, const char *text, size_t len), void *ctx)
{
	for (uint32_t i = 0; i < c->flying_cnt;) {
		struct entry *e = c->flying[i];
		int done = kvp_cmd_done(c->cfg.ring, e->cell);
		if (!done && now_ns < e->deadline_ns) {
			i++;
			continue;
		}
		int was_told = (int)e->told, as = e->state;
		int good = answered(c, e, done ? e->cell->status : KVP_ERR_TIMEOUT, refused, ctx);
		kvp_cmd_end(c->cfg.ring, e->cell);
		c->posting_cnt -= as == POSTED;
		e->state = IDLE;
		c->failed_in_pass |= !good;
		c->flying[i] = c->flying[--c->flying_cnt];
		/* One that failed waits for the next pass, unless the wish is another one by now. */
		int is_done = as == POSTED ? e->json && (good ? e->told : was_told) : !e->json && !good;
		e->failed = !good && is_done;
		if (!is_done)
			queue_up(c, e);
	}
}

/* run sends from a queue what the window takes; 1 = it is empty. */
static int run(struct kvp_catalog *c, enum queue q, uint64_t now_ns)
{
	while (c->queue[q].first) {
		struct entry *e = c->queue[q].first;
		int is_due = q == POSTS ? needs_post(e) : needs_delete(e);
		if (is_due && (c->flying_cnt >= KVP_CATALOG_WINDOW ||
				      !send(c, e, q == POSTS ? POSTED : DELETED, now_ns)))
			return 0;
		pop(c, q);
		if (!is_due)
			forget_idle(c, e);
	}
	return 1;
}

/* go_on sends what may be sent; 1 = the pass has ended. */
static int go_on(struct kvp_catalog *c, uint64_t now_ns)
{
	enum queue first = c->cfg.order == KVP_CATALOG_POST_FIRST ? POSTS : DELETES;
	if (!run(c, first, now_ns))
		return 0;
	if (first == POSTS && c->posting_cnt)
		return 0;
	return run(c, first == POSTS ? DELETES : POSTS, now_ns) && !c->flying_cnt;
}

static void end_pass(struct kvp_catalog *c, uint64_t now_ns)
{
	c->is_passing = 0;
	c->stat.passes++;
	c->stat.failed += (uint64_t)(c->failed_in_pass != 0);
	c->retry_ns = c->failed_in_pass ? now_ns + KVP_CATALOG_RETRY_NS : 0;
}

static void try_again(struct kvp_catalog *c)
{
	uint64_t *id = all_ids(c, NULL, c->cnt);
	for (uint32_t i = 0, n = c->cnt; id && i < n; i++) {
		struct entry *e = *place(c, id[i]);
		keep(c, e, (int)e->is_ours);
		if (e->failed)
			queue_up(c, e);
	}
	free(id);
}

void kvp_catalog_tend(struct kvp_catalog *c, uint64_t now_ns,
	void (*refused)(void *ctx, uint64_t worker_id, int status, const char *text, size_t len), void *ctx)
{
	if (c->flying_cnt)
		collect(c, now_ns, refused, ctx);
	if (!c->is_set)
		return;
	if (!c->is_passing && c->retry_ns && now_ns >= c->retry_ns) {
		c->retry_ns = 0;
		c->is_passing = 1;
		c->failed_in_pass = 0;
		try_again(c);
	}
	if (c->is_passing && go_on(c, now_ns))
		end_pass(c, now_ns);
}

int kvp_catalog_is_settled(const struct kvp_catalog *c)
{
	return c->is_set && !c->is_passing;
}

int kvp_catalog_is_set(const struct kvp_catalog *c)
{
	return c->is_set;
}

int kvp_catalog_is_flying(const struct kvp_catalog *c)
{
	return c->flying_cnt != 0;
}

int kvp_catalog_has_ids(const struct kvp_catalog *c)
{
	return c->has_ids;
}

void kvp_catalog_stat(const struct kvp_catalog *c, struct kvp_catalog_stat *out)
{
	*out = c->stat;
}
