/* ipc/resolve.h - addresses of a host name, looked up by a thread of their own so that no loop waits on DNS.
 *
 * Shape      one name, up to KVP_RESOLVE_MAX addresses. IP literals and "unix:/path" need no thread.
 * Truth      the system's resolver; asked at open, every refresh_ms, and every second while it fails. The
 *            last good list stays in force.
 * Writers    the thread writes whole lists into a pipe; the loop's thread reads them.
 * Lifetime   open to close. close does not wait for a look-up under way: the thread ends by itself, and gives
 *            back what the C library's resolver keeps for it before that.
 * Crash      process-local.
 * Proved by  tests/t_resolve.c, tests/t_tokenizer.c
 */
#ifndef KVP_IPC_RESOLVE_H
#define KVP_IPC_RESOLVE_H

#include <stdint.h>
#include "ipc/loop.h"

#define KVP_RESOLVE_MAX 16
#define KVP_RESOLVE_TEXT 128 /* bytes of an address as text: literal, or unix:/path */

struct kvp_resolve;

/* kvp_resolve_open: host a name, an IP literal (IPv6 without brackets) or unix:/path. KVP_ERR_INVAL (empty or
 * too long), KVP_ERR_SYS. */
int kvp_resolve_open(struct kvp_loop *l, const char *host, uint32_t refresh_ms, struct kvp_resolve **out);
void kvp_resolve_close(struct kvp_resolve *r); /* NULL is fine */
/* kvp_resolve_next: the addresses in turn, as kvp_http_call takes them; NULL while none is known. One that
 * was reported with kvp_resolve_bad is passed over until until_ns, unless all are. kvp_resolve_cnt: how many
 * are known. now_ns, until_ns: kvp_loop_now_ns clock. */
const char *kvp_resolve_next(struct kvp_resolve *r, uint64_t now_ns);
void kvp_resolve_bad(struct kvp_resolve *r, const char *address, uint64_t until_ns);
uint32_t kvp_resolve_cnt(const struct kvp_resolve *r);
/* kvp_resolve_tell: on_answer is called after every look-up, also after one that found nothing (what was
 * known before stays then). Not for literals. It may close r. */
void kvp_resolve_tell(struct kvp_resolve *r, void (*on_answer)(void *ctx, struct kvp_resolve *r), void *ctx);
#endif
