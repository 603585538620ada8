/* ipc/kube.c — reflectors: list, watch, and what to do when either ends. */
#include "ipc/kube_priv.h"

#include <kvpick/clock.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PROGRESS_NS 1000000000ull /* a watch that lived that long was worth its connection */
#define RELIST_SOON_NS 500000000ull
#define LINE_DEPTH KVP_JSON_DEPTH_MAX

enum state { WAITING, LISTING, WATCHING };

struct kvp_kube_reflector {
	struct kvp_kube *k;
	struct kvp_kube_reflector_cfg cfg;
	char *path[2], *query;
	struct kube_store now, next; /* next: the list under way */
	struct kube_transfer t;
	struct kvp_kube_buf in, kept;
	struct kvp_timer timer, idle;
	enum state state;
	int which, is_synced;
	int wants_list;	   /* the watch, if there is one, is of no use any more */
	int denied;	   /* the last request was answered 401: one more at once, then with back-off */
	uint32_t fails;	   /* in a row */
	uint32_t page_cnt; /* objects a page, 0 = all in one */
	uint32_t expired;  /* pages in a row whose list was too old */
	char *more;	   /* continue token, encoded, heap */
	char rv[KUBE_RV_MAX], list_rv[KUBE_RV_MAX], began_rv[KUBE_RV_MAX];
	uint64_t began_ns, list_ns;
	int is_too_long;
};

static void list_begin(struct kvp_kube_reflector *r);
static void watch_begin(struct kvp_kube_reflector *r);

int kvp_kube_put(struct kvp_kube_buf *b, const void *p, size_t len)
{
	if (b->len + len + KVP_JSON_SLACK_BYTES > b->cap) {
		size_t cap = b->cap ? b->cap : 4096;
		while (cap < b->len + len + KVP_JSON_SLACK_BYTES)
			cap *= 2;
		char *grown = realloc(b->p, cap);
		if (!grown)
			return KVP_ERR_SYS;
		b->p = grown;
		b->cap = cap;
	}
	if (len)
		memcpy(b->p + b->len, p, len);
	b->len += len;
	return KVP_OK;
}

static void buf_free(struct kvp_kube_buf *b)
{
	free(b->p);
	*b = (struct kvp_kube_buf){.p = NULL};
}

/* ---- waiting ---- */

static void on_timer(void *ctx, struct kvp_timer *t)
{
	struct kvp_kube_reflector *r = ctx;
	(void)t;
	kube_transfer_stop(&r->t);
	kvp_timer_cancel(r->k->loop, &r->idle);
	if (r->wants_list || !r->is_synced)
		list_begin(r);
	else
		watch_begin(r);
}

static void go_on_in(struct kvp_kube_reflector *r, uint64_t ns)
{
	r->state = WAITING;
	kvp_timer_set(r->k->loop, &r->timer, kvp_clock_mono_ns() + ns, on_timer, r);
}

static void retry(struct kvp_kube_reflector *r, uint32_t retry_ms)
{
	go_on_in(r, kube_backoff_ms(r->k, ++r->fails, retry_ms) * 1000000ull);
}

/* Whatever failed: say so and try again later. */
static void failed(struct kvp_kube_reflector *r, enum kvp_kube_trouble what, const char *text)
{
	kube_trouble(r->k, what, r->t.path, text);
	retry(r, r->t.retry_ms);
}

/* A transfer that ended otherwise than with a 200. */
static void ended_badly(struct kvp_kube_reflector *r)
{
	char text[CURL_ERROR_SIZE + 600];
	int was_denied = r->denied;
	kube_transfer_text(&r->t, text, sizeof(text));
	r->denied = r->t.result == CURLE_OK && r->t.status == 401;
	if (r->denied && !was_denied && r->k->cfg.access->token_file[0]) {
		/* A token that was replaced meanwhile: the next request reads it. */
		kube_trouble(r->k, KVP_KUBE_DENIED, r->t.path, text);
		go_on_in(r, 0);
		return;
	}
	failed(r, kube_transfer_trouble(&r->t), text);
}

static int request(struct kvp_kube_reflector *r, const char *how, enum state s)
{
	char *url = NULL;
	const char *query = r->query ? r->query : "";
	if (asprintf(&url, "%s?%s%s%s", r->path[r->which], how, query[0] ? "&" : "", query) < 0)
		return KVP_ERR_SYS;
	r->in.len = 0;
	r->is_too_long = 0;
	r->t.path = r->path[r->which];
	r->t.time_ms = s == LISTING ? r->k->cfg.list_ms : 0;
	r->began_ns = kvp_clock_mono_ns();
	r->state = s;
	int rc = kube_transfer_start(r->k, &r->t, url);
	free(url);
	return rc;
}

/* ---- objects ---- */

static int get_text(struct kvp_json_val obj, const char *key, const char **s, size_t *len)
{
	struct kvp_json_val v;
	int rc = kvp_json_get(obj, key, &v);
	return rc ? rc : kvp_json_str(v, s, len);
}

/* A resourceVersion: KVP_OK and a copy, if there is one of a length that can be. */
static int get_rv(struct kvp_json_val obj, char rv[KUBE_RV_MAX])
{
	struct kvp_json_val meta;
	const char *s;
	size_t len;
	if (kvp_json_get(obj, "metadata", &meta) || get_text(meta, "resourceVersion", &s, &len) || !len ||
		len >= KUBE_RV_MAX || strlen(s) != len)
		return KVP_ERR_NOTFOUND;
	memcpy(rv, s, len + 1);
	return KVP_OK;
}

static int get_name(struct kvp_json_val obj, const char **name, size_t *len)
{
	struct kvp_json_val meta;
	if (kvp_json_get(obj, "metadata", &meta) || get_text(meta, "name", name, len) || !*len ||
		*len > KVP_KUBE_NAME_MAX || strlen(*name) != *len)
		return KVP_ERR_NOTFOUND;
	return KVP_OK;
}

/* 1 and the number, if a resourceVersion is one. */
static int rv_number(const char *rv, uint64_t *out)
{
	uint64_t v = 0;
	if (!*rv || strlen(rv) > 19)
		return 0;
	for (; *rv; rv++) {
		if (*rv < '0' || *rv > '9')
			return 0;
		v = v * 10 + (uint64_t)(*rv - '0');
	}
	*out = v;
	return 1;
}

/* What is kept of an object; p NULL: it is left out. */
static struct kvp_kube_bytes digest(struct kvp_kube_reflector *r, struct kvp_json_val obj)
{
	r->kept.len = 0;
	if (kvp_kube_put(&r->kept, "", 0) || r->cfg.digest(r->cfg.ctx, r->which, obj, &r->kept)) {
		r->k->stat.skipped++;
		return (struct kvp_kube_bytes){NULL, 0};
	}
	return (struct kvp_kube_bytes){r->kept.p, r->kept.len};
}

static void tell(struct kvp_kube_reflector *r, const char *name, const struct kube_entry *was,
	const struct kube_entry *is)
{
	r->cfg.on_change(r->cfg.ctx, name, kube_entry_bytes(was), kube_entry_bytes(is));
}

static void remove_one(struct kvp_kube_reflector *r, const char *name, size_t len)
{
	struct kube_entry *was = kube_store_take(&r->now, name, len);
	if (was)
		tell(r, was->bytes, was, NULL);
	free(was);
}

/* KVP_ERR_SYS without memory: nothing changed. */
static int set_one(struct kvp_kube_reflector *r, const char *name, size_t len, struct kvp_kube_bytes is)
{
	struct kube_entry *e = kube_store_find(&r->now, name, len), *was;
	if (e && e->len == is.len && memcmp(kube_entry_bytes(e).p, is.p, is.len) == 0)
		return KVP_OK;
	if (kube_store_put(&r->now, name, len, is, &was))
		return KVP_ERR_SYS;
	e = kube_store_find(&r->now, name, len);
	tell(r, e->bytes, was, e);
	free(was);
	return KVP_OK;
}

/* ---- list ---- */

/* Continue tokens are opaque: everything but the plainest characters is encoded. */
static char *encoded(const char *s, size_t len)
{
	static const char hex[] = "0123456789ABCDEF";
	char *out = malloc(3 * len + 1), *to = out;
	for (size_t i = 0; out && i < len; i++) {
		unsigned char c = (unsigned char)s[i];
		if ((c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '-' ||
			c == '_') {
			*to++ = (char)c;
			continue;
		}
		*to++ = '%';
		*to++ = hex[c >> 4];
		*to++ = hex[c & 15];
	}
	if (out)
		*to = 0;
	return out;
}

static void page_begin(struct kvp_kube_reflector *r)
{
	char *how = NULL;
	int n = r->page_cnt ? asprintf(&how, "limit=%u%s%s", r->page_cnt, r->more ? "&continue=" : "",
				      r->more ? r->more : "")
			    : asprintf(&how, "limit=0");
	if (n < 0 || request(r, how, LISTING))
		failed(r, KVP_KUBE_CONNECT, "out of memory");
	if (n >= 0)
		free(how);
}

static void list_again(struct kvp_kube_reflector *r)
{
	kube_store_clear(&r->next);
	free(r->more);
	r->more = NULL;
	r->list_rv[0] = 0;
	page_begin(r);
}

static void list_begin(struct kvp_kube_reflector *r)
{
	r->which = 0;
	r->page_cnt = r->k->cfg.page_cnt;
	r->expired = 0;
	r->k->stat.relists += r->is_synced ? 1 : 0;
	list_again(r);
}

/* Behind the last page: what is no longer there goes, the rest is compared. */
static void list_end(struct kvp_kube_reflector *r)
{
	for (struct kube_entry *e = kube_store_next(&r->now, NULL); e; e = kube_store_next(&r->now, e))
		e->mark = kube_store_find(&r->next, e->bytes, e->name_len) == NULL;
	for (struct kube_entry *e = kube_store_next(&r->now, NULL), *after; e; e = after) {
		after = kube_store_next(&r->now, e);
		if (e->mark)
			remove_one(r, e->bytes, e->name_len);
	}
	for (struct kube_entry *e = kube_store_next(&r->next, NULL); e; e = kube_store_next(&r->next, e))
		if (set_one(r, e->bytes, e->name_len, kube_entry_bytes(e))) {
			failed(r, KVP_KUBE_GARBLED, "out of memory");
			return;
		}
	kube_store_clear(&r->next);
	buf_free(&r->in); /* a page is long, a line is not */
	kvp_json_trim(r->k->json, 1 << 20);
	memcpy(r->rv, r->list_rv, sizeof(r->rv));
	r->is_synced = 1;
	r->wants_list = 0;
	r->fails = 0;
	r->list_ns = kvp_clock_mono_ns();
	r->k->stat.lists++;
	r->cfg.on_synced(r->cfg.ctx);
	watch_begin(r);
}

/* One page into the list under way. KVP_ERR_PROTO with *why; *more is set to the continue token or NULL. */
static int page_take(struct kvp_kube_reflector *r, const char **why, char **more)
{
	struct kvp_json_val root, v;
	struct kvp_json_err err;
	const char *s;
	size_t len;
	char rv[KUBE_RV_MAX];
	*why = "out of memory";
	if (kvp_json_parse_slack(
		    r->k->json, r->in.p, r->in.len, LINE_DEPTH, KVP_JSON_HAS_SLACK, &root, &err)) {
		*why = err.text;
		return KVP_ERR_PROTO;
	}
	/* An object that is not a list must not be taken for an empty one. */
	*why = "the answer is no list";
	if (get_text(root, "kind", &s, &len) || len < 4 || strcmp(s + len - 4, "List") != 0 ||
		get_rv(root, rv) || kvp_json_get(root, "items", &v) ||
		(kvp_json_type(v) != KVP_JSON_ARR && kvp_json_type(v) != KVP_JSON_NULL))
		return KVP_ERR_PROTO;
	if (!r->list_rv[0])
		memcpy(r->list_rv, rv, sizeof(rv));
	*why = "out of memory";
	struct kvp_json_iter it = kvp_json_each(v);
	while (kvp_json_next(&it)) {
		struct kube_entry *was = NULL;
		if (get_name(it.val, &s, &len)) {
			r->k->stat.skipped++;
			continue;
		}
		struct kvp_kube_bytes is = digest(r, it.val);
		if (is.p && kube_store_put(&r->next, s, len, is, &was))
			return KVP_ERR_PROTO;
		free(was);
	}
	*more = NULL;
	if (!kvp_json_get(root, "metadata", &v) && !get_text(v, "continue", &s, &len) && len) {
		*more = encoded(s, len);
		return *more ? KVP_OK : KVP_ERR_PROTO;
	}
	return KVP_OK;
}

static void page_end(struct kvp_kube_reflector *r)
{
	const char *why;
	char *more;
	if (r->is_too_long && r->page_cnt > 1) {
		r->page_cnt /= 2;
		list_again(r);
		return;
	}
	if (r->is_too_long) {
		failed(r, KVP_KUBE_GARBLED, "one page with one object is too long");
		return;
	}
	if (r->t.result != CURLE_OK || r->t.status != 200) {
		int is_answer = r->t.result == CURLE_OK;
		if (is_answer && r->t.status == 410 && r->more && ++r->expired < 4) {
			/* The list grew too old between two pages: anew, at last without pages. */
			r->k->stat.gone++;
			r->page_cnt = r->expired < 3 ? r->page_cnt : 0;
			list_again(r);
		} else if (is_answer && r->t.status == 404 && r->which == 0 && r->path[1]) {
			r->which = 1;
			list_again(r);
		} else {
			ended_badly(r);
		}
		return;
	}
	r->denied = 0;
	r->k->stat.pages++;
	if (page_take(r, &why, &more)) {
		failed(r, KVP_KUBE_GARBLED, why);
		return;
	}
	free(r->more);
	r->more = more;
	if (more)
		page_begin(r);
	else
		list_end(r);
}

/* ---- watch ---- */

static void on_idle(void *ctx, struct kvp_timer *t)
{
	struct kvp_kube_reflector *r = ctx;
	(void)t;
	kube_transfer_stop(&r->t);
	kube_trouble(r->k, KVP_KUBE_IDLE, r->t.path, "nothing came for too long; watching anew");
	go_on_in(r, 0);
}

static void not_idle(struct kvp_kube_reflector *r)
{
	kvp_timer_set(r->k->loop, &r->idle, kvp_clock_mono_ns() + r->k->cfg.idle_ms * 1000000ull, on_idle, r);
}

static void watch_begin(struct kvp_kube_reflector *r)
{
	char how[KUBE_RV_MAX * 3 + 128], *rv = encoded(r->rv, strlen(r->rv));
	snprintf(how, sizeof(how), "watch=true&allowWatchBookmarks=true&resourceVersion=%s&timeoutSeconds=%u",
		rv ? rv : "", r->k->cfg.watch_s);
	memcpy(r->began_rv, r->rv, sizeof(r->rv));
	if (!rv || request(r, how, WATCHING)) {
		failed(r, KVP_KUBE_CONNECT, "out of memory");
	} else {
		r->k->stat.watches++;
		not_idle(r);
	}
	free(rv);
}

static void list_soon(struct kvp_kube_reflector *r)
{
	uint64_t now = kvp_clock_mono_ns(), at = r->list_ns + r->k->cfg.relist_gap_ms * 1000000ull;
	if (r->wants_list)
		return;
	r->wants_list = 1;
	at = at > now + RELIST_SOON_NS ? at : now + RELIST_SOON_NS;
	kvp_timer_set(r->k->loop, &r->timer, at, on_timer, r);
}

static void on_error_event(struct kvp_kube_reflector *r, struct kvp_json_val obj)
{
	struct kvp_json_val v;
	uint64_t code = 0;
	const char *s = "";
	size_t len;
	char text[600];
	if (!kvp_json_get(obj, "code", &v))
		kvp_json_u64(v, &code);
	get_text(obj, "message", &s, &len);
	if (code == 410) {
		r->k->stat.gone++;
		r->wants_list = 1;
		return;
	}
	snprintf(text, sizeof(text), "in a watch: %llu: %.500s", (unsigned long long)code, s);
	kube_trouble(r->k, KVP_KUBE_STATUS, r->t.path, text);
}

/* 1 if the event is newer than what was seen, or nobody can say. */
static int is_newer(struct kvp_kube_reflector *r, const char *rv)
{
	uint64_t is, seen;
	if (!rv_number(rv, &is) || !rv_number(r->rv, &seen) || is > seen)
		return 1;
	if (is == seen) {
		r->k->stat.repeated++;
		return 0;
	}
	r->k->stat.late++;
	list_soon(r);
	return 0;
}

static int on_event(struct kvp_kube_reflector *r, struct kvp_json_val root)
{
	struct kvp_json_val obj;
	const char *type, *name;
	size_t type_len, len;
	char rv[KUBE_RV_MAX];
	if (get_text(root, "type", &type, &type_len) || kvp_json_get(root, "object", &obj))
		return KVP_ERR_PROTO;
	if (strcmp(type, "ERROR") == 0) {
		on_error_event(r, obj);
		return KVP_ERR_CLOSED;
	}
	if (get_rv(obj, rv))
		return KVP_ERR_PROTO;
	if (strcmp(type, "BOOKMARK") == 0) {
		r->k->stat.bookmarks++;
		uint64_t is, seen;
		if (!rv_number(rv, &is) || !rv_number(r->rv, &seen) || is > seen)
			memcpy(r->rv, rv, sizeof(rv));
		return KVP_OK;
	}
	int is_deleted = strcmp(type, "DELETED") == 0;
	if (!is_deleted && strcmp(type, "ADDED") != 0 && strcmp(type, "MODIFIED") != 0)
		return KVP_ERR_PROTO;
	if (get_name(obj, &name, &len))
		return KVP_ERR_PROTO;
	r->k->stat.events++;
	if (!is_newer(r, rv))
		return KVP_OK;
	struct kvp_kube_bytes is = {NULL, 0};
	if (!is_deleted)
		is = digest(r, obj);
	if (!is.p)
		remove_one(r, name, len);
	else if (set_one(r, name, len, is))
		return KVP_ERR_SYS;
	memcpy(r->rv, rv, sizeof(rv));
	return KVP_OK;
}

/* 0 = go on. The line has slack behind it: the rest of the buffer. */
static int on_line(struct kvp_kube_reflector *r, const char *p, size_t len)
{
	struct kvp_json_val root;
	if (!len || (len == 1 && *p == '\r'))
		return 0;
	int rc = kvp_json_parse_slack(r->k->json, p, len, LINE_DEPTH, KVP_JSON_HAS_SLACK, &root, NULL);
	rc = rc ? rc : on_event(r, root);
	if (rc && rc != KVP_ERR_CLOSED) {
		/* What it said is unknown: only a list tells. */
		kube_trouble(r->k, KVP_KUBE_GARBLED, r->t.path, "an event can't be read");
		r->wants_list = 1;
	}
	return rc;
}

static int too_long(struct kvp_kube_reflector *r)
{
	kube_trouble(r->k, KVP_KUBE_GARBLED, r->t.path, "an event is too long");
	r->wants_list = 1;
	return -1;
}

static int watch_data(struct kvp_kube_reflector *r, const char *p, size_t len)
{
	not_idle(r);
	size_t from = r->in.len, at = 0, most = r->k->cfg.event_bytes;
	if (kvp_kube_put(&r->in, p, len))
		return -1;
	for (char *end; (end = memchr(r->in.p + from, '\n', r->in.len - from));) {
		size_t n = (size_t)(end - r->in.p) - at;
		if (n > most)
			return too_long(r);
		if (on_line(r, r->in.p + at, n))
			return -1;
		at = from = at + n + 1;
	}
	if (at)
		memmove(r->in.p, r->in.p + at, r->in.len - at);
	r->in.len -= at;
	return r->in.len > most ? too_long(r) : 0;
}

static void watch_end(struct kvp_kube_reflector *r)
{
	int is_answer = r->t.result == CURLE_OK || r->t.result == CURLE_WRITE_ERROR;
	int progress = strcmp(r->rv, r->began_rv) != 0 || kvp_clock_mono_ns() - r->began_ns >= PROGRESS_NS;
	kvp_timer_cancel(r->k->loop, &r->idle);
	if (is_answer && (r->t.status == 410 || r->t.status == 400 || r->t.status == 404)) {
		r->k->stat.gone += r->t.status == 410;
		r->wants_list = 1;
	}
	if (r->t.status != 200 && r->t.status != 410) {
		ended_badly(r);
		return;
	}
	r->denied = 0;
	/* Its end is normal, also in the middle of a line: what was not complete comes again. */
	if (!is_answer)
		kube_trouble(r->k, KVP_KUBE_CONNECT, r->t.path,
			r->t.why[0] ? r->t.why : curl_easy_strerror(r->t.result));
	if (progress) {
		r->fails = 0;
		go_on_in(r, 0);
	} else {
		retry(r, r->t.retry_ms);
	}
}

/* ---- both ---- */

static int on_data(struct kube_transfer *t, const char *p, size_t len)
{
	struct kvp_kube_reflector *r = t->ctx;
	if (r->state == WATCHING)
		return watch_data(r, p, len);
	r->is_too_long = r->in.len + len > r->k->cfg.page_bytes;
	return r->is_too_long ? -1 : kvp_kube_put(&r->in, p, len);
}

static void on_end(struct kube_transfer *t)
{
	struct kvp_kube_reflector *r = t->ctx;
	/* A list that a doubt has asked for is due at its own time, unless this was the end of the watch
	 * anyway. */
	kvp_timer_cancel(r->k->loop, &r->timer);
	if (r->state == WATCHING)
		watch_end(r);
	else
		page_end(r);
}

int kvp_kube_reflect(
	struct kvp_kube *k, const struct kvp_kube_reflector_cfg *cfg, struct kvp_kube_reflector **out)
{
	if (!cfg->path[0] || !cfg->digest || !cfg->on_change || !cfg->on_synced)
		return KVP_ERR_INVAL;
	struct kvp_kube_reflector *r = calloc(1, sizeof(*r));
	if (!r)
		return KVP_ERR_SYS;
	r->k = k;
	r->cfg = *cfg;
	r->t.on_data = on_data;
	r->t.on_end = on_end;
	r->t.ctx = r;
	r->path[0] = strdup(cfg->path[0]);
	r->path[1] = cfg->path[1] ? strdup(cfg->path[1]) : NULL;
	r->query = cfg->query ? strdup(cfg->query) : NULL;
	if (!r->path[0] || (cfg->path[1] && !r->path[1]) || (cfg->query && !r->query)) {
		kvp_kube_reflector_close(r);
		return KVP_ERR_SYS;
	}
	go_on_in(r, 0);
	*out = r;
	return KVP_OK;
}

void kvp_kube_reflector_close(struct kvp_kube_reflector *r)
{
	if (!r)
		return;
	kube_transfer_stop(&r->t);
	kvp_timer_cancel(r->k->loop, &r->timer);
	kvp_timer_cancel(r->k->loop, &r->idle);
	kube_store_clear(&r->now);
	kube_store_clear(&r->next);
	buf_free(&r->in);
	buf_free(&r->kept);
	free(r->more);
	free(r->path[0]);
	free(r->path[1]);
	free(r->query);
	free(r);
}

int kvp_kube_is_synced(const struct kvp_kube_reflector *r)
{
	return r->is_synced;
}

int kvp_kube_is_listing(const struct kvp_kube_reflector *r)
{
	return r->state == LISTING || !r->is_synced;
}

int kvp_kube_is_watching(const struct kvp_kube_reflector *r)
{
	return r->state == WATCHING && r->t.status == 200;
}

uint32_t kvp_kube_count(const struct kvp_kube_reflector *r)
{
	return r->now.cnt;
}

struct kvp_kube_bytes kvp_kube_find(const struct kvp_kube_reflector *r, const char *name)
{
	return kube_entry_bytes(kube_store_find(&r->now, name, strlen(name)));
}

void kvp_kube_each(const struct kvp_kube_reflector *r,
	void (*fn)(void *ctx, const char *name, struct kvp_kube_bytes is), void *ctx)
{
	for (struct kube_entry *e = kube_store_next(&r->now, NULL); e; e = kube_store_next(&r->now, e))
		fn(ctx, e->bytes, kube_entry_bytes(e));
}

void kvp_kube_relist(struct kvp_kube_reflector *r)
{
	if (r->state == LISTING || !r->is_synced)
		return;
	r->wants_list = 1;
	kvp_timer_set(r->k->loop, &r->timer, kvp_clock_mono_ns(), on_timer, r);
}
