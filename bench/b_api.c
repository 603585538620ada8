/* HTTP select_and_reserve against a running service: kvpick's, or any other that speaks the same API.
 *
 * Usage      b_api --port N [--name S] [--pid P,P..] [--hashes N,N..] [--conns N,N..] [--seconds S] [--half]
 * Setting    8 workers that subscribe to one simulated engine; every second prompt is in its cache. Prompts
 *            go as block and sequence hashes on keep-alive connections, closed loop: each connection sends
 *            its next request when it has its answer. Bookings are freed between the measured stretches.
 * Prints     ops_s = requests a second; cpu_us_req = processor time of the given processes a request;
 *            ops_cpu_s = requests a second of their processor time (a core's worth); latencies as the client
 *            sees them. --half: also a line bench=api.half, with half the requests a second of the last
 *            closed loop, due at even intervals, latencies from the time they were due. And GET /health in
 *            both ways, bench=api.empty and api.empty_half: what sockets and scheduler take of the above.
 */
#include <ctype.h>
#include <errno.h>
#include <kvpick/err.h>
#include "bench/live.h"
#include "ipc/json_out.h"
#include "ipc/loop.h"

#define CONN_MAX 256
#define WORKERS 8
#define PROMPT_MAX 128
#define LAT_MAX (1u << 20)
#define REPEATS 5
#define LIST_MAX 64
#define ID_FORM "b%09u"
#define ID_LEN 10
#define LATE_NS 1000000 /* longest sleep while requests are due or without answer */

struct prompt {
	char *req; /* whole request; the id's digits are filled in at id_at */
	size_t len, id_at;
};
enum phase { SELECT, HEALTH, FREE };
struct conn {
	struct kvp_sock s;
	char *out; /* ours while nothing is being sent */
	char *in;  /* answer so far */
	size_t in_len, in_cap;
	uint64_t due_ns;
	int waiting; /* for an answer */
};
struct list {
	uint32_t v[LIST_MAX], cnt;
};
struct result {
	double ops_s, cpu_ns_req, p50, p99, max;
	uint64_t ops;
};

static struct {
	uint16_t port;
	const char *name;
	struct list hashes, conns;
	struct list pid;
	double seconds;
	int half;
} cfg = {.name = "kvpick", .hashes = {{128, 2000}, 2}, .conns = {{1, 8, 64}, 3}, .seconds = 1.0};

static struct kvp_loop *loop;
static struct live_shared *shared;
static struct prompt prompt[PROMPT_MAX];
static uint32_t prompt_cnt;
static size_t req_max;
static struct conn conn[CONN_MAX];
static uint32_t conn_cnt;
static enum phase phase;
static enum pace { CLOSED_LOOP, OPEN_LOOP } pace;
static uint32_t next_id, end_id, open_cnt; /* ids of this stretch; requests without answer */
static uint64_t wrong;			   /* answers other than 200 */
static uint32_t *lat, lat_cnt;

static void die(const char *what, const char *detail)
{
	fprintf(stderr, "b_api: %s: %s\n", what, detail);
	exit(1);
}

/* -- processor time -- */

static uint64_t cpu_ns(void)
{
	uint64_t sum = 0;
	for (uint32_t i = 0; i < cfg.pid.cnt; i++) {
		char path[64];
		snprintf(path, sizeof(path), "/proc/%u/task", cfg.pid.v[i]);
		DIR *d = opendir(path);
		for (struct dirent *e; d && (e = readdir(d));) {
			unsigned long long ns = 0;
			snprintf(
				path, sizeof(path), "/proc/%u/task/%.16s/schedstat", cfg.pid.v[i], e->d_name);
			FILE *f = isdigit((unsigned char)e->d_name[0]) ? fopen(path, "re") : NULL;
			if (f && fscanf(f, "%llu", &ns) == 1)
				sum += ns;
			if (f)
				fclose(f);
		}
		if (d)
			closedir(d);
	}
	return sum;
}

static int cmp_u32(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
	return (x > y) - (x < y);
}

/* -- requests -- */

static void hashes_of(uint64_t msg, uint32_t blk, uint64_t *local, uint64_t *seq)
{
	static uint32_t tok[LIVE_MSG_BLK_MAX * LIVE_BLOCK_TOK];
	struct kvp_hasher h;
	live_tokens(msg, 0, blk, tok);
	kvp_hasher_init(&h, tok, (uint64_t)blk * LIVE_BLOCK_TOK, LIVE_BLOCK_TOK, KVP_HASH_WINDOW_PLAIN,
		kvp_hash_seed(NULL, 0, NULL, 0));
	kvp_hasher_local(&h, 0, blk, local);
	kvp_hash_chain(NULL, local, blk, seq);
}

static void body_of(struct kvp_jw *w, uint64_t msg, uint32_t blk, const char *id)
{
	static uint64_t local[LIVE_MSG_BLK_MAX], seq[LIVE_MSG_BLK_MAX];
	hashes_of(msg, blk, local, seq);
	kvp_jw_reset(w);
	kvp_jw_obj(w);
	if (id)
		kvp_jw_kstr(w, "selection_id", id);
	kvp_jw_ku64(w, "isl_tokens", (uint64_t)blk * LIVE_BLOCK_TOK);
	kvp_jw_key(w, "block_hashes");
	kvp_jw_i64s(w, (const int64_t *)local, blk);
	kvp_jw_key(w, "sequence_hashes");
	kvp_jw_i64s(w, (const int64_t *)seq, blk);
	kvp_jw_end(w);
	if (kvp_jw_done(w))
		die("body", "no memory");
}

static void make_prompt(struct prompt *p, uint64_t msg, uint32_t blk)
{
	struct kvp_jw w;
	char head[256];
	kvp_jw_init(&w);
	body_of(&w, msg, blk, "b000000000");
	int n = snprintf(head, sizeof(head),
		"POST /select_and_reserve HTTP/1.1\r\nHost: 127.0.0.1:%u\r\nContent-Type: "
		"application/json\r\n"
		"Content-Length: %zu\r\n\r\n",
		cfg.port, w.len);
	p->len = (size_t)n + w.len;
	p->req = malloc(p->len + 1);
	if (!p->req)
		die("request", "no memory");
	memcpy(p->req, head, (size_t)n);
	memcpy(p->req + n, w.buf, w.len);
	p->id_at = (size_t)((char *)memmem(p->req, p->len, "b000000000", ID_LEN) - p->req);
	req_max = p->len > req_max ? p->len : req_max;
	kvp_jw_free(&w);
}

/* -- one connection -- */

static void ask(struct conn *c, uint64_t due_ns)
{
	char id[ID_LEN + 1];
	int n;
	uint32_t k = next_id++;
	snprintf(id, sizeof(id), ID_FORM, k % 1000000000u);
	if (phase == SELECT) {
		const struct prompt *p = &prompt[k % prompt_cnt];
		n = (int)p->len;
		memcpy(c->out, p->req, p->len);
		memcpy(c->out + p->id_at, id, ID_LEN);
	} else if (phase == HEALTH) {
		n = snprintf(c->out, req_max, "GET /health HTTP/1.1\r\nHost: 127.0.0.1:%u\r\n\r\n", cfg.port);
	} else {
		n = snprintf(c->out, req_max,
			"DELETE /reservations/%s HTTP/1.1\r\nHost: 127.0.0.1:%u\r\n\r\n", id, cfg.port);
	}
	c->due_ns = due_ns;
	c->waiting = 1;
	open_cnt++;
	c->in_len = 0;
	char *out = c->out;
	c->out = NULL;
	kvp_sock_send(&c->s, out, 0, (uint64_t)n);
}

/* The next request of a closed loop, as soon as the answer has come and the buffer is back. */
static void go_on(struct conn *c)
{
	if (pace == CLOSED_LOOP && c->out && !c->waiting && next_id < end_id)
		ask(c, bench_now_ns());
}

/* Length of the answer that has begun in c->in; 0 while its head is not complete. */
static size_t answer_len(struct conn *c)
{
	c->in[c->in_len] = 0;
	char *end = memmem(c->in, c->in_len, "\r\n\r\n", 4);
	char *len = end ? strcasestr(c->in, "\r\ncontent-length:") : NULL;
	if (end && (!len || len > end))
		die("answer without length", c->in);
	return end ? (size_t)(end - c->in) + 4 + strtoul(len + 17, NULL, 10) : 0;
}

static void on_recv(void *ctx, struct kvp_sock *s, const char *data, int64_t len)
{
	struct conn *c = ctx;
	(void)s;
	if (len <= 0)
		die("connection lost", len ? strerror((int)-len) : "closed");
	if (c->in_len + (size_t)len >= c->in_cap) {
		c->in_cap = (c->in_cap + (size_t)len) * 2;
		c->in = realloc(c->in, c->in_cap);
		if (!c->in)
			die("answer", "no memory");
	}
	memcpy(c->in + c->in_len, data, (size_t)len);
	c->in_len += (size_t)len;
	size_t whole = answer_len(c);
	if (!whole || c->in_len < whole)
		return;
	uint64_t now = bench_now_ns();
	if (memcmp(c->in + 8, " 200 ", 5) != 0 && wrong++ == 0)
		fprintf(stderr, "b_api: %s: %.400s\n", cfg.name, c->in);
	if (phase != FREE && lat_cnt < LAT_MAX)
		lat[lat_cnt++] = (uint32_t)(now - c->due_ns);
	c->waiting = 0;
	open_cnt--;
	go_on(c);
}

static void on_sent(void *ctx, struct kvp_sock *s, char *buf, int err)
{
	struct conn *c = ctx;
	(void)s;
	c->out = buf;
	if (err)
		die("send", strerror(-err));
	go_on(c);
}

static void on_connect(void *ctx, struct kvp_sock *s, int err)
{
	(void)ctx;
	if (err)
		die("connect", strerror(-err));
	kvp_sock_recv_start(s);
	open_cnt--;
}

static void connect_all(uint32_t cnt)
{
	static const struct kvp_sock_ops ops = {
		.on_recv = on_recv, .on_sent = on_sent, .on_connect = on_connect};
	struct kvp_addr a;
	if (kvp_addr_ip(&a, "127.0.0.1", cfg.port))
		die("address", "?");
	conn_cnt = open_cnt = cnt;
	for (uint32_t i = 0; i < cnt; i++) {
		conn[i] = (struct conn){.out = malloc(req_max), .in = malloc(65536), .in_cap = 65536};
		if (!conn[i].out || !conn[i].in || kvp_sock_connect(loop, &conn[i].s, &a, &ops, &conn[i]))
			die("connect", strerror(errno));
	}
	while (open_cnt)
		kvp_loop_run_once(loop, KVP_LOOP_FOREVER);
}

static void disconnect_all(void)
{
	for (uint32_t i = 0; i < conn_cnt; i++) {
		kvp_sock_close(&conn[i].s);
		free(conn[i].out);
		free(conn[i].in);
	}
	kvp_loop_run_once(loop, 0);
}

/* -- stretches -- */

/* Sends what is due at a fixed interval on connections that are free. */
static void run_open(uint64_t interval_ns)
{
	uint64_t due_ns = bench_now_ns();
	while (next_id < end_id || open_cnt) {
		uint64_t now = bench_now_ns();
		for (uint32_t i = 0; i < conn_cnt && next_id < end_id && due_ns <= now; i++)
			if (conn[i].out && !conn[i].waiting) {
				ask(&conn[i], due_ns);
				due_ns += interval_ns;
			}
		/* Not busy: a generator that never sleeps is the first that a shared processor takes away. */
		now = bench_now_ns();
		kvp_loop_run_once(loop, due_ns > now && next_id < end_id ? due_ns - now : LATE_NS);
	}
}

static void run_closed(void)
{
	for (uint32_t i = 0; i < conn_cnt; i++)
		go_on(&conn[i]);
	while (open_cnt || next_id < end_id)
		kvp_loop_run_once(loop, KVP_LOOP_FOREVER);
}

/* Sends cnt requests, measured: adds to what is measured. Prompts that were booked are freed. */
static void stretch(
	enum phase what, uint32_t cnt, uint64_t interval_ns, uint64_t *wall_ns, uint64_t *server_ns)
{
	static uint32_t used;
	next_id = used;
	end_id = used + cnt;
	phase = what;
	pace = interval_ns ? OPEN_LOOP : CLOSED_LOOP;
	uint64_t cpu = cpu_ns(), start = bench_now_ns();
	if (interval_ns)
		run_open(interval_ns);
	else
		run_closed();
	*wall_ns += bench_now_ns() - start;
	*server_ns += cpu_ns() - cpu;
	pace = CLOSED_LOOP;
	if (what == SELECT) {
		next_id = used;
		phase = FREE;
		run_closed();
	}
	used = end_id;
}

static struct result once(enum phase what, uint32_t hashes, uint64_t least_ns, uint64_t interval_ns)
{
	uint32_t cnt = hashes > 512 ? 500 : 4000, done = 0;
	uint64_t wall = 0, server = 0;
	lat_cnt = 0;
	while (wall < least_ns) {
		stretch(what, cnt, interval_ns, &wall, &server);
		done += cnt;
	}
	qsort(lat, lat_cnt, sizeof(*lat), cmp_u32);
	return (struct result){.ops_s = done * 1e9 / (double)wall,
		.cpu_ns_req = (double)server / done,
		.p50 = lat[lat_cnt / 2] / 1e3,
		.p99 = lat[lat_cnt * 99ull / 100] / 1e3,
		.max = lat[lat_cnt - 1] / 1e3,
		.ops = done};
}

static int by_ops(const void *a, const void *b)
{
	double x = ((const struct result *)a)->ops_s, y = ((const struct result *)b)->ops_s;
	return (x > y) - (x < y);
}

static double measure(const char *what, enum phase ask_for, uint32_t hashes, uint64_t interval_ns)
{
	struct result r[REPEATS];
	uint64_t least_ns = (uint64_t)(cfg.seconds * 1e9 / REPEATS);
	once(ask_for, hashes, least_ns / 4, interval_ns);
	for (int i = 0; i < REPEATS; i++)
		r[i] = once(ask_for, hashes, least_ns, interval_ns);
	qsort(r, REPEATS, sizeof(r[0]), by_ops);
	const struct result *m = &r[REPEATS / 2];
	printf("bench=api.%s server=%s hashes=%u conns=%u ops=%" PRIu64 " ops_s=%.0f cpu_us_req=%.2f "
	       "ops_cpu_s=%.0f p50_us=%.1f p99_us=%.1f max_us=%.1f wrong=%" PRIu64 "\n",
		what, cfg.name, hashes, conn_cnt, m->ops, m->ops_s, m->cpu_ns_req / 1e3,
		m->cpu_ns_req > 0 ? 1e9 / m->cpu_ns_req : 0, m->p50, m->p99, m->max, wrong);
	fflush(stdout);
	return m->ops_s;
}

/* -- the service's state -- */

static void start_engine(void)
{
	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE,
		MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (shared == MAP_FAILED)
		live_die("b_api: shared memory");
	fflush(stdout);
	if (fork() == 0)
		live_engine(shared);
	while (!kvp_ld_acq_u64(&shared->ports))
		live_pause(1000000);
	for (int i = 1; i <= WORKERS; i++) {
		char body[512];
		snprintf(body, sizeof(body),
			"{\"worker_id\":%d,\"endpoint\":\"http://127.0.0.1:%d\",\"block_size\":%d,"
			"\"max_num_batched_tokens\":65536,\"total_kv_blocks\":1000000,"
			"\"kv_events_endpoint\":\"tcp://127.0.0.1:%u\"}",
			i, i, LIVE_BLOCK_TOK, (unsigned)(shared->ports >> 16));
		int status = live_post(cfg.port, "/workers", body);
		if (status != 201) {
			fprintf(stderr, "b_api: worker %d: status %d\n", i, status);
			exit(1);
		}
	}
}

/* 1 once the service counts cached blocks of the first prompt of a message. */
static int sees(uint64_t msg, uint32_t blk)
{
	struct kvp_jw w;
	char *text = malloc(65536);
	size_t got = 0;
	struct sockaddr_in a = {
		.sin_family = AF_INET, .sin_port = htons(cfg.port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
	kvp_jw_init(&w);
	body_of(&w, msg, blk, NULL);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	FILE *f = connect(fd, (struct sockaddr *)&a, sizeof(a)) == 0 ? fdopen(fd, "r+") : NULL;
	if (!f || !text)
		live_die("b_api: overlap_scores");
	fprintf(f,
		"POST /overlap_scores HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: "
		"application/json\r\nContent-Length: %zu\r\n\r\n",
		w.len);
	fwrite(w.buf, 1, w.len, f);
	fflush(f);
	got = fread(text, 1, 65535, f);
	text[got] = 0;
	fclose(f);
	int cnt = 0;
	for (const char *p = text; (p = strstr(p, "\"device_blocks\":")); p += 16)
		cnt += strtoul(p + 16, NULL, 10) == blk;
	free(text);
	kvp_jw_free(&w);
	return cnt == WORKERS;
}

/* Sends small prompts until all workers' subscriptions are up, then every second prompt of the run. */
static uint32_t fill(uint32_t hashes, uint32_t prompts)
{
	static uint64_t msg; /* sent so far; messages of no prompt have numbers from PROMPT_FREE on */
	uint64_t end = bench_now_ns() + 20000000000ull;
	shared->shape = (struct live_shape){.event_cnt = 1, .event_blk = 4};
	do {
		kvp_st_rel_u64(&shared->want, ++msg);
		live_pause(20000000);
	} while (!sees(msg - 1, 4) && bench_now_ns() < end);
	uint32_t event_blk = hashes > 100 ? hashes / ((hashes + 99) / 100) : hashes;
	shared->shape = (struct live_shape){.event_cnt = hashes / event_blk, .event_blk = event_blk};
	prompt_cnt = prompts;
	for (uint32_t i = 0; i < prompts; i++) {
		free(prompt[i].req);
		make_prompt(&prompt[i], i % 2 ? msg + i / 2 : (1u << 24) + msg + i, hashes);
	}
	msg += prompts / 2;
	kvp_st_rel_u64(&shared->want, msg);
	while (!sees(msg - 1, hashes) && bench_now_ns() < end)
		live_pause(20000000);
	return sees(msg - 1, hashes) ? prompts / 2 : 0;
}

static void list_of(const char *text, struct list *out)
{
	out->cnt = 0;
	for (char *end; *text && out->cnt < LIST_MAX; text = *end == ',' ? end + 1 : end) {
		out->v[out->cnt++] = (uint32_t)strtoul(text, &end, 10);
		if (end == text)
			die("number expected", text);
	}
}

static void options(int argc, char **argv)
{
	struct list pid = {.cnt = 0};
	for (int i = 1; i < argc; i++) {
		const char *v = i + 1 < argc ? argv[i + 1] : "";
		if (!strcmp(argv[i], "--half")) {
			cfg.half = 1;
			continue;
		}
		if (!strcmp(argv[i], "--port"))
			cfg.port = (uint16_t)strtoul(v, NULL, 10);
		else if (!strcmp(argv[i], "--name"))
			cfg.name = v;
		else if (!strcmp(argv[i], "--pid"))
			list_of(v, &pid);
		else if (!strcmp(argv[i], "--hashes"))
			list_of(v, &cfg.hashes);
		else if (!strcmp(argv[i], "--conns"))
			list_of(v, &cfg.conns);
		else if (!strcmp(argv[i], "--seconds"))
			cfg.seconds = strtod(v, NULL);
		else
			die("unknown option", argv[i]);
		i++;
	}
	cfg.pid = pid;
	for (uint32_t i = 0; i < cfg.conns.cnt; i++)
		if (cfg.conns.v[i] < 1 || cfg.conns.v[i] > CONN_MAX)
			die("connections", "1..256");
	for (uint32_t i = 0; i < cfg.hashes.cnt; i++)
		if (cfg.hashes.v[i] < 1 || cfg.hashes.v[i] > LIVE_MSG_BLK_MAX)
			die("hashes", "1..4096");
	if (!cfg.port || cfg.seconds <= 0)
		die("usage", "b_api --port N [--pid P,P..] ...");
}

int main(int argc, char **argv)
{
	cpu_set_t allowed;
	options(argc, argv);
	sched_getaffinity(0, sizeof(allowed), &allowed);
	lat = malloc(LAT_MAX * sizeof(*lat));
	prctl(PR_SET_TIMERSLACK, 1000);
	start_engine();
	bench_pin(&allowed, (unsigned)CPU_COUNT(&allowed) - 1);
	if (!lat || kvp_loop_open(&loop, 0))
		die("loop", strerror(errno));
	bench_header();
	bench_args(argc, argv);
	for (uint32_t i = 0; i < cfg.hashes.cnt; i++) {
		uint32_t hashes = cfg.hashes.v[i], cached = fill(hashes, hashes > 512 ? 32 : PROMPT_MAX);
		double ops_s = 0;
		printf("# server=%s hashes=%u prompts=%u cached=%u\n", cfg.name, hashes, prompt_cnt, cached);
		for (uint32_t k = 0; k < cfg.conns.cnt; k++) {
			connect_all(cfg.conns.v[k]);
			ops_s = measure("select_and_reserve", SELECT, hashes, 0);
			if (cfg.half && k + 1 == cfg.conns.cnt) {
				measure("half", SELECT, hashes, (uint64_t)(2e9 / ops_s));
				measure("empty", HEALTH, hashes, 0);
				measure("empty_half", HEALTH, hashes, (uint64_t)(2e9 / ops_s));
			}
			disconnect_all();
		}
	}
	kvp_st_rel_u64(&shared->quit, 1);
	return wrong ? 1 : 0;
}
