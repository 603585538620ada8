/* tests/tokenizer_sim.h - a tokenizer service over real sockets, with every way to fail that a test asks for.
 *
 * Speaks     POST <base>/v1/chat/completions/render and /v1/completions/render (vLLM or SGLang form),
 *            /tokenize and /v1/tokenize. An id is made of each four bytes of the body, or id_cnt of them are
 *            counted up.
 * Faults     struct simtok.fault; those of the body keep the connection, the others say what they do to it.
 */
#ifndef KVP_TEST_TOKENIZER_SIM_H
#define KVP_TEST_TOKENIZER_SIM_H
#include <kvpick/err.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "ipc/http_parse.h"
#include "ipc/loop.h"

enum simtok_fault {
	SIMTOK_FINE,
	SIMTOK_HANG,	    /* no answer */
	SIMTOK_RESET,	    /* a reset instead of an answer */
	SIMTOK_CLOSE,	    /* an end instead of an answer */
	SIMTOK_HALF_RESET,  /* half of the answer, then a reset */
	SIMTOK_HALF_CLOSE,  /* half of the answer, then the end */
	SIMTOK_HALF_HANG,   /* half of the answer, then nothing */
	SIMTOK_CLOSE_AFTER, /* the answer, then the end, unannounced */
	SIMTOK_SAYS_CLOSE,  /* announced */
	SIMTOK_CHUNKED,	    /* in chunks of 1000 bytes */
	SIMTOK_DRIBBLE,	    /* a few bytes a turn */
	SIMTOK_NO_LENGTH,   /* ends with the connection */
	SIMTOK_CONTINUE,    /* 100 first */
	SIMTOK_NOT_HTTP,
	SIMTOK_HUGE_HEAD, /* a header block over 64 KiB */
	SIMTOK_CUT_JSON,  /* a complete answer with half a document */
	SIMTOK_BODY,	  /* says body */
	SIMTOK_FAULT_CNT
};

struct simtok_conn {
	struct simtok *sim;
	struct simtok_conn *next, **prev;
	struct kvp_sock s;
	struct kvp_timer timer;
	struct kvp_http_in in;
	char *out; /* the answer, while it waits or dribbles */
	uint64_t out_len, out_at;
	uint8_t dead, after; /* after: 1 end, 2 reset, once all is sent */
};

struct simtok {
	struct kvp_loop *loop;
	struct kvp_listener ls;
	struct simtok_conn *conn;
	enum simtok_fault fault;
	uint32_t fault_left; /* 0: for ever; else the fault ends after so many requests */
	int status;	     /* of answers; 0 = 200 */
	const char *body;    /* SIMTOK_BODY, and of answers with another status than 200 */
	const char *style;   /* member of the ids: token_ids, input_ids, tokens */
	uint32_t id_cnt;     /* 0: from the body */
	uint64_t delay_ns;
	int old_tokenize;    /* /tokenize knows no messages */
	const char *no_path; /* 404 for this path */
	char *ready;	     /* an answer that is always the same, made once (id_cnt, for benches) */
	uint64_t ready_len;
	/* seen */
	uint64_t requests, accepted, gone;
	char path[256], head[4096];
	char *last;
	uint64_t last_len;
};

static void simtok_drop(struct simtok_conn *c, int reset)
{
	if (c->dead)
		return;
	c->dead = 1;
	*c->prev = c->next;
	if (c->next)
		c->next->prev = c->prev;
	c->sim->gone++;
	kvp_timer_cancel(c->sim->loop, &c->timer);
	if (reset)
		kvp_sock_reset(&c->s);
	else
		kvp_sock_close(&c->s);
	kvp_http_in_free(&c->in);
	free(c->out);
	free(c);
}

static void simtok_push(struct simtok_conn *c);

static void simtok_timer(void *ctx, struct kvp_timer *t)
{
	(void)t;
	simtok_push(ctx);
}

/* Sends what is due of the answer. */
static void simtok_push(struct simtok_conn *c)
{
	uint64_t n = c->out_len - c->out_at;
	if (c->sim->fault == SIMTOK_DRIBBLE && n > 37)
		n = 37;
	char *piece = malloc(n ? n : 1);
	memcpy(piece, c->out + c->out_at, n);
	c->out_at += n;
	if (!n || kvp_sock_send(&c->s, piece, 0, n)) {
		free(piece);
		simtok_drop(c, 1);
	}
}

static void simtok_sent(void *ctx, struct kvp_sock *s, char *buf, int err)
{
	struct simtok_conn *c = ctx;
	(void)s;
	free(buf);
	if (err) {
		simtok_drop(c, 0);
	} else if (c->out_at < c->out_len) {
		kvp_timer_set(c->sim->loop, &c->timer, 0, simtok_timer, c);
	} else {
		free(c->out);
		c->out = NULL;
		if (c->after)
			simtok_drop(c, c->after == 2);
	}
}

/* Appends a short text; the caller has room for it. */
__attribute__((format(printf, 3, 4))) static void simtok_put(char *out, uint64_t *at, const char *fmt, ...)
{
	va_list ap;
	va_start(ap, fmt);
	int n = vsnprintf(out + *at, 512, fmt, ap);
	va_end(ap);
	if (n > 0)
		*at += (uint64_t)n;
}

static char *simtok_ids(struct simtok *sim, const char *body, uint64_t len, uint64_t *out_len, int array)
{
	uint64_t n = sim->id_cnt ? sim->id_cnt : (len + 3) / 4, at = 0;
	char *out = malloc(n * 11 + 2048);
	simtok_put(out, &at, "%s{\"request_id\":\"r-1\",\"%s\":[", array ? "[" : "", sim->style);
	for (uint64_t i = 0; i < n; i++) {
		uint32_t id = 0;
		for (uint64_t k = 4 * i; k < 4 * i + 4; k++)
			id = id << 8 | (k < len ? (uint8_t)body[k] : 0);
		simtok_put(out, &at, "%s%u", i ? "," : "",
			sim->id_cnt ? (uint32_t)(i * 2654435761u % 151643) : id);
	}
	simtok_put(out, &at,
		"],\"features\":null,\"sampling_params\":{\"max_tokens\":64},\"model\":\"m\",\"stream\":"
		"false}%s",
		array ? "]" : "");
	*out_len = at;
	return out;
}

/* The bytes of an answer; *body_len of them are the body, at the end. */
static void simtok_build(struct simtok_conn *c, int status, const char *body, uint64_t len)
{
	struct simtok *sim = c->sim;
	enum simtok_fault f = sim->fault;
	uint64_t said = len;
	char *out = malloc(2 * len + 80000);
	uint64_t at = 0;
	if (f == SIMTOK_CUT_JSON)
		said = len = len / 2;
	if (f == SIMTOK_CONTINUE)
		simtok_put(out, &at, "HTTP/1.1 100 Continue\r\n\r\n");
	if (f == SIMTOK_NOT_HTTP)
		simtok_put(out, &at, "220 smtp.example ESMTP\r\n");
	simtok_put(out, &at, "HTTP/1.1 %d Sim\r\nContent-Type: application/json\r\n", status);
	if (f == SIMTOK_HUGE_HEAD) {
		simtok_put(out, &at, "X-Long: ");
		memset(out + at, 'x', 66000);
		at += 66000;
		simtok_put(out, &at, "\r\n");
	}
	if (f == SIMTOK_SAYS_CLOSE || f == SIMTOK_NO_LENGTH)
		simtok_put(out, &at, "Connection: close\r\n");
	if (f == SIMTOK_CHUNKED) {
		simtok_put(out, &at, "Transfer-Encoding: chunked\r\n\r\n");
		for (uint64_t off = 0; off < len; off += 1000) {
			uint64_t n = len - off < 1000 ? len - off : 1000;
			simtok_put(out, &at, "%llx\r\n", (unsigned long long)n);
			memcpy(out + at, body + off, n);
			at += n;
			simtok_put(out, &at, "\r\n");
		}
		simtok_put(out, &at, "0\r\n\r\n");
	} else {
		if (f != SIMTOK_NO_LENGTH)
			simtok_put(out, &at, "Content-Length: %llu\r\n", (unsigned long long)said);
		simtok_put(out, &at, "\r\n");
		if (f == SIMTOK_HALF_RESET || f == SIMTOK_HALF_CLOSE || f == SIMTOK_HALF_HANG)
			len /= 2;
		memcpy(out + at, body, len);
		at += len;
	}
	c->after = f == SIMTOK_HALF_RESET ? 2
		   : f == SIMTOK_HALF_CLOSE || f == SIMTOK_CLOSE_AFTER || f == SIMTOK_SAYS_CLOSE ||
				   f == SIMTOK_NO_LENGTH
			   ? 1
			   : 0;
	free(c->out);
	c->out = out;
	c->out_len = at;
	c->out_at = 0;
}

static int simtok_ends(const char *path, const char *suffix)
{
	size_t n = strlen(path), k = strlen(suffix);
	return n >= k && !strcmp(path + n - k, suffix);
}

static void simtok_answer(struct simtok_conn *c, const char *body, uint64_t len)
{
	struct simtok *sim = c->sim;
	int known = simtok_ends(sim->path, "/render") || simtok_ends(sim->path, "/tokenize");
	int chat = memmem(body, len, "\"messages\"", 10) != NULL;
	if (!known || (sim->no_path && simtok_ends(sim->path, sim->no_path))) {
		simtok_build(c, 404, "{\"detail\":\"Not Found\"}", 22);
	} else if (sim->old_tokenize && chat && simtok_ends(sim->path, "/tokenize")) {
		simtok_build(c, 422, "{\"detail\":\"prompt missing\"}", 27);
	} else if (sim->fault == SIMTOK_BODY || (sim->status && sim->status != 200)) {
		const char *said = sim->body ? sim->body : "{\"error\":{\"message\":\"no\"}}";
		simtok_build(c, sim->status ? sim->status : 200, said, strlen(said));
	} else if (sim->ready) {
		simtok_build(c, 200, sim->ready, sim->ready_len);
	} else {
		uint64_t n;
		char *out = simtok_ids(sim, body, len, &n, simtok_ends(sim->path, "/v1/completions/render"));
		simtok_build(c, 200, out, n);
		free(out);
	}
}

static void simtok_request(struct simtok_conn *c)
{
	struct simtok *sim = c->sim;
	const struct kvp_http_req *r = &c->in.req;
	sim->requests++;
	snprintf(sim->path, sizeof(sim->path), "%.*s", (int)r->path_len, r->path);
	snprintf(sim->head, sizeof(sim->head), "%.*s", (int)c->in.head.raw.len, c->in.head.raw.p);
	free(sim->last);
	sim->last = malloc(r->body_len + 1);
	memcpy(sim->last, r->body, r->body_len);
	sim->last_len = r->body_len;
	enum simtok_fault f = sim->fault;
	if (f == SIMTOK_HANG) {
		kvp_http_in_reset(&c->in);
		return;
	}
	if (f == SIMTOK_RESET || f == SIMTOK_CLOSE) {
		if (sim->fault_left && !--sim->fault_left)
			sim->fault = SIMTOK_FINE;
		simtok_drop(c, f == SIMTOK_RESET);
		return;
	}
	simtok_answer(c, sim->last, sim->last_len);
	kvp_http_in_reset(&c->in);
	if (sim->delay_ns)
		kvp_timer_set(
			sim->loop, &c->timer, kvp_loop_now_ns(sim->loop) + sim->delay_ns, simtok_timer, c);
	else
		simtok_push(c);
	if (sim->fault_left && !--sim->fault_left)
		sim->fault = SIMTOK_FINE;
}

static void simtok_recv(void *ctx, struct kvp_sock *s, const char *data, int64_t len)
{
	struct simtok_conn *c = ctx;
	(void)s;
	if (len <= 0) {
		simtok_drop(c, 0);
		return;
	}
	uint64_t used;
	int rc = kvp_http_in_feed(&c->in, data, (uint64_t)len, &used);
	if (rc == KVP_OK)
		simtok_request(c);
	else if (rc != KVP_ERR_AGAIN)
		simtok_drop(c, 1);
}

static void simtok_accept(void *ctx, int fd)
{
	static const struct kvp_sock_ops ops = {.on_recv = simtok_recv, .on_sent = simtok_sent};
	struct simtok *sim = ctx;
	struct simtok_conn *c = calloc(1, sizeof(*c));
	c->sim = sim;
	c->in.body_max = 64u << 20;
	c->in.head.line_max = 16384;
	c->in.head.header_max = 65536;
	sim->accepted++;
	if (kvp_sock_open(sim->loop, &c->s, fd, &ops, c)) {
		free(c);
		return;
	}
	c->next = sim->conn;
	c->prev = &sim->conn;
	if (c->next)
		c->next->prev = &c->next;
	sim->conn = c;
	kvp_sock_recv_start(&c->s);
}

/* at: "unix:/path", or an address with any port. */
__attribute__((unused)) static int simtok_open(struct simtok *sim, struct kvp_loop *l, const char *at)
{
	struct kvp_addr a;
	memset(sim, 0, sizeof(*sim));
	sim->loop = l;
	sim->style = "token_ids";
	kvp_http_parse_init();
	if (strncmp(at, "unix:", 5) == 0 ? kvp_addr_unix(&a, at + 5) : kvp_addr_ip(&a, at, 0))
		return -1;
	return kvp_loop_listen_addr(l, &sim->ls, &a, KVP_LISTEN_PLAIN, simtok_accept, sim);
}

__attribute__((unused)) static void simtok_drop_all(struct simtok *sim)
{
	while (sim->conn)
		simtok_drop(sim->conn, 0);
}

__attribute__((unused)) static void simtok_close(struct simtok *sim)
{
	simtok_drop_all(sim);
	kvp_listener_close(&sim->ls, KVP_LISTENER_DROP);
	free(sim->last);
	free(sim->ready);
	sim->last = sim->ready = NULL;
}
#endif
