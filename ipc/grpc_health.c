/* ipc/grpc_health.c - a table of names, a list of streams. Everything is small; nothing here is fast. */
#include "ipc/grpc_health.h"
#include "ipc/extproc.pb-c.h"

#include <kvpick/err.h>

#include <stdlib.h>
#include <string.h>

#define REQUEST_MAX 1024

struct service {
	char name[KVP_GRPC_HEALTH_NAME_MAX];
	enum kvp_grpc_serving status;
};

/* A stream of either method, from its OPEN to its CLOSED. */
struct asker {
	struct asker *next, **prev;
	struct kvp_grpc_stream *stream;
	enum kvp_grpc_health_method method;
	int asked;    /* the request is there */
	int watching; /* name is valid */
	char name[KVP_GRPC_HEALTH_NAME_MAX];
};

struct kvp_grpc_health {
	struct service service[KVP_GRPC_HEALTH_SERVICES];
	uint32_t service_cnt, watch_cnt;
	struct asker *asker;
};

struct kvp_grpc_health *kvp_grpc_health_new(void)
{
	return calloc(1, sizeof(struct kvp_grpc_health));
}

void kvp_grpc_health_delete(struct kvp_grpc_health *h)
{
	while (h && h->asker) {
		struct asker *a = h->asker;
		h->asker = a->next;
		free(a);
	}
	free(h);
}

size_t kvp_grpc_health_request(const char *service, uint8_t *out, size_t max)
{
	Kvp__Extproc__HealthCheckRequest m;
	kvp__extproc__health_check_request__init(&m);
	m.service = (ProtobufCBinaryData){strlen(service), (uint8_t *)(uintptr_t)service};
	KVP_ASSERT(kvp__extproc__health_check_request__get_packed_size(&m) <= max);
	return kvp__extproc__health_check_request__pack(&m, out);
}

size_t kvp_grpc_health_reply(enum kvp_grpc_serving status, uint8_t *out, size_t max)
{
	Kvp__Extproc__HealthCheckResponse m;
	kvp__extproc__health_check_response__init(&m);
	m.status = status;
	KVP_ASSERT(kvp__extproc__health_check_response__get_packed_size(&m) <= max);
	return kvp__extproc__health_check_response__pack(&m, out);
}

int kvp_grpc_health_reply_parse(const void *data, size_t len)
{
	Kvp__Extproc__HealthCheckResponse *m = kvp__extproc__health_check_response__unpack(NULL, len, data);
	if (!m)
		return KVP_ERR_PROTO;
	int status = m->status <= KVP_GRPC_SERVICE_UNKNOWN ? (int)m->status : KVP_ERR_PROTO;
	kvp__extproc__health_check_response__free_unpacked(m, NULL);
	return status;
}

/* A name that is too long for the table names no service of ours; one with a NUL inside neither. */
static int parse_request(const void *data, size_t len, char name[KVP_GRPC_HEALTH_NAME_MAX])
{
	if (len > REQUEST_MAX)
		return KVP_ERR_LIMIT;
	Kvp__Extproc__HealthCheckRequest *m = kvp__extproc__health_check_request__unpack(NULL, len, data);
	if (!m)
		return KVP_ERR_PROTO;
	int rc = m->service.len < KVP_GRPC_HEALTH_NAME_MAX &&
				 !(m->service.len && memchr(m->service.data, 0, m->service.len))
			 ? KVP_OK
			 : KVP_ERR_NOTFOUND;
	if (rc == KVP_OK) {
		memset(name, 0, KVP_GRPC_HEALTH_NAME_MAX);
		if (m->service.len)
			memcpy(name, m->service.data, m->service.len);
	}
	kvp__extproc__health_check_request__free_unpacked(m, NULL);
	return rc;
}

static struct service *find(const struct kvp_grpc_health *h, const char *name)
{
	for (uint32_t i = 0; i < h->service_cnt; i++)
		if (strcmp(h->service[i].name, name) == 0)
			return (struct service *)&h->service[i];
	return NULL;
}

enum kvp_grpc_serving kvp_grpc_health_get(const struct kvp_grpc_health *h, const char *service)
{
	const struct service *s = find(h, service);
	return s ? s->status : KVP_GRPC_SERVICE_UNKNOWN;
}

static void say(struct asker *a, enum kvp_grpc_serving status)
{
	uint8_t out[16];
	size_t len = kvp_grpc_health_reply(status, out, sizeof(out));
	kvp_grpc_send(a->stream, out, len);
}

int kvp_grpc_health_set(struct kvp_grpc_health *h, const char *service, enum kvp_grpc_serving status)
{
	struct service *s = find(h, service);
	if (strlen(service) >= KVP_GRPC_HEALTH_NAME_MAX)
		return KVP_ERR_INVAL;
	if (s && s->status == status)
		return KVP_OK;
	if (!s) {
		if (h->service_cnt == KVP_GRPC_HEALTH_SERVICES)
			return KVP_ERR_FULL;
		s = &h->service[h->service_cnt++];
		memcpy(s->name, service, strlen(service) + 1);
	}
	s->status = status;
	for (struct asker *a = h->asker; a; a = a->next) {
		if (!a->watching || strcmp(a->name, service) != 0)
			continue;
		if (kvp_grpc_unsent(a->stream) >= KVP_GRPC_HEALTH_UNREAD)
			kvp_grpc_abort(a->stream);
		else
			say(a, status);
	}
	return KVP_OK;
}

static void on_open(struct kvp_grpc_health *h, enum kvp_grpc_health_method m, struct kvp_grpc_stream *st)
{
	struct asker *a = NULL;
	if (m != KVP_GRPC_HEALTH_IS_WATCH || h->watch_cnt < KVP_GRPC_HEALTH_WATCHES)
		a = calloc(1, sizeof(*a));
	if (!a) {
		kvp_grpc_finish(st, KVP_GRPC_RESOURCE_EXHAUSTED, "too many health watches");
		return;
	}
	h->watch_cnt += m == KVP_GRPC_HEALTH_IS_WATCH;
	a->stream = st;
	a->method = m;
	a->next = h->asker;
	a->prev = &h->asker;
	if (a->next)
		a->next->prev = &a->next;
	h->asker = a;
	kvp_grpc_set_ctx(st, a);
}

static void on_request(struct kvp_grpc_health *h, struct asker *a, const struct kvp_grpc_event *ev)
{
	int rc = parse_request(ev->data, ev->len, a->name);
	a->asked = 1;
	if (rc == KVP_ERR_PROTO || rc == KVP_ERR_LIMIT) {
		kvp_grpc_finish(a->stream, KVP_GRPC_INVALID_ARGUMENT, "not a HealthCheckRequest");
		return;
	}
	enum kvp_grpc_serving now = rc == KVP_OK ? kvp_grpc_health_get(h, a->name) : KVP_GRPC_SERVICE_UNKNOWN;
	if (a->method == KVP_GRPC_HEALTH_IS_WATCH) {
		a->watching = rc == KVP_OK;
		say(a, now);
	} else if (now == KVP_GRPC_SERVICE_UNKNOWN) {
		kvp_grpc_finish(a->stream, KVP_GRPC_NOT_FOUND, "unknown service");
	} else {
		say(a, now);
		kvp_grpc_finish(a->stream, KVP_GRPC_OK, "");
	}
}

void kvp_grpc_health_event(
	struct kvp_grpc_health *h, enum kvp_grpc_health_method m, const struct kvp_grpc_event *ev)
{
	struct asker *a = ev->kind == KVP_GRPC_OPEN ? NULL : kvp_grpc_ctx(ev->stream);
	switch (ev->kind) {
	case KVP_GRPC_OPEN:
		on_open(h, m, ev->stream);
		break;
	case KVP_GRPC_MESSAGE:
		if (a && !a->asked)
			on_request(h, a, ev);
		break;
	case KVP_GRPC_HALF_CLOSE:
		if (a && !a->asked)
			kvp_grpc_finish(ev->stream, KVP_GRPC_INVALID_ARGUMENT, "no request");
		break;
	case KVP_GRPC_CLOSED:
		if (!a)
			break;
		h->watch_cnt -= a->method == KVP_GRPC_HEALTH_IS_WATCH;
		*a->prev = a->next;
		if (a->next)
			a->next->prev = a->prev;
		free(a);
		break;
	default:
		break;
	}
}
