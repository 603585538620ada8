/* daemons/peer/recovery_put.c — events into payloads, payloads into command cells. */
#include "daemons/peer/recovery_put.h"

#include <kvpick/err.h>
#include <stdlib.h>
#include <string.h>

struct kvp_put_page {
	struct kvp_put_page *next;
	uint32_t used;
	union {
		uint8_t byte[KVP_CMD_PAYLOAD_MAX];
		struct kvp_recov_head head;
	};
};

_Static_assert((int)KVP_DREAD_STORE == KVP_RECOV_STORE && (int)KVP_DREAD_REMOVE == KVP_RECOV_REMOVE &&
		       (int)KVP_DREAD_CLEAR == KVP_RECOV_CLEAR,
	"a reader's events are the indexer's");
_Static_assert((int)KVP_DREAD_DEVICE == KVP_RADIX_DEVICE && (int)KVP_DREAD_HOST == KVP_RADIX_HOST &&
		       (int)KVP_DREAD_DISK == KVP_RADIX_DISK && (int)KVP_DREAD_EXTERNAL == KVP_RADIX_EXTERNAL,
	"a reader's tiers are the tree's");
_Static_assert(sizeof(struct kvp_recov_head) + KVP_RECOV_KEY_BYTES(KVP_RECOV_KEY_MAX) +
			       KVP_RECOV_REC_BYTES(KVP_RECOV_STORE, KVP_PUT_BLK_MAX) <=
		       KVP_CMD_PAYLOAD_MAX,
	"the longest record fits");

void kvp_put_init(struct kvp_put *p, struct kvp_cmdring *ring, kvp_owner owner)
{
	memset(p, 0, sizeof(*p));
	p->ring = ring;
	p->owner = owner;
}

void kvp_put_reset(struct kvp_put *p, uint64_t number)
{
	for (uint32_t i = 0; i < p->posted; i++)
		kvp_cmd_end(p->ring, p->cell[i]);
	for (struct kvp_put_page *g = p->first, *next; g; g = next) {
		next = g->next;
		free(g);
	}
	kvp_put_init(p, p->ring, p->owner);
	p->number = number;
}

/* Ends the page at hand, so that the next record begins one with its own key. */
void kvp_put_part(struct kvp_put *p, uint32_t role, const char *key, uint32_t key_len, uint32_t block_size)
{
	KVP_ASSERT(key_len <= KVP_RECOV_KEY_MAX);
	memcpy(p->key, key, key_len);
	p->key_len = key_len;
	p->role = role;
	p->block_size = block_size;
	p->is_new_part = 1;
}

static struct kvp_put_page *page_for(struct kvp_put *p, uint64_t bytes)
{
	struct kvp_put_page *g = p->is_new_part ? NULL : p->newest;
	if (g && g->used + bytes <= KVP_CMD_PAYLOAD_MAX)
		return g;
	g = malloc(sizeof(*g));
	if (!g)
		return NULL;
	g->next = NULL;
	g->head = (struct kvp_recov_head){p->role, p->block_size, p->key_len, 0};
	g->used = (uint32_t)sizeof(g->head) + KVP_RECOV_KEY_BYTES(p->key_len);
	memset(g->byte + sizeof(g->head), 0, g->used - sizeof(g->head));
	memcpy(g->byte + sizeof(g->head), p->key, p->key_len);
	if (p->newest)
		p->newest->next = g;
	else
		p->first = g;
	p->newest = g;
	p->is_new_part = 0;
	p->waiting_bytes += g->used;
	return g;
}

int kvp_put_event(struct kvp_put *p, const struct kvp_dread_event *e)
{
	uint32_t first = 0;
	do {
		uint32_t n = e->n - first < KVP_PUT_BLK_MAX ? e->n - first : KVP_PUT_BLK_MAX;
		uint64_t bytes = KVP_RECOV_REC_BYTES(e->op, n);
		struct kvp_put_page *g = page_for(p, bytes);
		if (!g)
			return KVP_ERR_SYS;
		int is_child = e->op == KVP_DREAD_STORE && (first || e->has_parent);
		struct kvp_recov_rec rec = {.worker_id = e->worker_id,
			.parent = !is_child ? 0
				  : first   ? e->ext[first - 1]
					    : e->parent,
			.dp_rank = e->dp_rank,
			.n = n,
			.op = e->op,
			.tier = e->tier,
			.has_parent = (uint16_t)is_child};
		uint8_t *to = g->byte + g->used;
		memcpy(to, &rec, sizeof(rec));
		to += sizeof(rec);
		if (e->op == KVP_DREAD_STORE) {
			memcpy(to, e->local + first, 8ull * n);
			to += 8ull * n;
		}
		if (n)
			memcpy(to, e->ext + first, 8ull * n);
		g->used += (uint32_t)bytes;
		g->head.rec_cnt++;
		p->waiting_bytes += bytes;
		first += n;
	} while (first < e->n);
	return KVP_OK;
}

/* The answer of the oldest order, if it is there. */
static int take_answer(struct kvp_put *p)
{
	struct kvp_cmd_cell *c = p->cell[0];
	struct kvp_recov_done d = {0};
	int rc = c->status;
	if (c->reply_len == sizeof(d))
		memcpy(&d, kvp_cmd_buffer(p->ring, c), sizeof(d));
	p->done.stored += d.stored;
	p->done.held += d.held;
	p->done.dropped += d.dropped;
	p->done.parent += d.parent;
	p->done.skipped += d.skipped;
	kvp_cmd_end(p->ring, c);
	p->posted--;
	memmove(&p->cell[0], &p->cell[1], p->posted * sizeof(p->cell[0]));
	return rc;
}

static int post_one(struct kvp_put *p)
{
	struct kvp_put_page *g = p->first;
	struct kvp_cmd_cell *c;
	void *payload;
	if (kvp_cmd_begin(p->ring, p->owner, &c, &payload))
		return 0; /* no cell is free: at the next look */
	memcpy(payload, g->byte, g->used);
	c->arg[0] = p->number;
	kvp_cmd_post(p->ring, c, KVP_CMD_RECOV_PUT, g->used);
	p->cell[p->posted++] = c;
	p->waiting_bytes -= g->used;
	p->first = g->next;
	if (!p->first)
		p->newest = NULL;
	free(g);
	return 1;
}

int kvp_put_poll(struct kvp_put *p, int *any)
{
	int rc = KVP_OK;
	while (!rc && p->posted && kvp_cmd_done(p->ring, p->cell[0])) {
		rc = take_answer(p);
		*any = 1;
	}
	while (!rc && p->first && p->posted < KVP_PUT_CMDS && post_one(p))
		*any = 1;
	return rc;
}

int kvp_put_is_idle(const struct kvp_put *p)
{
	return !p->first && !p->posted;
}
