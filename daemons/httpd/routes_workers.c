#include "daemons/httpd/httpd.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* send_command hands a command to the indexer; the answer comes through kvp_httpd_poll_commands. */
static void send_command(
	struct kvp_call *c, enum kvp_cmd_type type, uint64_t worker_id, const void *body, size_t len)
{
	struct kvp_httpd *h = c->h;
	struct kvp_cmd_cell *cell;
	void *payload;
	if (h->draining && type != KVP_CMD_WORKER_DELETE) {
		kvp_reply_error(c, 503, "selection service is shutting down");
		return;
	}
	if (len > KVP_CMD_PAYLOAD_MAX) {
		kvp_reply_error(c, 413, "worker record is longer than 73728 bytes");
		return;
	}
	struct kvp_httpd_cmd *p = calloc(1, sizeof(*p));
	if (!p || kvp_cmd_begin(&h->boot.region->cmd, h->boot.owner, &cell, &payload) != KVP_OK) {
		free(p);
		kvp_ctr_add(h->boot.ctr, KVP_CTR_CMD_FULL, 1);
		kvp_reply_error(c, 503, "too many worker commands are waiting for the indexer");
		return;
	}
	if (len)
		memcpy(payload, body, len);
	cell->worker_id = worker_id;
	if (type == KVP_CMD_WORKER_POST) {
		cell->arg[0] = KVP_PART_AGGREGATED;
		cell->arg[1] = KVP_CMD_BY_API;
	}
	kvp_cmd_post(&h->boot.region->cmd, cell, type, (uint32_t)len);
	p->job = KVP_HTTPD_COMMAND;
	p->req = c->req;
	p->cell = cell;
	p->deadline_ns = kvp_loop_now_ns(h->loop) + KVP_HTTPD_CMD_TIMEOUT_NS;
	p->next = h->pending;
	h->pending = p;
	c->req->user = p;
}

static void answer(struct kvp_httpd *h, struct kvp_httpd_cmd *p)
{
	struct kvp_cmdring *ring = &h->boot.region->cmd;
	if (!p->req)
		return;
	p->req->user = NULL;
	struct kvp_call c = {.h = h, .req = p->req};
	if (!kvp_cmd_done(ring, p->cell)) {
		kvp_ctr_add(h->boot.ctr, KVP_CTR_CMD_TIMEOUT, 1);
		kvp_reply_error(
			&c, 503, "the indexer did not answer in time; the change may still take effect");
	} else if (p->cell->status < 200 || p->cell->status > 599) {
		kvp_reply_error(&c, 503, "the indexer restarted; try again");
	} else {
		kvp_http_reply(p->req, p->cell->status, "application/json", kvp_cmd_buffer(ring, p->cell),
			p->cell->reply_len);
	}
}

int kvp_httpd_poll_commands(struct kvp_httpd *h)
{
	int any = 0;
	uint64_t now_ns = kvp_clock_mono_ns();
	for (struct kvp_httpd_cmd **at = &h->pending; *at;) {
		struct kvp_httpd_cmd *p = *at;
		if (!kvp_cmd_done(&h->boot.region->cmd, p->cell) && now_ns < p->deadline_ns) {
			at = &p->next;
			continue;
		}
		*at = p->next;
		answer(h, p);
		kvp_cmd_end(&h->boot.region->cmd, p->cell);
		free(p);
		any = 1;
	}
	return any;
}

void kvp_route_worker_post(struct kvp_call *c)
{
	send_command(c, KVP_CMD_WORKER_POST, 0, c->req->body, c->req->body_len);
}

/* is_hidden: a worker with a role is not the API's, which knows aggregated ones only: it answers 404. */
static int is_hidden(struct kvp_call *c)
{
	const struct kvp_cat *cat = &c->h->boot.region->cat;
	struct kvp_cat_worker_info *w = malloc(sizeof(*w));
	char text[64];
	uint32_t idx;
	int yes = w && kvp_cat_worker_find(cat, c->worker_id, &idx) == KVP_OK &&
		  kvp_cat_worker_info(cat, idx, w) == KVP_OK && w->worker_id == c->worker_id &&
		  w->role != KVP_PART_AGGREGATED;
	free(w);
	if (!yes)
		return 0;
	snprintf(text, sizeof(text), "worker %" PRIu64 " not found", c->worker_id);
	kvp_reply_error(c, 404, text);
	return 1;
}

void kvp_route_worker_patch(struct kvp_call *c)
{
	if (is_hidden(c))
		return;
	send_command(c, KVP_CMD_WORKER_PATCH, c->worker_id, c->req->body, c->req->body_len);
}

void kvp_route_worker_delete(struct kvp_call *c)
{
	if (is_hidden(c))
		return;
	send_command(c, KVP_CMD_WORKER_DELETE, c->worker_id, NULL, 0);
}

/* Sort keys of a listing: (model, group, worker id). */
struct listed {
	char *name; /* model, NUL, group */
	uint64_t worker_id;
	uint32_t idx;
};

static int by_key(const void *a, const void *b)
{
	const struct listed *x = a, *y = b;
	int d = strcmp(x->name, y->name);
	if (!d)
		d = strcmp(x->name + strlen(x->name) + 1, y->name + strlen(y->name) + 1);
	return d ? d : (x->worker_id > y->worker_id) - (x->worker_id < y->worker_id);
}

struct filter {
	const char *model, *group; /* NULL = any */
	size_t model_len, group_len;
};

static int wanted(const struct kvp_cat_worker_info *w, const struct filter *f)
{
	if (w->role != KVP_PART_AGGREGATED)
		return 0;
	if (f->model && (w->model_len != f->model_len || memcmp(w->model, f->model, f->model_len) != 0))
		return 0;
	return !f->group || (w->group_len == f->group_len && memcmp(w->group, f->group, f->group_len) == 0);
}

/* collect lists the workers that pass the filter; *out is freed by the caller with free_list. */
static int collect(const struct kvp_cat *cat, const struct filter *f, struct listed **out, size_t *cnt)
{
	struct listed *list = NULL;
	size_t n = 0, room = 0;
	struct kvp_cat_worker_info info;
	for (uint32_t i = 0; i < kvp_cat_worker_max(cat); i++) {
		if (kvp_cat_worker_info(cat, i, &info) != KVP_OK || !wanted(&info, f))
			continue;
		if (n == room) {
			room = room ? room * 2 : 64;
			struct listed *grown = realloc(list, room * sizeof(*list));
			if (!grown)
				goto fail;
			list = grown;
		}
		char *name = malloc((size_t)info.model_len + info.group_len + 2);
		if (!name)
			goto fail;
		memcpy(name, info.model, info.model_len);
		name[info.model_len] = 0;
		memcpy(name + info.model_len + 1, info.group, info.group_len);
		name[info.model_len + 1 + info.group_len] = 0;
		list[n++] = (struct listed){name, info.worker_id, i};
	}
	if (n)
		qsort(list, n, sizeof(*list), by_key);
	*out = list;
	*cnt = n;
	return 0;
fail:
	while (n)
		free(list[--n].name);
	free(list);
	return -1;
}

/* write_workers writes the records as one array; a record that vanishes meanwhile is left out. */
static int write_workers(struct kvp_httpd *h, const struct filter *f)
{
	const struct kvp_cat *cat = &h->boot.region->cat;
	struct listed *list = NULL;
	size_t cnt = 0;
	if (collect(cat, f, &list, &cnt) != 0)
		return -1;
	kvp_jw_arr(&h->out);
	for (size_t i = 0; i < cnt; i++) {
		uint32_t len;
		if (kvp_cat_worker_json(cat, list[i].idx, h->record, KVP_CAT_RECORD_MAX, &len) == KVP_OK)
			kvp_jw_raw(&h->out, h->record, len);
		free(list[i].name);
	}
	kvp_jw_end(&h->out);
	free(list);
	return 0;
}

void kvp_route_worker_list(struct kvp_call *c)
{
	char model[KVP_NAME_MAX + 1], group[KVP_NAME_MAX + 1];
	struct filter f = {NULL, NULL, 0, 0};
	int by_model = kvp_query_get(c->req, "model_name", model, KVP_NAME_MAX, &f.model_len);
	int by_group = kvp_query_get(c->req, "routing_group", group, KVP_NAME_MAX, &f.group_len);
	if (by_model < 0 || by_group < 0) {
		kvp_reply_error(c, 400, "query string is malformed");
		return;
	}
	f.model = by_model ? model : NULL;
	f.group = by_group ? group : NULL;
	kvp_jw_reset(&c->h->out);
	if (write_workers(c->h, &f) != 0)
		kvp_reply_error(c, 500, "out of memory");
	else
		kvp_reply_json(c, 200);
}

int kvp_httpd_ready(struct kvp_httpd *h)
{
	return !h->draining && !kvp_recov_is_shut(&h->boot.region->recov) &&
	       kvp_selection_schedulable(h->selection) > 0 &&
	       kvp_cat_most_schedulable(&h->boot.region->cat) >= h->boot.config->min_initial_workers;
}

void kvp_route_ready(struct kvp_call *c)
{
	struct kvp_httpd *h = c->h;
	struct filter all = {NULL, NULL, 0, 0};
	uint32_t schedulable = kvp_selection_schedulable(h->selection);
	int ready = kvp_httpd_ready(h);
	kvp_jw_reset(&h->out);
	kvp_jw_obj(&h->out);
	kvp_jw_kbool(&h->out, "ready", ready);
	kvp_jw_ku64(&h->out, "schedulable_workers", schedulable);
	kvp_jw_key(&h->out, "workers");
	if (write_workers(h, &all) != 0) {
		kvp_reply_error(c, 500, "out of memory");
		return;
	}
	kvp_jw_end(&h->out);
	kvp_reply_json(c, ready ? 200 : 503);
}
