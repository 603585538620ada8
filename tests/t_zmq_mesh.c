/* t_zmq_mesh — one replica's sockets against raw ZMQ sockets and each other, on both back ends of the
 * loop. */
#include <errno.h>
#include <stdlib.h>
#include <zmq.h>

#include "ipc/zmq_mesh.h"
#include "ipc/zmq_monitor.h"
#include "tests/procs.h"
#include "tests/replica_vec.h"

static void *zmq;
static uint64_t got, stop_every; /* messages handed over; stop after so many, 0 = never */
static uint8_t last[1 << 16];
static size_t last_len;
static enum kvp_replica_topic last_topic;
static char from[4096]; /* first byte of each message */

static int on_message(void *ctx, enum kvp_replica_topic t, const void *payload, size_t len)
{
	(void)ctx;
	last_topic = t;
	last_len = len < sizeof(last) ? len : sizeof(last);
	memcpy(last, payload, last_len);
	from[got % sizeof(from)] = len ? *(const char *)payload : 0;
	got++;
	return stop_every && got % stop_every == 0;
}

static struct kvp_zmq_mesh *open_mesh(uint32_t topics)
{
	struct kvp_zmq_mesh_cfg cfg = {.zmq = zmq, .topics = topics, .on_message = on_message};
	struct kvp_zmq_mesh *m = NULL;
	if (kvp_zmq_mesh_open(&cfg, &m)) {
		printf("Bail out! no mesh: %s\n", strerror(errno));
		exit(1);
	}
	return m;
}

/* A peer whose publisher tells when it was subscribed to. */
static void *open_xpub(char *endpoint, size_t cap)
{
	int zero = 0, on = 1;
	void *s = zmq_socket(zmq, ZMQ_XPUB);
	zmq_setsockopt(s, ZMQ_LINGER, &zero, sizeof(zero));
	zmq_setsockopt(s, ZMQ_SNDHWM, &zero, sizeof(zero));
	zmq_setsockopt(s, ZMQ_XPUB_VERBOSER, &on, sizeof(on));
	if (zmq_bind(s, "tcp://127.0.0.1:*") || zmq_getsockopt(s, ZMQ_LAST_ENDPOINT, endpoint, &cap)) {
		printf("Bail out! no publisher\n");
		exit(1);
	}
	return s;
}

/* The next subscription that arrives, as text; "" after ten seconds. */
static const char *subscription(void *xpub)
{
	static char buf[64];
	zmq_pollitem_t item = {.socket = xpub, .events = ZMQ_POLLIN};
	if (zmq_poll(&item, 1, 10000) < 1)
		return "";
	int n = zmq_recv(xpub, buf, sizeof(buf) - 1, 0);
	buf[n > 0 ? n : 0] = 0;
	return buf[0] == 1 ? buf + 1 : "";
}

static void send_one(void *xpub, const char *topic, const void *payload, size_t len)
{
	zmq_send(xpub, topic, strlen(topic), ZMQ_SNDMORE);
	zmq_send(xpub, payload, len, 0);
}

static int work_until(struct kvp_zmq_mesh *m, uint64_t want)
{
	uint64_t end = now_ms() + 10000;
	while (got < want && now_ms() < end)
		if (!kvp_zmq_mesh_work(m, 64))
			zmq_poll(NULL, 0, 1);
	return got >= want;
}

static void frames(void)
{
	char endpoint[96];
	void *pub = open_xpub(endpoint, sizeof(endpoint));
	struct kvp_zmq_mesh *m = open_mesh(1u << KVP_REPLICA_LIFECYCLE);
	got = 0;
	ok(kvp_zmq_mesh_work(m, 8) == 0, "without peers there is nothing to do");
	ok(kvp_zmq_mesh_connect(m, endpoint) == KVP_OK, "connected");
	ok(kvp_zmq_mesh_connect(m, endpoint) == KVP_ERR_EXISTS, "once only");
	is_str(subscription(pub), KVP_REPLICA_TOPIC_LIFECYCLE, "subscribes to one topic");
	zmq_send(pub, KVP_REPLICA_TOPIC_LIFECYCLE, 22, 0); /* one frame */
	zmq_send(pub, KVP_REPLICA_TOPIC_LIFECYCLE, 22, ZMQ_SNDMORE);
	zmq_send(pub, "a", 1, ZMQ_SNDMORE);
	zmq_send(pub, "b", 1, 0); /* three */
	send_one(pub, "dynamo.slot-tracker.v12", "c", 1); /* the prefix passes the subscription */
	send_one(pub, KVP_REPLICA_TOPIC_AFFINITY, "d", 1);
	send_one(pub, KVP_REPLICA_TOPIC_LIFECYCLE, "e", 1);
	ok(work_until(m, 1) && got == 1 && last[0] == 'e', "only a whole message of the topic arrives");
	is_u64(kvp_zmq_mesh_stat(m)->bad_frames, 3, "bad ones are counted");
	is_u64(kvp_zmq_mesh_stat(m)->received, 1, "and good ones");
	ok(kvp_zmq_mesh_connect(m, "tcp://*:9092") == KVP_ERR_INVAL, "a wildcard host is refused");
	ok(kvp_zmq_mesh_connect(m, "tcp://nowhere.invalid:1") == KVP_OK, "an unknown host is no error");
	is_u64(kvp_zmq_mesh_cnt(m), 2, "two peers");
	ok(kvp_zmq_mesh_disconnect(m, "tcp://127.0.0.1:1") == KVP_ERR_NOTFOUND, "no such peer");
	kvp_zmq_mesh_close(m);
	zmq_close(pub);
}

/* What a removed peer has sent is not handed over, also if it is here already. */
static void removal(void)
{
	char endpoint[2][96];
	void *pub[2] = {open_xpub(endpoint[0], 96), open_xpub(endpoint[1], 96)};
	struct kvp_zmq_mesh *m = open_mesh(1u << KVP_REPLICA_LIFECYCLE);
	got = 0;
	for (int i = 0; i < 2; i++) {
		kvp_zmq_mesh_connect(m, endpoint[i]);
		subscription(pub[i]);
	}
	for (int i = 0; i < 500; i++)
		send_one(pub[0], KVP_REPLICA_TOPIC_LIFECYCLE, "x", 1);
	uint64_t end = now_ms() + 10000;
	while (got < 1 && now_ms() < end)
		kvp_zmq_mesh_work(m, 1);
	ok(got == 1 && kvp_zmq_mesh_work(m, 1) == 1, "one message read, more are there");
	ok(kvp_zmq_mesh_disconnect(m, endpoint[0]) == KVP_OK, "removed");
	uint64_t before = got;
	for (int i = 0; i < 100; i++)
		send_one(pub[1], KVP_REPLICA_TOPIC_LIFECYCLE, "y", 1);
	ok(work_until(m, before + 100), "the other peer goes on");
	uint32_t other = 0;
	for (uint64_t i = before; i < got; i++)
		other += from[i % sizeof(from)] == 'y';
	is_u64(other, got - before, "nothing of the removed one came");
	ok(kvp_zmq_mesh_connect(m, endpoint[0]) == KVP_OK, "it may come back");
	while (*subscription(pub[0]) == 0 && now_ms() < end)
		;
	send_one(pub[0], KVP_REPLICA_TOPIC_LIFECYCLE, "z", 1);
	ok(work_until(m, before + 101) && last[0] == 'z', "and is heard again");
	kvp_zmq_mesh_close(m);
	zmq_close(pub[0]);
	zmq_close(pub[1]);
}

/* A peer that always has more to say does not keep the others waiting. */
static void taking_turns(void)
{
	char endpoint[3][96];
	void *pub[3];
	struct kvp_zmq_mesh *m = open_mesh(1u << KVP_REPLICA_LIFECYCLE);
	uint64_t end = now_ms() + 10000, was;
	uint32_t others = 0;
	got = 0;
	for (int i = 0; i < 3; i++) {
		pub[i] = open_xpub(endpoint[i], 96);
		kvp_zmq_mesh_connect(m, endpoint[i]);
		subscription(pub[i]);
	}
	for (int i = 0; i < 500; i++)
		send_one(pub[1], KVP_REPLICA_TOPIC_LIFECYCLE, "x", 1);
	while ((was = got) < 100 && now_ms() < end)
		kvp_zmq_mesh_work(m, 1);
	send_one(pub[0], KVP_REPLICA_TOPIC_LIFECYCLE, "y", 1);
	send_one(pub[2], KVP_REPLICA_TOPIC_LIFECYCLE, "y", 1);
	while (others < 2 && now_ms() < end) {
		send_one(pub[1], KVP_REPLICA_TOPIC_LIFECYCLE, "x", 1);
		zmq_poll(NULL, 0, 1); /* it is always ahead of us */
		kvp_zmq_mesh_work(m, 1);
		others += got > was && from[(got - 1) % sizeof(from)] == 'y';
		was = got;
	}
	is_u64(others, 2, "two others are heard while one goes on and on");
	kvp_zmq_mesh_close(m);
	for (int i = 0; i < 3; i++)
		zmq_close(pub[i]);
}

/* Tends until so many connections were made anew. */
static int tend_until(struct kvp_zmq_mesh *m, uint64_t want)
{
	uint64_t end = now_ms() + 20000;
	while (kvp_zmq_mesh_stat(m)->given_up < want && now_ms() < end) {
		kvp_zmq_mesh_tend(m);
		kvp_zmq_mesh_work(m, 64);
		zmq_poll(NULL, 0, 10);
	}
	return kvp_zmq_mesh_stat(m)->given_up == want;
}

/* A frame over the library's limit costs its sender the connection, for a moment, and others nothing. */
static void giant(const char *host)
{
	enum { LEN = (64 << 20) + 1 };
	char endpoint[2][96], named[96];
	void *pub[2] = {open_xpub(endpoint[0], 96), open_xpub(endpoint[1], 96)};
	struct kvp_zmq_mesh *m = open_mesh(1u << KVP_REPLICA_LIFECYCLE);
	char *big = calloc(1, LEN);
	got = 0;
	snprintf(named, sizeof(named), "tcp://%s%s", host, strrchr(endpoint[0], ':'));
	kvp_zmq_mesh_connect(m, named);
	kvp_zmq_mesh_connect(m, endpoint[1]);
	for (int i = 0; i < 2; i++)
		is_str(subscription(pub[i]), KVP_REPLICA_TOPIC_LIFECYCLE, "%s: subscribed", host);
	for (uint64_t round = 1; round <= 2; round++) {
		uint64_t was = got;
		send_one(pub[0], KVP_REPLICA_TOPIC_LIFECYCLE, big, LEN);
		for (int i = 0; i < 40; i++)
			send_one(pub[1], KVP_REPLICA_TOPIC_LIFECYCLE, "y", 1);
		ok(tend_until(m, round), "%s: the connection is given up, and made anew", host);
		uint64_t end = now_ms() + 10000;
		while (*subscription(pub[0]) == 0 && now_ms() < end)
			; /* the end of the old one is told first */
		send_one(pub[0], KVP_REPLICA_TOPIC_LIFECYCLE, "z", 1);
		ok(work_until(m, was + 41) && got == was + 41, "%s: it is heard again, others always were",
			host);
		kvp_zmq_mesh_tend(m);
		is_u64(kvp_zmq_mesh_stat(m)->given_up, round, "%s: once", host);
	}
	free(big);
	kvp_zmq_mesh_close(m);
	zmq_close(pub[0]);
	zmq_close(pub[1]);
}

/* A peer that goes and comes is not given up: the library itself tries again. */
static void away(void)
{
	char endpoint[96];
	void *pub = open_xpub(endpoint, sizeof(endpoint));
	struct kvp_zmq_mesh *m = open_mesh(1u << KVP_REPLICA_LIFECYCLE);
	kvp_zmq_mesh_connect(m, endpoint);
	subscription(pub);
	zmq_close(pub);
	uint64_t end = now_ms() + KVP_ZMQ_GIVEN_UP_MS + 300;
	while (now_ms() < end) {
		kvp_zmq_mesh_tend(m);
		zmq_poll(NULL, 0, 10);
	}
	is_u64(kvp_zmq_mesh_stat(m)->given_up, 0, "a peer that is away is waited for");
	kvp_zmq_mesh_close(m);
}

/* ---- on the loop ---- */

static struct kvp_zmq_mesh *looped;
static uint32_t looped_max;
static uint64_t looped_want; /* with so many there is nothing left to wait for */

static int hook(void *ctx)
{
	(void)ctx;
	return kvp_zmq_mesh_work(looped, looped_max) || got >= looped_want;
}

/* Bursts of every size, of one of three peers or of two: whatever is read in a turn, the loop is never left
 * asleep with the rest. */
static void wakeups(enum kvp_loop_backend be)
{
	struct kvp_loop *l;
	char endpoint[3][96];
	void *pub[3];
	uint64_t sent = 0, seed = 1;
	uint32_t asleep = 0;
	looped = open_mesh(1u << KVP_REPLICA_LIFECYCLE);
	kvp_loop_open_backend(&l, 0, be);
	for (int i = 0; i < 3; i++) {
		pub[i] = open_xpub(endpoint[i], 96);
		kvp_zmq_mesh_connect(looped, endpoint[i]);
		subscription(pub[i]);
		if (i == 0)
			ok(kvp_zmq_mesh_watch(looped, l) == KVP_OK, "watched, back end %d", (int)be);
	}
	kvp_loop_before_sleep(l, hook, NULL);
	got = 0;
	for (int round = 0; round < 300 && !asleep; round++) {
		seed = seed * 6364136223846793005u + 1442695040888963407u;
		uint32_t burst = 1 + (uint32_t)(seed >> 33) % 200, who = (uint32_t)(seed >> 20) % 3;
		looped_max = 1 + (uint32_t)(seed >> 45) % 40;
		stop_every = seed >> 60;
		for (uint32_t i = 0; i < burst; i++)
			send_one(pub[i % 5 ? who : 0], KVP_REPLICA_TOPIC_LIFECYCLE, "w", 1);
		looped_want = sent += burst;
		for (uint64_t was = now_ms(); got < sent && !asleep; asleep = now_ms() - was > 8000)
			kvp_loop_run_once(l, 8000000000);
	}
	is_u64(got, sent, "all messages of all bursts");
	is_u64(asleep, 0, "never left asleep");
	stop_every = 0;
	kvp_zmq_mesh_close(looped);
	kvp_loop_close(l);
	for (int i = 0; i < 3; i++)
		zmq_close(pub[i]);
}

/* ---- two meshes ---- */

/* Publishes again and again until the subscription has come through. */
static int first(struct kvp_zmq_mesh *a, struct kvp_zmq_mesh *b, const void *p, size_t len)
{
	uint64_t end = now_ms() + 10000;
	got = 0;
	while (!got && now_ms() < end) {
		kvp_zmq_mesh_send(a, KVP_REPLICA_LIFECYCLE, p, len);
		zmq_poll(NULL, 0, 1);
		kvp_zmq_mesh_work(b, 1);
	}
	while (kvp_zmq_mesh_work(b, 64))
		;
	return got > 0;
}

static void pair(const char *host, struct kvp_json_val golden)
{
	char endpoint[96], name[96];
	uint32_t both = 1u << KVP_REPLICA_LIFECYCLE | 1u << KVP_REPLICA_AFFINITY;
	struct kvp_zmq_mesh *a = open_mesh(both), *b = open_mesh(both);
	snprintf(endpoint, sizeof(endpoint), "tcp://%s:%u", host, kvp_zmq_mesh_port(a));
	ok(kvp_zmq_mesh_connect(b, endpoint) == KVP_OK, "connected to %s", host);
	ok(first(a, b, "hello", 5), "%s: subscribed", host);
	struct kvp_json_iter it = kvp_json_each(golden);
	while (kvp_json_next(&it)) {
		size_t len;
		uint8_t *p = rv_unhex(vec_str(it.val, "payload_hex"), &len);
		enum kvp_replica_topic t = KVP_REPLICA_LIFECYCLE;
		const char *topic = vec_str(it.val, "topic");
		kvp_replica_topic_of(topic, strlen(topic), &t);
		snprintf(name, sizeof(name), "%s over %s", vec_str(it.val, "name"), host);
		uint64_t end = now_ms() + 10000, was = got;
		kvp_zmq_mesh_send(a, t, p, len);
		while (got == was && now_ms() < end)
			kvp_zmq_mesh_work(b, 1);
		/* late greetings may come first */
		while (last_len == 5 && now_ms() < end)
			kvp_zmq_mesh_work(b, 1);
		ok(last_topic == t && last_len == len && memcmp(last, p, len) == 0, "%s", name);
		free(p);
	}
	struct kvp_zmq_mesh_cfg cfg = {.zmq = zmq, .port = kvp_zmq_mesh_port(a), .on_message = on_message};
	struct kvp_zmq_mesh *c = NULL;
	ok(kvp_zmq_mesh_open(&cfg, &c) == KVP_ERR_SYS && errno == EADDRINUSE, "a taken port is refused");
	ok(kvp_zmq_mesh_connect(a, endpoint) == KVP_OK && first(a, a, "self", 4), "one may hear itself");
	kvp_zmq_mesh_close(a);
	kvp_zmq_mesh_close(b);
}

int main(void)
{
	struct kvp_json *json = kvp_json_new();
	struct kvp_json_val golden = vec_get(vec_load(json, "replica_sync.json"), "golden");
	zmq = zmq_ctx_new();
	frames();
	removal();
	taking_turns();
	giant("127.0.0.1");
	giant("localhost");
	away();
	wakeups(KVP_LOOP_AUTO);
	wakeups(KVP_LOOP_EPOLL);
	pair("127.0.0.1", golden);
	pair("localhost", golden);
	void *probe = zmq_socket(zmq, ZMQ_PAIR);
	int on = 1;
	zmq_setsockopt(probe, ZMQ_IPV6, &on, sizeof(on));
	if (zmq_bind(probe, "tcp://[::1]:*") == 0)
		pair("[::1]", golden);
	else
		printf("ok %d - # SKIP this host has no IPv6\n", ++tap_cnt);
	zmq_close(probe);
	zmq_ctx_term(zmq);
	kvp_json_free(json);
	return done();
}
