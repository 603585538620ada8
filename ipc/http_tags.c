/* Tagged replies: which of them a client that went away has certainly not got. */
#include <linux/tcp.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include "ipc/http_server_priv.h"

#define STATE_CLOSE 7 /* of a connection that was reset, or closed and acknowledged in both directions */
#define TRIM_CNT 32   /* so many tags are kept before the kernel is asked what was acknowledged */

void kvp_http_reply_tag(struct kvp_http_req *r, uint64_t tag)
{
	conn_of(r)->tag = tag;
}

void kvp_http_tags_push(struct http_conn *c)
{
	struct http_tags *t = &c->tags;
	uint64_t tag = c->tag;
	c->tag = 0;
	if (!tag || !c->srv->cfg.on_undelivered)
		return;
	if (t->cnt == t->cap) {
		uint32_t cap = t->cap ? t->cap * 2 : 4;
		struct http_tag *grown = realloc(t->at, cap * sizeof(*grown));
		if (!grown)
			return;
		t->at = grown;
		t->cap = cap;
	}
	t->at[t->cnt++] = (struct http_tag){c->put_bytes, tag};
}

/* Bytes that the client has for certain, or may still get: those that its kernel has acknowledged; as long as
 * the connection is not reset, all that our kernel has taken. */
enum gone { ASK_ACKED, ASK_REACHABLE };
static uint64_t delivered(const struct http_conn *c, enum gone what)
{
	struct tcp_info info;
	socklen_t len = sizeof(info);
	uint64_t taken = c->sock.tx_bytes;
	memset(&info, 0, sizeof(info));
	if (getsockopt(c->sock.fd, IPPROTO_TCP, TCP_INFO, &info, &len) != 0)
		return taken;
	if (what == ASK_REACHABLE && info.tcpi_state != STATE_CLOSE)
		return taken > info.tcpi_bytes_acked ? taken : info.tcpi_bytes_acked;
	return info.tcpi_bytes_acked;
}

static void drop_until(struct http_tags *t, uint64_t end)
{
	uint32_t n = 0;
	while (n < t->cnt && t->at[n].end <= end)
		n++;
	t->cnt -= n;
	if (n && t->cnt)
		memmove(t->at, t->at + n, t->cnt * sizeof(*t->at));
}

/* One question for many replies: its cost does not show. A full table that stays full is asked about again
 * only after it has grown by as much. */
void kvp_http_tags_trim(struct http_conn *c)
{
	if (c->tags.cnt >= TRIM_CNT && c->tags.cnt == c->tags.cap)
		drop_until(&c->tags, delivered(c, ASK_ACKED));
}

int kvp_http_tags_waiting(struct http_conn *c)
{
	if (c->tags.cnt)
		drop_until(&c->tags, delivered(c, ASK_ACKED));
	return c->tags.cnt > 0;
}

void kvp_http_tags_end(struct http_conn *c)
{
	struct http_tags *t = &c->tags;
	if (t->cnt)
		drop_until(t, delivered(c, ASK_REACHABLE));
	for (uint32_t i = 0; i < t->cnt; i++)
		c->srv->cfg.on_undelivered(c->srv->cfg.ctx, t->at[i].tag);
	free(t->at);
	*t = (struct http_tags){0};
}
