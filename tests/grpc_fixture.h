/* tests/grpc_fixture.h - a gRPC server with a small language, a client beside it, one loop for both.
 *
 * Method 0 obeys the first byte of each message: 'e' send it back; 'h' nothing; 's' finish with the status
 * whose number is the next byte and the rest as text; 'q' send it back three times and finish OK behind; 'a'
 * abort; 'b' send as many bytes as the text says (decimal) in messages of 1000; 'l' send it back three times
 * within a batch, lent, from its second byte to the last but one. A half close ends the stream with OK unless
 * an 'h' came. Method 1 is only served where a test says so and echoes. */
#ifndef KVP_TEST_GRPC_FIXTURE_H
#define KVP_TEST_GRPC_FIXTURE_H
#include "bench/load/grpc_client.h"
#include "ipc/grpc_server.h"
#include "tests/tap.h"

#include <kvpick/err.h>

#include <poll.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define FIX_WAIT_MS 20000
#define FIX_TSAN                                                                                             \
	"the gRPC core is not built for ThreadSanitizer, which then reports the core's own hand-overs"
static const char *const fix_method[] = {"/kvp.test.Service/Obey", "/kvp.test.Service/Other"};

struct fix {
	struct kvp_grpc *g;
	struct kvp_gc *c;
	uint32_t opened, messages, half_closed, closed, finished, cancelled, drained, after_close;
	uint64_t bytes;
	uint32_t lent, lent_done; /* messages with 'l'; of these, no longer in use */
	size_t unsent_max;
	struct kvp_grpc_stream *last; /* the newest stream that is open */
};
/* What the client's side of one call saw. */
struct fix_call {
	struct kvp_gc_call *call;
	uint32_t messages, wrong, sent;
	uint64_t bytes;
	int status; /* -1 while open */
	char text[256];
	const uint8_t *want; /* not NULL: every message must be a prefix of it */
};

__attribute__((unused)) static uint64_t fix_now_ms(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

static void fix_bulk(struct kvp_grpc_stream *st, unsigned long bytes)
{
	static const char chunk[1000];
	for (unsigned long n = 0; n < bytes; n += sizeof(chunk))
		kvp_grpc_send(st, chunk, sizeof(chunk));
}

/* What is lent ends on any thread. */
struct fix_loan {
	struct fix *f;
	uint32_t left;
	uint8_t bytes[];
};
static void fix_repaid(void *owner)
{
	struct fix_loan *loan = owner;
	if (__atomic_sub_fetch(&loan->left, 1, __ATOMIC_ACQ_REL) == 0) {
		__atomic_add_fetch(&loan->f->lent_done, 1, __ATOMIC_RELAXED);
		free(loan);
	}
}
static void fix_lend(struct fix *f, const struct kvp_grpc_event *ev)
{
	struct fix_loan *loan = malloc(sizeof(*loan) + ev->len);
	loan->f = f;
	loan->left = 3;
	memcpy(loan->bytes, ev->data, ev->len);
	uint8_t ends[2] = {loan->bytes[0], loan->bytes[ev->len - 1]};
	struct kvp_grpc_lent l = {loan->bytes + 1, ev->len - 2, fix_repaid, loan};
	f->lent++;
	kvp_grpc_batch_begin(f->g);
	for (int i = 0; i < 3; i++)
		kvp_grpc_lend(ev->stream, (struct iovec){&ends[0], 1}, &l, (struct iovec){&ends[1], 1});
	kvp_grpc_batch_end(f->g);
}

static void fix_obey(struct fix *f, const struct kvp_grpc_event *ev)
{
	struct kvp_grpc_stream *st = ev->stream;
	char text[512];
	snprintf(text, sizeof(text), "%.*s", ev->len > 2 ? (int)ev->len - 2 : 0,
		ev->len > 2 ? (const char *)ev->data + 2 : "");
	switch (ev->len ? ev->data[0] : 'e') {
	case 'h':
		kvp_grpc_set_ctx(st, f);
		break;
	case 's':
		kvp_grpc_finish(st, (enum kvp_grpc_status)ev->data[1], text);
		break;
	case 'q':
		for (int i = 0; i < 3; i++)
			kvp_grpc_send(st, ev->data, ev->len);
		kvp_grpc_finish(st, KVP_GRPC_OK, "");
		f->after_close += kvp_grpc_send(st, "x", 1) == KVP_ERR_CLOSED;
		break;
	case 'a':
		kvp_grpc_abort(st);
		break;
	case 'b':
		fix_bulk(st, strtoul(text, NULL, 10));
		break;
	case 'l':
		fix_lend(f, ev);
		break;
	default: {
		void *copy = malloc(ev->len + 1);
		memcpy(copy, ev->data, ev->len);
		kvp_grpc_give(st, copy, ev->len);
	}
	}
}

static void fix_event(struct fix *f, const struct kvp_grpc_event *ev)
{
	switch (ev->kind) {
	case KVP_GRPC_OPEN:
		f->opened++;
		f->last = ev->stream;
		break;
	case KVP_GRPC_MESSAGE:
		f->messages++;
		f->bytes += ev->len;
		fix_obey(f, ev);
		if (kvp_grpc_unsent(ev->stream) > f->unsent_max)
			f->unsent_max = kvp_grpc_unsent(ev->stream);
		break;
	case KVP_GRPC_HALF_CLOSE:
		f->half_closed++;
		if (!kvp_grpc_ctx(ev->stream))
			kvp_grpc_finish(ev->stream, KVP_GRPC_OK, "");
		break;
	case KVP_GRPC_CLOSED:
		f->closed++;
		*(ev->end == KVP_GRPC_END_FINISHED ? &f->finished : &f->cancelled) += 1;
		f->after_close += kvp_grpc_send(ev->stream, "x", 1) == KVP_ERR_CLOSED;
		if (f->last == ev->stream)
			f->last = NULL;
		break;
	case KVP_GRPC_DRAINED:
		f->drained++;
	}
}

static void fix_client_event(const struct kvp_gc_event *ev)
{
	struct fix_call *k = ev->ctx;
	if (ev->kind == KVP_GC_STATUS) {
		k->status = ev->status;
		k->call = NULL;
		snprintf(k->text, sizeof(k->text), "%s", ev->text);
		return;
	}
	k->messages++;
	k->bytes += ev->len;
	if (k->want)
		k->wrong += memcmp(ev->data, k->want, ev->len) != 0;
}

__attribute__((unused)) static void fix_log(void *ctx, const char *text)
{
	(void)ctx;
	fprintf(stderr, "# core: %s\n", text);
}

/* fix_pump does what is there on both sides, and waits a millisecond at most when there is nothing. */
__attribute__((unused)) static void fix_pump(struct fix *f)
{
	struct kvp_grpc_event ev;
	struct kvp_gc_event cev;
	int busy = 0;
	for (int i = 0; f->g && i < 256 && kvp_grpc_next(f->g, &ev); i++, busy = 1)
		fix_event(f, &ev);
	for (int i = 0; f->c && i < 256 && kvp_gc_next(f->c, busy ? 0 : 1, &cev); i++, busy = 1)
		fix_client_event(&cev);
	struct pollfd p = {.fd = f->g ? kvp_grpc_fd(f->g) : -1, .events = POLLIN};
	if (!busy && !f->c)
		poll(&p, 1, 1);
}
#define FIX_UNTIL(f, cond)                                                                                   \
	for (uint64_t end_ = fix_now_ms() + FIX_WAIT_MS; !(cond) && fix_now_ms() < end_;)                    \
	fix_pump(f)

__attribute__((unused)) static void fix_begin(struct fix *f, struct fix_call *k, const char *method)
{
	*k = (struct fix_call){.status = -1};
	k->call = kvp_gc_call(f->c, method, FIX_WAIT_MS, k);
}
__attribute__((unused)) static void fix_say(struct fix_call *k, const char *text)
{
	kvp_gc_send(k->call, text, strlen(text));
}
__attribute__((unused)) static struct kvp_grpc_stat fix_stat(const struct fix *f)
{
	struct kvp_grpc_stat s;
	kvp_grpc_stat(f->g, &s);
	return s;
}
#endif
