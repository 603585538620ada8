/* Look-ups by threads: what such a thread leaves behind when it ends. The name server is a port of the
 * loopback at which nobody listens. */
#include <arpa/inet.h>
#include <netdb.h>
#include <pthread.h>
#include <resolv.h>
#include <stdatomic.h>

static int nobody_answers(
	const char *host, const char *service, const struct addrinfo *hint, struct addrinfo **out);
#define getaddrinfo nobody_answers
#include "ipc/resolve.c"
#undef getaddrinfo
#include "tests/tap.h"

#define NAMES 16
#define WAIT_NS UINT64_C(20000000000)

static pthread_key_t at_end;
static atomic_uint asked, kept, ended, ended_kept;
static unsigned told;

static unsigned servers_kept(void)
{
	unsigned n = 0;
	for (unsigned i = 0; i < MAXNS; i++)
		n += _res._u._ext.nsaddrs[i] != NULL;
	return n;
}

static int nobody_answers(
	const char *host, const char *service, const struct addrinfo *hint, struct addrinfo **out)
{
	unsigned char answer[512];
	(void)service;
	(void)hint;
	(void)out;
	if (res_init())
		return EAI_SYSTEM;
	_res.nscount = 1;
	_res.retry = 1;
	_res.nsaddr_list[0] = (struct sockaddr_in){
		.sin_family = AF_INET, .sin_port = htons(9), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	int rc = res_query(host, C_IN, T_A, answer, sizeof(answer));
	kept += servers_kept() != 0;
	asked++;
	pthread_setspecific(at_end, "set");
	return rc < 0 ? EAI_AGAIN : EAI_NONAME;
}

/* Runs when the thread's function has returned, before the C library clears up behind it. */
static void on_thread_end(void *set)
{
	(void)set;
	ended_kept += servers_kept() != 0;
	ended++;
}

static void on_answer(void *ctx, struct kvp_resolve *r)
{
	(void)ctx;
	(void)r;
	told++;
}

int main(void)
{
	struct kvp_loop *l = NULL;
	struct kvp_resolve *r[NAMES];
	unsigned opened = 0;
	pthread_key_create(&at_end, on_thread_end);
	ok(kvp_loop_open(&l, 0) == KVP_OK, "a loop");
	for (unsigned i = 0; i < NAMES; i++) {
		char name[32];
		snprintf(name, sizeof(name), "n%u.invalid", i);
		opened += kvp_resolve_open(l, name, 60000, &r[i]) == KVP_OK;
		kvp_resolve_tell(r[i], on_answer, NULL);
	}
	is_u64(opened, NAMES, "names are looked up");
	uint64_t end = kvp_loop_now_ns(l) + WAIT_NS;
	while (told < NAMES && kvp_loop_now_ns(l) < end)
		kvp_loop_run_once(l, 100000000);
	ok(told >= NAMES, "each look-up says that it was in vain");
	is_u64(kept, asked, "the C library keeps the servers' addresses for each thread that asked");
	for (unsigned i = 0; i < NAMES; i++) {
		is_u64(kvp_resolve_cnt(r[i]), 0, "no address of name %u", i);
		kvp_resolve_close(r[i]);
	}
	while (ended < NAMES && kvp_loop_now_ns(l) < end)
		kvp_loop_run_once(l, 1000000);
	is_u64(ended, NAMES, "closed, the threads end");
	is_u64(ended_kept, 0, "and none leaves anything to be cleared up behind it");
	kvp_loop_close(l);
	return done();
}
