#include "daemons/discovery/probe.h"

#include "ipc/http_client.h"
#include "ipc/kube.h"
#include <kvpick/clock.h>

#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BUCKETS 4096u

enum state { WAITING, ASKING, KNOWN };
enum step { HEALTH, MODELS, METRICS, STEPS };
static const char *const path_of[STEPS] = {"/health", "/v1/models", "/metrics"};

struct probe {
	struct kvp_probes *p;
	struct probe *next;	  /* of the bucket */
	struct probe *queue_next; /* WAITING */
	char name[KVP_KUBE_NAME_MAX + 1];
	char ip[INET6_ADDRSTRLEN];
	uint16_t port;
	enum state state;
	enum step step;
	int is_dropped, is_queued;
	uint64_t due_ns;
	struct kvp_http_call *call;
	struct kvp_kube_buf body;
	struct kvp_probe_answer answer;
};

struct kvp_probes {
	struct kvp_probe_cfg cfg;
	struct kvp_http_client *http;
	struct kvp_json *json;
	struct probe *bucket[BUCKETS];
	struct probe *first, **end; /* those to be asked, in the order in which they are due */
	uint32_t asking;
	struct kvp_probe_stat stat;
};

/* ---- texts ---- */

enum kvp_probe_model kvp_probe_models(struct kvp_json *json, const char *text, size_t len, const char *model)
{
	struct kvp_json_val root, list, id;
	if (!len || kvp_json_parse(json, text, len, 16, &root, NULL) || kvp_json_get(root, "data", &list) ||
		kvp_json_type(list) != KVP_JSON_ARR)
		return KVP_PROBE_MODEL_UNKNOWN;
	struct kvp_json_iter it = kvp_json_each(list);
	while (kvp_json_next(&it))
		if (!kvp_json_get(it.val, "id", &id) && kvp_json_str_is(id, model))
			return KVP_PROBE_MODEL_SERVED;
	return KVP_PROBE_MODEL_OTHER;
}

/* The number of a label, 0 if it is none. */
static uint64_t label_number(const char *labels, const char *end, const char *key)
{
	size_t n = strlen(key);
	for (const char *p = labels; p && p < end; p = memchr(p, ',', (size_t)(end - p))) {
		p += *p == ',' || *p == '{';
		if ((size_t)(end - p) < n + 3 || memcmp(p, key, n) != 0 || p[n] != '=' || p[n + 1] != '"')
			continue;
		uint64_t v = 0;
		for (p += n + 2; p < end && *p >= '0' && *p <= '9' && v < UINT64_MAX / 100; p++)
			v = v * 10 + (uint64_t)(*p - '0');
		return p < end && *p == '"' ? v : 0;
	}
	return 0;
}

void kvp_probe_metrics(const char *text, size_t len, struct kvp_probe_answer *out)
{
	static const char tail[] = "cache_config_info{";
	for (const char *line = text, *stop = text + len; line < stop;) {
		const char *nl = memchr(line, '\n', (size_t)(stop - line)), *end = nl ? nl : stop;
		const char *at =
			*line == '#' ? NULL : memmem(line, (size_t)(end - line), tail, sizeof(tail) - 1);
		if (at) {
			const char *labels = at + sizeof(tail) - 2;
			uint64_t size = label_number(labels, end, "block_size");
			uint64_t cnt = label_number(labels, end, "num_gpu_blocks");
			out->block_size = size ? size : label_number(labels, end, "page_size");
			out->kv_blocks = cnt ? cnt : label_number(labels, end, "num_pages");
			return;
		}
		line = end + 1;
	}
}

/* ---- entries ---- */

static struct probe **place(struct kvp_probes *p, const char *name)
{
	uint32_t h = 2166136261u;
	for (const char *s = name; *s; s++)
		h = (h ^ (uint8_t)*s) * 16777619u;
	struct probe **at = &p->bucket[h % BUCKETS];
	while (*at && strcmp((*at)->name, name) != 0)
		at = &(*at)->next;
	return at;
}

static void queue_up(struct probe *e, uint64_t due_ns)
{
	struct kvp_probes *p = e->p;
	e->state = WAITING;
	e->due_ns = due_ns;
	if (e->is_queued)
		return;
	e->is_queued = 1;
	e->queue_next = NULL;
	*p->end = e;
	p->end = &e->queue_next;
	p->stat.waiting++;
}

static void probe_free(struct probe *e)
{
	free(e->body.p);
	free(e);
}

static void stop_asking(struct probe *e)
{
	if (e->state != ASKING)
		return;
	if (e->call)
		kvp_http_call_cancel(e->call);
	e->call = NULL;
	e->p->asking--;
	e->state = WAITING;
}

void kvp_probe_drop(struct kvp_probes *p, const char *name)
{
	struct probe **at = place(p, name), *e = *at;
	if (!e)
		return;
	stop_asking(e);
	p->stat.known -= e->state == KNOWN;
	*at = e->next;
	e->is_dropped = 1;
	if (!e->is_queued) /* else whoever takes it from the queue frees it */
		probe_free(e);
}

const struct kvp_probe_answer *kvp_probe_get(
	struct kvp_probes *p, const char *name, const char *ip, uint16_t port)
{
	struct probe **at = place(p, name), *e = *at;
	if (strlen(name) > KVP_KUBE_NAME_MAX || strlen(ip) >= sizeof(e->ip))
		return NULL;
	if (e && strcmp(e->ip, ip) == 0 && e->port == port)
		return e->state == KNOWN ? &e->answer : NULL;
	if (e)
		kvp_probe_drop(p, name);
	e = calloc(1, sizeof(*e));
	if (!e)
		return NULL;
	e->p = p;
	e->port = port;
	memcpy(e->name, name, strlen(name) + 1);
	memcpy(e->ip, ip, strlen(ip) + 1);
	at = place(p, name);
	e->next = *at;
	*at = e;
	queue_up(e, 0);
	return NULL;
}

/* ---- asking ---- */

static void ask(struct probe *e);

static void on_body(void *ctx, struct kvp_http_call *c, const char *data, uint64_t len)
{
	struct probe *e = ctx;
	(void)c;
	(void)kvp_kube_put(&e->body, data, len); /* without memory it says less */
}

static void fail(struct probe *e)
{
	e->p->stat.failed++;
	e->p->asking--;
	queue_up(e, kvp_clock_mono_ns() + KVP_PROBE_RETRY_NS);
}

static void finish(struct probe *e)
{
	struct kvp_probes *p = e->p;
	free(e->body.p);
	e->body = (struct kvp_kube_buf){.p = NULL};
	p->asking--;
	p->stat.answered++;
	p->stat.known++;
	e->state = KNOWN;
	p->cfg.on_answer(p->cfg.ctx, e->name, &e->answer);
}

/* Only health has to be answered well: an engine need not tell more. */
static void on_done(void *ctx, struct kvp_http_call *c, int status, int err)
{
	struct probe *e = ctx;
	(void)c;
	e->call = NULL;
	int good = !err && status == 200;
	if (err || (e->step == HEALTH && !good)) {
		fail(e);
		return;
	}
	if (good && e->step == MODELS)
		e->answer.model = kvp_probe_models(e->p->json, e->body.p, e->body.len, e->p->cfg.model);
	else if (good && e->step == METRICS && e->body.p)
		kvp_probe_metrics(e->body.p, e->body.len, &e->answer);
	e->step++;
	if (e->step == STEPS)
		finish(e);
	else
		ask(e);
}

static void ask(struct probe *e)
{
	struct kvp_http_call_cfg c = {.host = e->ip,
		.port = e->port,
		.path = path_of[e->step],
		.timeout_ns = KVP_PROBE_TIMEOUT_NS,
		.body_max_bytes = KVP_PROBE_BODY_MAX,
		.on_body = on_body,
		.on_done = on_done,
		.ctx = e};
	e->body.len = 0;
	if (kvp_http_call(e->p->http, &c, &e->call))
		fail(e);
}

static void begin(struct probe *e)
{
	e->state = ASKING;
	e->step = HEALTH;
	e->answer = (struct kvp_probe_answer){.block_size = 0};
	e->p->asking++;
	e->p->stat.asked++;
	ask(e);
}

void kvp_probes_tend(struct kvp_probes *p, uint64_t now_ns)
{
	/* Each is looked at once: one that is not due, or can't be asked now, goes to the end. */
	for (uint32_t n = p->stat.waiting; n && p->asking < KVP_PROBE_WINDOW; n--) {
		struct probe *e = p->first;
		p->first = e->queue_next;
		if (!p->first)
			p->end = &p->first;
		p->stat.waiting--;
		e->is_queued = 0;
		if (e->is_dropped)
			probe_free(e);
		else if (e->due_ns > now_ns)
			queue_up(e, e->due_ns);
		else
			begin(e);
	}
}

int kvp_probes_open(const struct kvp_probe_cfg *cfg, struct kvp_probes **out)
{
	struct kvp_probes *p = calloc(1, sizeof(*p));
	struct kvp_http_client_cfg hc = {.conn_max = 2 * KVP_PROBE_WINDOW, .idle_max = KVP_PROBE_WINDOW};
	if (!p)
		return KVP_ERR_SYS;
	p->cfg = *cfg;
	p->end = &p->first;
	p->json = kvp_json_new();
	if (!p->json || kvp_http_client_open(cfg->loop, &hc, &p->http)) {
		kvp_probes_close(p);
		return KVP_ERR_SYS;
	}
	*out = p;
	return KVP_OK;
}

void kvp_probes_close(struct kvp_probes *p)
{
	if (!p)
		return;
	for (uint32_t i = 0; i < BUCKETS; i++)
		while (p->bucket[i])
			kvp_probe_drop(p, p->bucket[i]->name);
	for (struct probe *e = p->first, *next; e; e = next) {
		next = e->queue_next;
		probe_free(e);
	}
	kvp_http_client_close(p->http);
	kvp_json_free(p->json);
	free(p);
}

void kvp_probes_stat(const struct kvp_probes *p, struct kvp_probe_stat *out)
{
	*out = p->stat;
}
