/* grpc.health.v1 over a real server: Check and Watch, on a listener of its own and beside another service. */
#include "ipc/grpc_health.h"
#include "tests/grpc_fixture.h"

static const char *const method[] = {KVP_GRPC_HEALTH_CHECK, KVP_GRPC_HEALTH_WATCH, "/kvp.test.Service/Obey"};
#define WATCHES 20

struct seen { /* by a client's call */
	int status, last;
	uint32_t messages;
	char order[32]; /* the states in the order of their coming, as digits */
	struct kvp_gc_call *call;
};
static struct kvp_grpc *g;
static struct kvp_grpc_health *h;
static struct kvp_gc *c, *both;
static uint32_t other_opened;

static void pump(struct kvp_gc *client)
{
	struct kvp_grpc_event ev;
	struct kvp_gc_event cev;
	while (kvp_grpc_next(g, &ev)) {
		if (ev.stream && ev.method < 2)
			kvp_grpc_health_event(
				h, ev.method ? KVP_GRPC_HEALTH_IS_WATCH : KVP_GRPC_HEALTH_IS_CHECK, &ev);
		else if (ev.kind == KVP_GRPC_OPEN) {
			other_opened++;
			kvp_grpc_finish(ev.stream, KVP_GRPC_OK, "");
		}
	}
	while (kvp_gc_next(client, 1, &cev)) {
		struct seen *s = cev.ctx;
		if (cev.kind == KVP_GC_STATUS) {
			s->status = cev.status;
			s->call = NULL;
			continue;
		}
		s->last = kvp_grpc_health_reply_parse(cev.data, cev.len);
		if (s->messages < sizeof(s->order) - 1)
			s->order[s->messages] = (char)('0' + s->last);
		s->messages++;
	}
}
#define UNTIL(client, cond)                                                                                  \
	for (uint64_t end_ = fix_now_ms() + FIX_WAIT_MS; !(cond) && fix_now_ms() < end_;)                    \
	pump(client)

static void ask_bytes(struct kvp_gc *client, struct seen *s, int which, const void *data, size_t len)
{
	*s = (struct seen){.status = -1, .last = -1};
	s->call = kvp_gc_call(client, method[which], FIX_WAIT_MS, s);
	kvp_gc_send(s->call, data, len);
	kvp_gc_half_close(s->call);
}

static void ask(struct kvp_gc *client, struct seen *s, int which, const char *service)
{
	uint8_t req[KVP_GRPC_HEALTH_NAME_MAX + 8];
	ask_bytes(client, s, which, req, kvp_grpc_health_request(service, req, sizeof(req)));
}

static void check(struct kvp_gc *client, const char *service, int status, int want)
{
	struct seen s;
	ask(client, &s, 0, service);
	UNTIL(client, s.status >= 0);
	ok(s.status == status && s.last == want && s.messages == (status == 0),
		"Check of '%s': status %d, answer %d", service, status, want);
}

static void checks(void)
{
	struct seen s;
	kvp_grpc_health_set(h, "", KVP_GRPC_SERVING);
	kvp_grpc_health_set(h, "liveness", KVP_GRPC_SERVING);
	kvp_grpc_health_set(h, "readiness", KVP_GRPC_NOT_SERVING);
	check(c, "", 0, KVP_GRPC_SERVING);
	check(c, "liveness", 0, KVP_GRPC_SERVING);
	check(c, "readiness", 0, KVP_GRPC_NOT_SERVING);
	check(c, "nobody", KVP_GRPC_NOT_FOUND, -1);
	check(both, "readiness", 0, KVP_GRPC_NOT_SERVING);
	kvp_grpc_health_set(h, "readiness", KVP_GRPC_SERVING);
	check(both, "readiness", 0, KVP_GRPC_SERVING);
	is_u64(kvp_grpc_health_get(h, "readiness"), KVP_GRPC_SERVING, "the table says the same");
	is_u64(kvp_grpc_health_get(h, "nobody"), KVP_GRPC_SERVICE_UNKNOWN, "and knows what it does not know");
	static uint8_t junk[2000] = {0x0a, 0xff};
	ask_bytes(c, &s, 0, junk, 2);
	UNTIL(c, s.status >= 0);
	is_u64(s.status, KVP_GRPC_INVALID_ARGUMENT, "bytes that are no request are refused");
	ask_bytes(c, &s, 0, junk, sizeof(junk));
	UNTIL(c, s.status >= 0);
	is_u64(s.status, KVP_GRPC_INVALID_ARGUMENT, "so is a long one");
	ask_bytes(c, &s, 0, "\x0a\x03li\0", 5);
	UNTIL(c, s.status >= 0);
	is_u64(s.status, KVP_GRPC_NOT_FOUND, "a name with a NUL inside names nothing");
	s = (struct seen){.status = -1};
	s.call = kvp_gc_call(c, method[0], FIX_WAIT_MS, &s);
	kvp_gc_half_close(s.call);
	UNTIL(c, s.status >= 0);
	is_u64(s.status, KVP_GRPC_INVALID_ARGUMENT, "no request at all is refused");
	s = (struct seen){.status = -1};
	s.call = kvp_gc_call(c, method[2], FIX_WAIT_MS, &s);
	UNTIL(c, s.status >= 0);
	ok(s.status == KVP_GRPC_UNIMPLEMENTED && !other_opened, "the health port has no other service");
	s = (struct seen){.status = -1};
	s.call = kvp_gc_call(both, method[2], FIX_WAIT_MS, &s);
	UNTIL(both, s.status >= 0);
	ok(s.status == 0 && other_opened == 1, "the other port has");
}

static void watches(void)
{
	struct seen w[WATCHES], gone, unknown;
	for (int i = 0; i < WATCHES; i++)
		ask(c, &w[i], 1, i % 2 ? "readiness" : "");
	ask(c, &unknown, 1, "later");
	ask(c, &gone, 1, "readiness");
	for (int i = 0; i < WATCHES; i++)
		UNTIL(c, w[i].messages == 1);
	UNTIL(c, unknown.messages == 1 && gone.messages == 1);
	is_u64(unknown.last, KVP_GRPC_SERVICE_UNKNOWN, "Watch of an unknown service says so and goes on");
	kvp_gc_cancel(gone.call);
	UNTIL(c, gone.status >= 0);
	is_u64(gone.status, KVP_GRPC_CANCELLED, "a Watch may be cancelled");
	kvp_grpc_health_set(h, "readiness", KVP_GRPC_NOT_SERVING);
	kvp_grpc_health_set(h, "readiness", KVP_GRPC_NOT_SERVING);
	kvp_grpc_health_set(h, "readiness", KVP_GRPC_SERVING);
	kvp_grpc_health_set(h, "later", KVP_GRPC_SERVING);
	for (int i = 1; i < WATCHES; i += 2)
		UNTIL(c, w[i].messages == 3);
	UNTIL(c, unknown.messages == 2);
	int good = 1;
	for (int i = 0; i < WATCHES; i++)
		good &= strcmp(w[i].order, i % 2 ? "121" : "1") == 0 && w[i].status == -1;
	ok(good, "each Watch got the first state and every change, in order, and no other");
	is_str(unknown.order, "31", "a service that comes later shows");
	ok(gone.messages == 1, "the cancelled one got nothing more");
}

static void bounds(void)
{
	static struct seen w[KVP_GRPC_HEALTH_WATCHES + 1];
	char name[KVP_GRPC_HEALTH_NAME_MAX + 1];
	uint32_t refused = 0;
	for (int i = 0; i <= KVP_GRPC_HEALTH_WATCHES; i++)
		ask(both, &w[i], 1, "");
	for (int i = 0; i <= KVP_GRPC_HEALTH_WATCHES; i++) {
		UNTIL(both, w[i].messages || w[i].status >= 0);
		refused += w[i].status == KVP_GRPC_RESOURCE_EXHAUSTED;
	}
	ok(refused >= 1 && refused <= 1 + WATCHES + 1, "Watches over the bound are refused (%u)", refused);
	memset(name, 'x', sizeof(name) - 1);
	name[sizeof(name) - 1] = 0;
	ok(kvp_grpc_health_set(h, name, KVP_GRPC_SERVING) == KVP_ERR_INVAL,
		"a name of 128 bytes is too long");
	int rc = KVP_OK, n = 4;
	for (; n <= KVP_GRPC_HEALTH_SERVICES && rc == KVP_OK; n++) {
		snprintf(name, sizeof(name), "service-%d", n);
		rc = kvp_grpc_health_set(h, name, KVP_GRPC_SERVING);
	}
	ok(rc == KVP_ERR_FULL && n == KVP_GRPC_HEALTH_SERVICES + 1, "the table has %d places",
		KVP_GRPC_HEALTH_SERVICES);
	ok(kvp_grpc_health_reply_parse("\x08\x07", 2) == KVP_ERR_PROTO &&
			kvp_grpc_health_reply_parse("\x0a", 1) == KVP_ERR_PROTO,
		"answers that are none are refused");
}

static struct kvp_gc *listener(uint32_t methods, uint16_t *port)
{
	struct kvp_grpc_listen l = {.addr = "127.0.0.1:0", .methods = methods};
	ok(kvp_grpc_listen_add(g, &l, port) == KVP_OK, "a listener");
	char target[64];
	struct kvp_gc *out = NULL;
	snprintf(target, sizeof(target), "127.0.0.1:%u", *port);
	kvp_gc_open(&out, &(struct kvp_gc_cfg){.target = target});
	return out;
}

int main(void)
{
	struct kvp_grpc_cfg cfg = {.method = method, .method_cnt = 3};
	uint16_t port;
	if (TAP_IS_TSAN)
		return skip_all(FIX_TSAN);
	ok(kvp_grpc_new(&g, &cfg) == KVP_OK, "a server");
	h = kvp_grpc_health_new();
	c = listener(3, &port);
	both = listener(7, &port);
	ok(kvp_grpc_start(g) == KVP_OK, "serves");
	checks();
	watches();
	bounds();
	kvp_gc_close(c);
	kvp_gc_close(both);
	kvp_grpc_delete(g);
	kvp_grpc_health_delete(h);
	return done();
}
