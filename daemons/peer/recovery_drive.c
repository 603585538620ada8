/* daemons/peer/recovery_drive.c — cycles, order and back-off. */
#include "daemons/peer/recovery_drive.h"

#include <kvpick/err.h>
#include <string.h>

void kvp_drive_init(struct kvp_drive *d, enum kvp_drive_kind kind, uint64_t seed)
{
	memset(d, 0, sizeof(*d));
	d->kind = kind;
	d->rng = seed;
	d->wait_ns = KVP_DRIVE_WAIT_MIN_NS;
}

static uint64_t draw(struct kvp_drive *d, uint64_t below)
{
	d->rng += 0x9e3779b97f4a7c15ull;
	uint64_t z = d->rng;
	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return (z ^ (z >> 31)) % below;
}

static struct kvp_drive_peer *find(struct kvp_drive *d, const char *url)
{
	for (uint32_t i = 0; i < d->cnt; i++)
		if (strcmp(d->peer[i].url, url) == 0)
			return &d->peer[i];
	return NULL;
}

/* Peers that left go, but for the one being tried and those tried in this cycle: they must not be tried again
 * in it if they come back. */
static void forget_gone(struct kvp_drive *d)
{
	uint32_t n = 0;
	int is_trying = d->state == KVP_DRIVE_TRYING;
	uint32_t at = d->at;
	for (uint32_t i = 0; i < d->cnt; i++) {
		const struct kvp_drive_peer *p = &d->peer[i];
		if (!p->is_eligible && !p->is_tried && !(is_trying && i == at))
			continue;
		if (is_trying && i == at)
			d->at = n;
		if (n != i)
			d->peer[n] = *p;
		n++;
	}
	d->cnt = n;
}

void kvp_drive_peers(struct kvp_drive *d, const char *const *url, uint32_t cnt)
{
	int has_changed = !d->is_known;
	for (uint32_t i = 0; i < d->cnt; i++)
		d->peer[i].is_eligible <<= 1; /* 2 = was in the set */
	for (uint32_t i = 0; i < cnt; i++) {
		struct kvp_drive_peer *p = find(d, url[i]);
		if (!p && d->cnt < KVP_DRIVE_MAX && strlen(url[i]) < KVP_DRIVE_URL_MAX) {
			p = &d->peer[d->cnt++];
			memset(p, 0, sizeof(*p));
			memcpy(p->url, url[i], strlen(url[i]) + 1);
		}
		if (!p)
			continue;
		has_changed |= !p->is_eligible;
		p->is_eligible = 1;
	}
	for (uint32_t i = 0; i < d->cnt; i++)
		if (d->peer[i].is_eligible == 2) {
			d->peer[i].is_eligible = 0;
			has_changed = 1;
		}
	d->is_known = 1;
	forget_gone(d);
	if (has_changed && d->state == KVP_DRIVE_BACK_OFF) {
		d->wait_ns = KVP_DRIVE_WAIT_MIN_NS;
		d->state = KVP_DRIVE_IDLE;
	}
}

/* A new cycle: nobody is tried yet, and a set gets a new order. */
static void cycle_begin(struct kvp_drive *d)
{
	for (uint32_t i = 0; i < d->cnt; i++)
		d->peer[i].is_tried = 0;
	d->state = KVP_DRIVE_CYCLE;
	forget_gone(d);
	for (uint32_t i = d->cnt; d->kind == KVP_DRIVE_SET && i > 1; i--) {
		uint32_t k = (uint32_t)draw(d, i);
		struct kvp_drive_peer p = d->peer[k];
		d->peer[k] = d->peer[i - 1];
		d->peer[i - 1] = p;
	}
	if (d->cnt)
		return;
	d->state = KVP_DRIVE_ENDED;
	d->end = d->kind == KVP_DRIVE_SET ? KVP_DRIVE_EMPTY : KVP_DRIVE_EXHAUSTED;
}

/* Nobody is left in this cycle. */
static void cycle_end(struct kvp_drive *d, uint64_t now_ns)
{
	if (d->kind == KVP_DRIVE_LIST) {
		d->state = KVP_DRIVE_ENDED;
		d->end = KVP_DRIVE_EXHAUSTED;
		return;
	}
	d->state = KVP_DRIVE_BACK_OFF;
	d->until_ns = now_ns + d->wait_ns;
	d->wait_ns = 2 * d->wait_ns < KVP_DRIVE_WAIT_MAX_NS ? 2 * d->wait_ns : KVP_DRIVE_WAIT_MAX_NS;
}

static struct kvp_drive_step told(enum kvp_drive_do what, const char *url, uint64_t until_ns)
{
	return (struct kvp_drive_step){what, url, until_ns};
}

struct kvp_drive_step kvp_drive_next(struct kvp_drive *d, uint64_t now_ns)
{
	if (!d->is_known || d->state == KVP_DRIVE_TRYING)
		return told(KVP_DRIVE_WAIT, NULL, UINT64_MAX);
	if (d->state == KVP_DRIVE_IDLE || (d->state == KVP_DRIVE_BACK_OFF && now_ns >= d->until_ns))
		cycle_begin(d);
	for (uint32_t i = 0; d->state == KVP_DRIVE_CYCLE && i < d->cnt; i++)
		if (!d->peer[i].is_tried && d->peer[i].is_eligible) {
			d->at = i;
			d->attempts++;
			d->state = KVP_DRIVE_TRYING;
			return told(KVP_DRIVE_ATTEMPT, d->peer[i].url, 0);
		}
	if (d->state == KVP_DRIVE_CYCLE)
		cycle_end(d, now_ns);
	if (d->state == KVP_DRIVE_BACK_OFF)
		return told(KVP_DRIVE_WAIT, NULL, d->until_ns);
	return told(d->end, NULL, 0);
}

void kvp_drive_result(struct kvp_drive *d, enum kvp_drive_outcome how)
{
	KVP_ASSERT(d->state == KVP_DRIVE_TRYING);
	d->peer[d->at].is_tried = 1;
	d->state = how == KVP_DRIVE_SUCCEEDED ? KVP_DRIVE_ENDED : KVP_DRIVE_CYCLE;
	d->end = KVP_DRIVE_RECOVERED;
	forget_gone(d);
}
