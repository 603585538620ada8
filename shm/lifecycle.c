#include "shm/lifecycle.h"

#include <kvpick/point.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

#define MAGIC 0x314546494c564bULL /* "KVLIFE1" */
#define LAYOUT 1
#define CELLS_MIN 64u

enum { NONE, CLAIMED, READY, VOID };

/* State word of a record's first cell: owner 32 | cells 8 | lap 20 | state 4. The lap is the turn of the ring
 * that the word is of: in a word of an earlier one nobody has named the claim yet. */
#define LAP_BITS 20
#define LAP_MASK ((1u << LAP_BITS) - 1)
#define STATE(w) ((unsigned)((w)&0xfu))
#define LAP(w) ((uint32_t)((w) >> 4) & LAP_MASK)
#define CELLS(w) ((uint32_t)((w) >> 24) & 0xffu)
#define OWNER(w) ((kvp_owner)((w) >> 32))
#define WORD(owner, cells, lap, state)                                                                       \
	((uint64_t)(owner) << 32 | (uint64_t)(cells) << 24 | (uint64_t)(lap) << 4 | (state))
#define WITH_STATE(w, state) (((w) & ~0xfULL) | (state))

/* The last claim, in the tail: owner 32 | cells 32. */
#define LAST(owner, cells) ((uint64_t)(owner) << 32 | (cells))
#define LAST_OWNER(hi) ((kvp_owner)((hi) >> 32))
#define LAST_CELLS(hi) ((uint32_t)(hi))

struct cell {
	uint64_t word;
	uint64_t body[KVP_LIFECYCLE_CELL_BYTES / 8];
} __attribute__((aligned(128)));

/* How a record begins; id and adapter follow. */
struct head {
	uint64_t sum; /* of all that follows, and of the place */
	uint64_t h, worker_id;
	uint32_t dp_rank, part;
	uint16_t id_len, lora_len;
	uint32_t kind;
};
_Static_assert(sizeof(struct head) == 40, "no padding: it is summed");
#define RECORD_MAX (sizeof(struct head) + KVP_RESV_ID_MAX + KVP_RESV_LORA_MAX)
_Static_assert(RECORD_MAX <= KVP_LIFECYCLE_CELLS_MAX * KVP_LIFECYCLE_CELL_BYTES, "the longest record fits");
_Static_assert(KVP_LIFECYCLE_CELLS_MAX < CELLS_MIN, "and the smallest ring holds it");

struct kvp_lifecycle_shm {
	struct kvp_objhdr hdr;
	uint64_t pad0[8];
	struct kvp_u128 tail; /* lo = place after the last claim, hi = LAST; producers, 16-byte CAS */
	uint64_t pad1[14];
	uint64_t head; /* oldest place in use; consumer, release */
	uint64_t pad2[15];
	uint32_t consumer; /* kvp_owner, 0 = none yet */
	uint32_t need;	   /* 1 = the consumer wants to be woken; consumer, sequentially consistent */
	uint32_t pad3[30];
};
#define CELL_OFF KVP_PAGE
_Static_assert(sizeof(struct kvp_lifecycle_shm) <= CELL_OFF, "the header is one page");

static uint32_t layout_hash(void)
{
	const size_t w[] = {sizeof(struct cell), sizeof(struct head),
		offsetof(struct kvp_lifecycle_shm, tail), offsetof(struct kvp_lifecycle_shm, head),
		offsetof(struct kvp_lifecycle_shm, consumer), CELL_OFF, LAP_BITS,
		offsetof(struct kvp_lifecycle_shm, need)};
	return kvp_obj_hash(w, sizeof(w) / sizeof(w[0]));
}

static uint64_t cell_cnt(const struct kvp_geom *g)
{
	uint64_t n = CELLS_MIN;
	while (n < g->lifecycle_max)
		n *= 2;
	return n;
}

uint64_t kvp_lifecycle_align(void)
{
	return KVP_PAGE;
}

uint64_t kvp_lifecycle_footprint(const struct kvp_geom *g)
{
	if (!g || g->lifecycle_max > KVP_LIFECYCLE_MAX)
		return 0;
	return g->lifecycle_max ? CELL_OFF + cell_cnt(g) * sizeof(struct cell) : KVP_PAGE;
}

int kvp_lifecycle_new(void *mem, const struct kvp_geom *g)
{
	uint64_t fp = kvp_lifecycle_footprint(g);
	if (!mem || ((uintptr_t)mem & (KVP_PAGE - 1)) || !fp)
		return KVP_ERR_INVAL;
	if (!g->lifecycle_max)
		return KVP_OK;
	kvp_obj_begin(mem, LAYOUT, layout_hash(), fp, g->region_gen);
	struct kvp_lifecycle_shm *s = mem;
	/* the second turn: words of zero are of an earlier one */
	s->tail = (struct kvp_u128){cell_cnt(g), 0};
	s->head = s->tail.lo;
	kvp_obj_ready(mem, MAGIC);
	return KVP_OK;
}

int kvp_lifecycle_join(void *mem, const struct kvp_geom *g, struct kvp_lifecycle_ring *out)
{
	memset(out, 0, sizeof(*out));
	if (!g->lifecycle_max)
		return KVP_OK;
	int rc = kvp_obj_join(mem, MAGIC, LAYOUT, layout_hash());
	if (rc)
		return rc;
	struct kvp_lifecycle_shm *s = mem;
	if (s->hdr.footprint != kvp_lifecycle_footprint(g))
		return KVP_ERR_LAYOUT;
	out->shm = s;
	out->cell_mask = cell_cnt(g) - 1;
	return KVP_OK;
}

void kvp_lifecycle_leave(struct kvp_lifecycle_ring *l)
{
	memset(l, 0, sizeof(*l));
}

int kvp_lifecycle_delete(void *mem)
{
	kvp_obj_delete(mem);
	return KVP_OK;
}

/* ---- places ---- */

static struct cell *cell_at(const struct kvp_lifecycle_ring *l, uint64_t pos)
{
	return (struct cell *)(void *)((char *)l->shm + CELL_OFF) + (pos & l->cell_mask);
}

static uint32_t lap_of(const struct kvp_lifecycle_ring *l, uint64_t pos)
{
	return (uint32_t)(pos / (l->cell_mask + 1)) & LAP_MASK;
}

static int is_older(uint32_t lap, uint32_t than)
{
	return ((than - lap) & LAP_MASK) - 1u < LAP_MASK / 2;
}

/* 1 and both halves of one tail; 0: it was just replaced. */
static int tail_read(const struct kvp_lifecycle_ring *l, struct kvp_u128 *t)
{
	t->lo = kvp_ld_acq_u64(&l->shm->tail.lo);
	t->hi = kvp_ld_acq_u64(&l->shm->tail.hi);
	return kvp_ld_acq_u64(&l->shm->tail.lo) == t->lo; /* it only grows */
}

/* Writes the last claim into its cell, unless somebody did. The word that is replaced is of an earlier turn
 * and never comes back, so whoever is late fails. */
static void name_last(const struct kvp_lifecycle_ring *l, const struct kvp_u128 *t)
{
	uint32_t n = LAST_CELLS(t->hi);
	if (n == 0 || n > KVP_LIFECYCLE_CELLS_MAX)
		return;
	uint64_t pos = t->lo - n, *word = &cell_at(l, pos)->word;
	uint64_t w = kvp_ld_acq_u64(word);
	if (is_older(LAP(w), lap_of(l, pos)))
		kvp_cas_ar_u64(word, w, WORD(LAST_OWNER(t->hi), n, lap_of(l, pos), CLAIMED));
}

/* After a compare-and-swap of the state word, which is a full barrier; pairs with: kvp_lifecycle_rest. */
static void wake_consumer(const struct kvp_lifecycle_ring *l)
{
	if (!kvp_ld_rlx_u32(&l->shm->need))
		return;
	kvp_owner who = kvp_ld_acq_u32(&l->shm->consumer);
	if (l->slots && who)
		kvp_slot_wake(l->slots, KVP_OWNER_SLOT(who));
}

/* ---- content ---- */

/* parse takes cells apart that lay at pos: 0 = they are not a record. */
static int parse(const char *buf, uint32_t cells, uint64_t pos, struct head *head)
{
	memcpy(head, buf, sizeof(*head));
	uint32_t len = (uint32_t)sizeof(*head) + head->id_len + head->lora_len;
	if (head->kind <= KVP_LIFECYCLE_NONE || head->kind >= KVP_LIFECYCLE_KIND_CNT || head->id_len == 0 ||
		head->id_len > KVP_RESV_ID_MAX || head->lora_len > KVP_RESV_LORA_MAX ||
		(len + KVP_LIFECYCLE_CELL_BYTES - 1) / KVP_LIFECYCLE_CELL_BYTES != cells)
		return 0;
	return head->sum == (XXH3_64bits(buf + sizeof(head->sum), len - sizeof(head->sum)) ^ pos);
}

static int read_record(
	const struct kvp_lifecycle_ring *l, uint64_t pos, uint32_t cells, char *buf, struct head *head)
{
	for (uint32_t i = 0; i < cells; i++)
		kvp_copy_out(buf + i * KVP_LIFECYCLE_CELL_BYTES, cell_at(l, pos + i)->body,
			KVP_LIFECYCLE_CELL_BYTES);
	return parse(buf, cells, pos, head);
}

static void fill(const struct kvp_lifecycle_ring *l, uint64_t pos, uint32_t cells, char *buf, uint32_t len)
{
	uint64_t sum = XXH3_64bits(buf + sizeof(sum), len - sizeof(sum)) ^ pos;
	memcpy(buf, &sum, sizeof(sum));
	for (uint32_t i = 0; i < cells; i++) {
		uint32_t off = i * KVP_LIFECYCLE_CELL_BYTES;
		uint32_t n = len - off < KVP_LIFECYCLE_CELL_BYTES ? len - off : KVP_LIFECYCLE_CELL_BYTES;
		kvp_copy_in(cell_at(l, pos + i)->body, buf + off, n);
		KVP_POINT("lifecycle:filling");
	}
}

/* ---- producer ---- */

/* has_room looks at the head only when the one of last time is not far enough: it is the consumer's line. */
static int has_room(struct kvp_lifecycle_ring *l, uint64_t end)
{
	if (end - kvp_ld_rlx_u64(&l->head_seen) <= l->cell_mask + 1)
		return 1;
	uint64_t head = kvp_ld_acq_u64(&l->shm->head); /* pairs with: advance */
	kvp_st_rlx_u64(&l->head_seen, head);
	return end - head <= l->cell_mask + 1;
}

/* take moves the tail over n cells: the place, or 0 = full. */
static uint64_t take(struct kvp_lifecycle_ring *l, kvp_owner owner, uint32_t n)
{
	struct kvp_u128 t;
	for (;;) { /* every failure is another's success */
		if (!tail_read(l, &t))
			continue;
		if (!has_room(l, t.lo + n))
			return 0;
		__builtin_prefetch(cell_at(l, t.lo), 1);
		__builtin_prefetch(&cell_at(l, t.lo)->body[8], 1);
		name_last(l, &t);
		KVP_POINT("lifecycle:claiming");
		struct kvp_u128 mine = {t.lo + n, LAST(owner, n)};
		if (!kvp_cas_u128(&l->shm->tail, &t, mine))
			continue;
		KVP_POINT("lifecycle:claimed");
		__builtin_prefetch(cell_at(l, mine.lo), 1); /* likely the next record's */
		__builtin_prefetch(&cell_at(l, mine.lo)->body[8], 1);
		return mine.lo - n;
	}
}

int kvp_lifecycle_claim(struct kvp_lifecycle_ring *l, kvp_owner owner, const struct kvp_lifecycle_put *r,
	struct kvp_lifecycle_claim *c)
{
	char buf[RECORD_MAX];
	*c = (struct kvp_lifecycle_claim){.owner = owner, .kind = r->kind};
	if (!owner || r->kind <= KVP_LIFECYCLE_NONE || r->kind >= KVP_LIFECYCLE_KIND_CNT || r->id_len == 0 ||
		r->id_len > KVP_RESV_ID_MAX || r->lora_len > KVP_RESV_LORA_MAX)
		return KVP_ERR_INVAL;
	struct head head = {.h = r->h,
		.worker_id = r->worker_id,
		.dp_rank = r->dp_rank,
		.part = r->part,
		.id_len = (uint16_t)r->id_len,
		.lora_len = (uint16_t)r->lora_len,
		.kind = (uint32_t)r->kind};
	uint32_t len = (uint32_t)sizeof(head) + r->id_len + r->lora_len;
	memcpy(buf, &head, sizeof(head));
	memcpy(buf + sizeof(head), r->id, r->id_len);
	if (r->lora_len)
		memcpy(buf + sizeof(head) + r->id_len, r->lora, r->lora_len);
	c->cells = (len + KVP_LIFECYCLE_CELL_BYTES - 1) / KVP_LIFECYCLE_CELL_BYTES;
	c->pos = take(l, owner, c->cells);
	if (!c->pos)
		return KVP_ERR_FULL;
	fill(l, c->pos, c->cells, buf, len);
	return KVP_OK;
}

/* settle ends a claim of the caller: 1, or 0 = it was taken for dead or stalled. */
static int settle(struct kvp_lifecycle_ring *l, const struct kvp_lifecycle_claim *c, unsigned state)
{
	uint32_t lap = lap_of(l, c->pos);
	uint64_t *word = &cell_at(l, c->pos)->word, claimed = WORD(c->owner, c->cells, lap, CLAIMED);
	int done = 0;
	for (uint64_t w = kvp_ld_rlx_u64(word); !done && (w == claimed || is_older(LAP(w), lap));
		w = kvp_ld_rlx_u64(word)) /* at most one turn more: it was named meanwhile */
		/* after the content; pairs with: kvp_lifecycle_next */
		done = kvp_cas_ar_u64(word, w, WITH_STATE(claimed, state));
	KVP_POINT("lifecycle:settled");
	if (l->wake == KVP_LIFECYCLE_WAKE_NOW)
		wake_consumer(l);
	else if (!l->owed)
		l->owed = 1;
	return done;
}

int kvp_lifecycle_tend(struct kvp_lifecycle_ring *l)
{
	if (l->owed == 1 && kvp_ld_rlx_u32(&l->shm->need)) {
		l->owed = 2;
		return 1;
	}
	if (l->owed)
		wake_consumer(l);
	l->owed = 0;
	return 0;
}

/* again puts what the consumer went past, because this process stood still, into the ring a second time: its
 * content is still there unless others have used the cells since. */
static int again(struct kvp_lifecycle_ring *l, struct kvp_lifecycle_claim c)
{
	char buf[KVP_LIFECYCLE_CELLS_MAX * KVP_LIFECYCLE_CELL_BYTES];
	struct head head;
	if (!read_record(l, c.pos, c.cells, buf, &head))
		return 0;
	c.pos = take(l, c.owner, c.cells);
	if (!c.pos)
		return 0;
	fill(l, c.pos, c.cells, buf, (uint32_t)sizeof(head) + head.id_len + head.lora_len);
	return settle(l, &c, READY);
}

void kvp_lifecycle_ready(
	struct kvp_lifecycle_ring *l, const struct kvp_lifecycle_claim *c, struct kvp_ctr_column_shm *column)
{
	int done = c->pos && (settle(l, c, READY) || again(l, *c));
	if (column)
		kvp_ctr_add_mw(column, done ? KVP_CTR_LIFECYCLE_ENQUEUED : KVP_CTR_LIFECYCLE_DROPPED, 1);
}

void kvp_lifecycle_void(struct kvp_lifecycle_ring *l, const struct kvp_lifecycle_claim *c)
{
	if (c->pos)
		settle(l, c, VOID);
}

/* ---- consumer ---- */

void kvp_lifecycle_attach(struct kvp_lifecycle_ring *l, kvp_owner owner, struct kvp_ctr_column_shm *column)
{
	l->ctr = column;
	l->now_cells = 0;
	l->stall_at = l->read_ns = 0;
	if (!l->shm)
		return;
	kvp_st_sc_u32(&l->shm->consumer, owner);
	kvp_st_sc_u32(&l->shm->need, 1);
}

static void count(const struct kvp_lifecycle_ring *l, enum kvp_ctr id)
{
	if (l->ctr)
		kvp_ctr_add_mw(l->ctr, id, 1);
}

static void advance(struct kvp_lifecycle_ring *l, uint64_t to)
{
	l->now_cells = 0;
	KVP_POINT("lifecycle:done");
	kvp_st_rel_u64(&l->shm->head, to); /* after the last look at the cells; pairs with: take */
	if (l->ctr)
		kvp_ctr_set(l->ctr, KVP_CTR_LIFECYCLE_DEPTH, kvp_lifecycle_depth(l));
}

/* What becomes of a claim that nobody finishes. */
enum verdict { WAIT, DEAD, STALLED, TELL };

/* Whoever died did or did not do what it was going to tell: the booking shows it. */
static enum verdict of_dead(const struct kvp_lifecycle_ring *l, const struct head *head)
{
	int lives = l->book && kvp_resv_is_booked(l->book, head->h);
	if (head->kind == KVP_LIFECYCLE_ADD)
		return lives ? TELL : DEAD;
	return l->book && head->kind == KVP_LIFECYCLE_FREE && !lives ? TELL : DEAD;
}

static enum verdict judge(struct kvp_lifecycle_ring *l, uint64_t pos, uint64_t w, uint64_t now_ns)
{
	char buf[KVP_LIFECYCLE_CELLS_MAX * KVP_LIFECYCLE_CELL_BYTES];
	struct head head;
	if (l->slots && kvp_owner_dead(l->slots, OWNER(w)))
		return read_record(l, pos, CELLS(w), buf, &head) ? of_dead(l, &head) : DEAD;
	if (l->stall_at != pos) {
		l->stall_at = pos;
		l->stall_since_ns = now_ns;
	}
	int over = now_ns > l->stall_since_ns && now_ns - l->stall_since_ns >= KVP_LIFECYCLE_STALL_NS;
	return over ? STALLED : WAIT;
}

/* unfinished ends the claim w at pos if it can: 1, or 0 = wait for its producer. */
static int unfinished(struct kvp_lifecycle_ring *l, uint64_t pos, uint64_t w, uint64_t now_ns)
{
	enum verdict v = judge(l, pos, w, now_ns);
	if (v == WAIT)
		return 0;
	KVP_POINT("lifecycle:unfinished");
	if (kvp_cas_ar_u64(&cell_at(l, pos)->word, w, WITH_STATE(w, v == TELL ? READY : VOID)) && v != TELL)
		count(l, v == DEAD ? KVP_CTR_LIFECYCLE_DEAD : KVP_CTR_LIFECYCLE_STALLED);
	return 1;
}

static void give_out(const struct head *head, const char *text, struct kvp_lifecycle_rec *r)
{
	r->kind = (enum kvp_lifecycle_kind)head->kind;
	r->part = head->part;
	r->dp_rank = head->dp_rank;
	r->h = head->h;
	r->worker_id = head->worker_id;
	r->id_len = head->id_len;
	r->lora_len = head->lora_len;
	memcpy(r->id, text, head->id_len);
	memcpy(r->lora, text + head->id_len, head->lora_len);
	r->id[head->id_len] = r->lora[head->lora_len] = '\0';
}

/* oldest finds the word of the oldest record: KVP_OK, KVP_ERR_NOTFOUND, or KVP_ERR_CORRUPT if none begins
 * there; *end is then the tail. The tail is looked at only when the word does not tell: it is the producers'
 * line. */
static int oldest(const struct kvp_lifecycle_ring *l, uint64_t pos, uint64_t *word, uint64_t *end)
{
	struct kvp_u128 t;
	const uint64_t *at = &cell_at(l, pos)->word;
	for (;;) {
		*word = kvp_ld_acq_u64(at); /* pairs with: settle */
		if (STATE(*word) == READY && LAP(*word) == lap_of(l, pos) && CELLS(*word) &&
			CELLS(*word) <= KVP_LIFECYCLE_CELLS_MAX)
			return KVP_OK;
		if (!tail_read(l, &t))
			continue;
		*end = t.lo;
		if (pos == t.lo)
			return KVP_ERR_NOTFOUND;
		*word = kvp_ld_acq_u64(at);
		if (is_older(LAP(*word), lap_of(l, pos)) && t.lo - LAST_CELLS(t.hi) == pos) {
			name_last(l, &t);
			continue;
		}
		uint32_t n = CELLS(*word);
		int good = LAP(*word) == lap_of(l, pos) && n && n <= KVP_LIFECYCLE_CELLS_MAX;
		return good && n <= t.lo - pos ? KVP_OK : KVP_ERR_CORRUPT;
	}
}

int kvp_lifecycle_next(struct kvp_lifecycle_ring *l, uint64_t now_ns, struct kvp_lifecycle_rec *r)
{
	char buf[KVP_LIFECYCLE_CELLS_MAX * KVP_LIFECYCLE_CELL_BYTES];
	struct head head;
	if (!l->shm)
		return KVP_ERR_NOTFOUND;
	for (;;) { /* every turn moves the head or ends a claim */
		uint64_t pos = kvp_ld_rlx_u64(&l->shm->head), w, end;
		int rc = oldest(l, pos, &w, &end);
		if (rc == KVP_ERR_NOTFOUND)
			return rc;
		if (rc) { /* a wild store: begin behind it */
			count(l, KVP_CTR_LIFECYCLE_BROKEN);
			advance(l, end);
			continue;
		}
		if (STATE(w) == CLAIMED) {
			if (!unfinished(l, pos, w, now_ns))
				return KVP_ERR_AGAIN;
			continue;
		}
		if (STATE(w) == READY && read_record(l, pos, CELLS(w), buf, &head)) {
			KVP_POINT("lifecycle:read");
			l->now_cells = CELLS(w);
			l->read_ns = now_ns;
			give_out(&head, buf + sizeof(head), r);
			return KVP_OK;
		}
		if (STATE(w) != VOID)
			count(l, KVP_CTR_LIFECYCLE_BROKEN);
		advance(l, pos + CELLS(w));
	}
}

uint32_t kvp_lifecycle_rest(struct kvp_lifecycle_ring *l, uint64_t now_ns)
{
	if (!l->shm)
		return KVP_SLEEP_MAX_MS;
	int soon = l->read_ns && now_ns - l->read_ns < KVP_LIFECYCLE_LINGER_NS;
	if (kvp_ld_rlx_u32(&l->shm->need) != (soon ? 0 : 1))
		kvp_st_sc_u32(
			&l->shm->need, soon ? 0 : 1); /* before the last look; pairs with: wake_consumer */
	return soon ? 1 : KVP_SLEEP_MAX_MS;
}

void kvp_lifecycle_done(struct kvp_lifecycle_ring *l)
{
	if (l->shm && l->now_cells)
		advance(l, kvp_ld_rlx_u64(&l->shm->head) + l->now_cells);
}

/* ---- both ---- */

uint64_t kvp_lifecycle_depth(const struct kvp_lifecycle_ring *l)
{
	if (!l->shm)
		return 0;
	uint64_t head = kvp_ld_acq_u64(&l->shm->head), tail = kvp_ld_acq_u64(&l->shm->tail.lo);
	return tail - head <= l->cell_mask + 1 ? tail - head : l->cell_mask + 1;
}

/* The next record from *pos on: 1, its place and word, and *pos behind it; 0 = the end. A consumer at work
 * moves the begin. Writes nothing: a last claim that nobody named is shown as it will be. */
static int walk(const struct kvp_lifecycle_ring *l, uint64_t *pos, uint64_t *at, uint64_t *word)
{
	struct kvp_u128 t;
	for (;;) {
		uint64_t head = kvp_ld_acq_u64(&l->shm->head);
		if (*pos < head)
			*pos = head;
		if (!tail_read(l, &t))
			continue;
		if (*pos >= t.lo)
			return 0;
		uint64_t w = kvp_ld_acq_u64(&cell_at(l, *pos)->word);
		if (kvp_ld_acq_u64(&l->shm->head) > *pos)
			continue; /* it was taken meanwhile, and its cell may be another's already */
		if (is_older(LAP(w), lap_of(l, *pos)) && *pos + LAST_CELLS(t.hi) == t.lo)
			w = WORD(LAST_OWNER(t.hi), LAST_CELLS(t.hi), lap_of(l, *pos), CLAIMED);
		*at = *pos;
		*word = w;
		uint32_t n = CELLS(w);
		*pos = LAP(w) == lap_of(l, *at) && n && n <= KVP_LIFECYCLE_CELLS_MAX ? *at + n : UINT64_MAX;
		return 1;
	}
}

static const char *record_fault(const struct kvp_lifecycle_ring *l, uint64_t at, uint64_t w)
{
	char buf[KVP_LIFECYCLE_CELLS_MAX * KVP_LIFECYCLE_CELL_BYTES];
	struct head head;
	if (LAP(w) != lap_of(l, at) || CELLS(w) == 0 || CELLS(w) > KVP_LIFECYCLE_CELLS_MAX)
		return "no record where one begins";
	if (STATE(w) < CLAIMED || STATE(w) > VOID)
		return "state out of range";
	if (OWNER(w) == 0 || (l->slots && KVP_OWNER_SLOT(OWNER(w)) >= l->slots->slot_max))
		return "owner out of range";
	if (STATE(w) == READY && !read_record(l, at, CELLS(w), buf, &head))
		return "broken content";
	return NULL;
}

uint64_t kvp_lifecycle_check(const struct kvp_lifecycle_ring *l)
{
	uint64_t faults = 0, pos = 0, at, w;
	if (!l->shm)
		return 0;
	if (kvp_ld_acq_u64(&l->shm->hdr.magic) != MAGIC)
		return 1;
	uint64_t head = kvp_ld_acq_u64(&l->shm->head), tail = kvp_ld_acq_u64(&l->shm->tail.lo);
	if (head > tail || head <= l->cell_mask) {
		fprintf(stderr, "lifecycle.check: head out of range\n");
		return 1;
	}
	while (walk(l, &pos, &at, &w)) {
		const char *what = record_fault(l, at, w);
		if (what && kvp_ld_acq_u64(&l->shm->head) > at)
			continue; /* it went under our eyes */
		if (what && faults++ < 10)
			fprintf(stderr, "lifecycle.check: place %llu: %s\n", (unsigned long long)at, what);
	}
	return faults;
}
