#include "ipc/names.h"

#include <kvpick/err.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define REFRESH_MS 30000

static int addresses(struct kvp_names *n, struct kvp_name *e, uint16_t port, struct kvp_addrs *out)
{
	uint32_t cnt = kvp_resolve_cnt(e->resolve);
	struct kvp_addrs a = {.cnt = 0};
	for (uint32_t i = 0; i < cnt && a.cnt < KVP_NAME_ADDR_MAX; i++) {
		const char *text = kvp_resolve_next(e->resolve, kvp_loop_now_ns(n->loop));
		if (text && kvp_addr_ip(&a.addr[a.cnt], text, port) == KVP_OK)
			a.cnt++;
	}
	if (a.cnt)
		*out = a;
	return a.cnt ? KVP_OK : KVP_ERR_NOTFOUND;
}

void kvp_name_cancel(struct kvp_name_wait *w)
{
	if (!w->prev)
		return;
	*w->prev = w->next;
	if (w->next)
		w->next->prev = w->prev;
	w->prev = NULL;
}

struct answer {
	struct kvp_names *names;
	struct kvp_name *name;
};

/* Whoever waits is told; a callback may let others wait or cancel them. */
static void on_answer(void *ctx, struct kvp_resolve *r)
{
	struct answer *a = ctx;
	(void)r;
	for (struct kvp_name_wait *w; (w = a->name->wait);) {
		int rc = addresses(a->names, a->name, w->port, w->out);
		kvp_name_cancel(w);
		w->cb(w->ctx, rc);
	}
}

/* One allocation, which starts with the name. */
struct entry {
	struct kvp_name name;
	struct answer answer;
};

static struct kvp_name **place_for(struct kvp_names *n, const char *host)
{
	uint64_t now = kvp_loop_now_ns(n->loop);
	struct kvp_name **room = NULL;
	for (uint32_t i = 0; i < KVP_NAMES_MAX; i++) {
		struct kvp_name *e = n->name[i];
		if (e && strcasecmp(e->host, host) == 0)
			return &n->name[i];
		if (e && !e->wait && now - e->used_ns > KVP_NAMES_KEEP_NS) {
			kvp_resolve_close(e->resolve);
			free(e);
			n->name[i] = NULL;
		}
		if (!n->name[i] && !room)
			room = &n->name[i];
	}
	return room;
}

static int name_new(struct kvp_names *n, struct kvp_name **place, const char *host)
{
	struct entry *e = calloc(1, sizeof(*e));
	if (!e)
		return KVP_ERR_SYS;
	size_t len = strlen(host);
	if (len >= sizeof(e->name.host) || kvp_resolve_open(n->loop, host, REFRESH_MS, &e->name.resolve)) {
		free(e);
		return KVP_ERR_SYS;
	}
	memcpy(e->name.host, host, len + 1);
	e->answer = (struct answer){n, &e->name};
	kvp_resolve_tell(e->name.resolve, on_answer, &e->answer);
	*place = &e->name;
	return KVP_OK;
}

int kvp_name_find(struct kvp_names *n, const char *host, uint16_t port, struct kvp_addrs *out,
	struct kvp_name_wait *w, void (*cb)(void *ctx, int err), void *ctx)
{
	if (kvp_addr_ip(&out->addr[0], host, port) == KVP_OK) {
		out->cnt = 1;
		return KVP_OK;
	}
	struct kvp_name **place = place_for(n, host);
	if (!place)
		return KVP_ERR_FULL;
	int rc = *place ? KVP_OK : name_new(n, place, host);
	if (rc)
		return rc;
	struct kvp_name *e = *place;
	e->used_ns = kvp_loop_now_ns(n->loop);
	if (addresses(n, e, port, out) == KVP_OK)
		return KVP_OK;
	*w = (struct kvp_name_wait){e->wait, &e->wait, out, port, cb, ctx};
	if (w->next)
		w->next->prev = &w->next;
	e->wait = w;
	return KVP_ERR_AGAIN;
}

void kvp_names_end(struct kvp_names *n)
{
	for (uint32_t i = 0; i < KVP_NAMES_MAX; i++) {
		if (!n->name[i])
			continue;
		kvp_resolve_close(n->name[i]->resolve);
		free(n->name[i]);
		n->name[i] = NULL;
	}
}
