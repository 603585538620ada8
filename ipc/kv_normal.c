/* ipc/kv_normal.c — decoded event -> operation on the index. The rules are in kv_event.h.
 *
 * LoRA and salt enter a block's seed as sums of independent terms, so what is remembered of a block is the
 * two terms, not the texts. Only blocks with LoRA or salt are remembered, as long as any tier of the rank
 * holds them.
 */
#include <kvpick/mix.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/kv_event.h"

#define TIER_BIT(t) ((uint8_t)(1u << (t)))
#define MEMORY_MIN 64u

enum group_class { GROUP_MAIN, GROUP_OTHER, GROUP_UNKNOWN };

struct learned {
	uint32_t group_idx;
	enum group_class class;
};

struct memory { /* of one block; tiers 0 = free cell */
	uint64_t ext, lora_term, salt_term;
	uint8_t tiers, has_lora, has_salt, ambiguous;
};

struct rank_state {
	uint32_t dp_rank, learned_cnt;
	struct learned learned[KVP_KV_GROUP_MAX];
	struct memory *cell; /* open addressing, linear probing, power of two; NULL: nothing remembered */
	uint32_t cell_max, cell_cnt;
};

struct kvp_kv_norm {
	uint32_t block_size;
	uint32_t rank_cnt;
	uint32_t remembered;
	struct rank_state *rank[KVP_KV_RANK_MAX];
	uint64_t *seen; /* scratch of the self-reference check: hash + stamp pairs */
	uint32_t seen_max;
	uint64_t stamp;
	struct kvp_mix mix; /* engines choose their hashes */
	uint64_t probes;
	struct kvp_kv_note *note; /* what the last call changed */
	uint32_t note_cnt, note_max;
};

/* ---- names ---- */

const char *kvp_kv_reason_name(enum kvp_kv_reason r)
{
	static const char *const name[] = {
#define X(id, label) label,
		KVP_KV_REASON_LIST(X)
#undef X
	};
	return r >= 0 && r < KVP_KV_REASON_CNT ? name[r] : "unknown_reason";
}

const char *kvp_kv_tier_name(enum kvp_kv_tier t)
{
	static const char *const name[] = {"device", "host_pinned", "disk", "external"};
	return t >= 0 && t < KVP_KV_TIER_CNT ? name[t] : "unknown_tier";
}

static int str_is(struct kvp_kv_str s, const char *text)
{
	return s.p && s.len == strlen(text) && !memcmp(s.p, text, s.len);
}

int kvp_kv_tier_of(struct kvp_kv_str medium, enum kvp_kv_tier *out)
{
	static const struct {
		const char *medium;
		enum kvp_kv_tier tier;
	} map[] = {{"GPU", KVP_KV_DEVICE}, {"DEVICE", KVP_KV_DEVICE}, {"CPU", KVP_KV_HOST},
		{"CPU_PINNED", KVP_KV_HOST}, {"CPU_TIER1", KVP_KV_HOST}, {"CPU_TIER2", KVP_KV_DISK},
		{"DISK", KVP_KV_DISK}, {"NVME", KVP_KV_DISK}, {"STORAGE", KVP_KV_DISK},
		{"EXTERNAL", KVP_KV_EXTERNAL}, {"NETWORK", KVP_KV_EXTERNAL}, {"REMOTE", KVP_KV_EXTERNAL},
		{"SHARED", KVP_KV_EXTERNAL}};
	if (!medium.p || !medium.len) {
		*out = KVP_KV_DEVICE;
		return KVP_OK;
	}
	for (size_t i = 0; i < sizeof(map) / sizeof(map[0]); i++) {
		if (str_is(medium, map[i].medium)) {
			*out = map[i].tier;
			return KVP_OK;
		}
	}
	return KVP_ERR_NOTFOUND;
}

/* ---- life cycle ---- */

struct kvp_kv_norm *kvp_kv_norm_new(uint32_t block_size)
{
	struct kvp_kv_norm *n = block_size ? calloc(1, sizeof(*n)) : NULL;
	if (n && kvp_mix_draw(&n->mix)) {
		free(n);
		return NULL;
	}
	if (n)
		n->block_size = block_size;
	return n;
}

/* ---- notes ---- */

#define NOTE_LORA 0x100u
#define NOTE_SALT 0x200u
#define NOTE_AMBIGUOUS 0x400u
#define NOTE_TIERS 0xfu
#define NOTE_CLASS 0x10u /* a group: the class is in the bits below */

static int note_room(struct kvp_kv_norm *n, uint64_t cnt)
{
	uint64_t max = n->note_max ? n->note_max : 64;
	while (max < n->note_cnt + cnt)
		max *= 2;
	if (max == n->note_max)
		return KVP_OK;
	struct kvp_kv_note *note = max > UINT32_MAX ? NULL : realloc(n->note, max * sizeof(*note));
	if (!note)
		return KVP_ERR_FULL;
	n->note = note;
	n->note_max = (uint32_t)max;
	return KVP_OK;
}

/* Without memory the note is lost: what it would have ended is remembered for longer. Notes of what begins
 * are made sure of before (note_room). */
static void note_add(struct kvp_kv_norm *n, const struct kvp_kv_note *note)
{
	if (note_room(n, 1) == KVP_OK)
		n->note[n->note_cnt++] = *note;
}

static void note_block(struct kvp_kv_norm *n, const struct rank_state *r, const struct memory *m)
{
	uint32_t state = m->tiers | (m->has_lora ? NOTE_LORA : 0) | (m->has_salt ? NOTE_SALT : 0) |
			 (m->ambiguous ? NOTE_AMBIGUOUS : 0);
	struct kvp_kv_note note = {m->ext, m->lora_term, m->salt_term, r->dp_rank, m->tiers ? state : 0};
	note_add(n, &note);
}

uint32_t kvp_kv_norm_notes(const struct kvp_kv_norm *n, const struct kvp_kv_note **out)
{
	*out = n->note;
	return n->note_cnt;
}

static void forget_blocks(struct kvp_kv_norm *n, struct rank_state *r)
{
	n->remembered -= r->cell_cnt;
	free(r->cell);
	r->cell = NULL;
	r->cell_max = r->cell_cnt = 0;
}

void kvp_kv_norm_reset(struct kvp_kv_norm *n)
{
	n->note_cnt = 0;
	for (uint32_t i = 0; i < n->rank_cnt; i++) {
		forget_blocks(n, n->rank[i]);
		free(n->rank[i]);
		n->rank[i] = NULL;
	}
	n->rank_cnt = 0;
}

void kvp_kv_norm_free(struct kvp_kv_norm *n)
{
	if (!n)
		return;
	kvp_kv_norm_reset(n);
	free(n->seen);
	free(n->note);
	free(n);
}

uint32_t kvp_kv_norm_remembered(const struct kvp_kv_norm *n)
{
	return n->remembered;
}

uint64_t kvp_kv_norm_probes(const struct kvp_kv_norm *n)
{
	return n->probes;
}

static struct rank_state *rank_find(struct kvp_kv_norm *n, uint32_t dp_rank)
{
	for (uint32_t i = 0; i < n->rank_cnt; i++)
		if (n->rank[i]->dp_rank == dp_rank)
			return n->rank[i];
	return NULL;
}

static struct rank_state *rank_get(struct kvp_kv_norm *n, uint32_t dp_rank)
{
	struct rank_state *r = rank_find(n, dp_rank);
	if (r || n->rank_cnt == KVP_KV_RANK_MAX)
		return r;
	r = calloc(1, sizeof(*r));
	if (!r)
		return NULL;
	r->dp_rank = dp_rank;
	n->rank[n->rank_cnt++] = r;
	return r;
}

static void forget_rank(struct kvp_kv_norm *n, uint32_t dp_rank)
{
	struct rank_state *r = rank_find(n, dp_rank);
	for (uint32_t i = 0; r && i < r->cell_max; i++) {
		struct memory gone = r->cell[i];
		if (!gone.tiers)
			continue;
		gone.tiers = 0;
		note_block(n, r, &gone);
	}
	if (r)
		forget_blocks(n, r);
}

void kvp_kv_norm_forget_rank(struct kvp_kv_norm *n, uint32_t dp_rank)
{
	n->note_cnt = 0;
	forget_rank(n, dp_rank);
}

/* ---- block memory ---- */

static uint32_t slot_of(const struct kvp_kv_norm *n, uint64_t ext, uint32_t max)
{
	return (uint32_t)kvp_mix_u64(&n->mix, ext) & (max - 1);
}

/* The cell of ext, or the free one where it belongs; there is a free one. */
static struct memory *cell_of(struct kvp_kv_norm *n, struct memory *cell, uint32_t max, uint64_t ext)
{
	uint32_t home = slot_of(n, ext, max), i = home;
	while (cell[i].tiers && cell[i].ext != ext)
		i = (i + 1) & (max - 1);
	n->probes += ((i - home) & (max - 1)) + 1;
	return &cell[i];
}

static struct memory *recall(struct kvp_kv_norm *n, struct rank_state *r, uint64_t ext)
{
	if (!r || !r->cell_cnt)
		return NULL;
	struct memory *m = cell_of(n, r->cell, r->cell_max, ext);
	return m->tiers ? m : NULL;
}

/* Room for cnt more cells at load factor 1/2. */
static int reserve(struct kvp_kv_norm *n, struct rank_state *r, uint32_t cnt)
{
	if (n->remembered + cnt > KVP_KV_MEMORY_MAX)
		return KVP_ERR_FULL;
	uint32_t max = r->cell_max ? r->cell_max : MEMORY_MIN;
	while (max / 2 < r->cell_cnt + cnt)
		max *= 2;
	if (max == r->cell_max)
		return KVP_OK;
	struct memory *cell = calloc(max, sizeof(*cell));
	if (!cell)
		return KVP_ERR_FULL;
	for (uint32_t i = 0; i < r->cell_max; i++) {
		if (!r->cell[i].tiers)
			continue;
		*cell_of(n, cell, max, r->cell[i].ext) = r->cell[i];
	}
	free(r->cell);
	r->cell = cell;
	r->cell_max = max;
	return KVP_OK;
}

/* Free a cell and close the gap, so that probing never needs tombstones. */
static void forget_cell(struct kvp_kv_norm *n, struct rank_state *r, struct memory *m)
{
	uint32_t mask = r->cell_max - 1, hole = (uint32_t)(m - r->cell);
	m->tiers = 0;
	note_block(n, r, m);
	for (uint32_t i = (hole + 1) & mask; r->cell[i].tiers; i = (i + 1) & mask) {
		uint32_t home = slot_of(n, r->cell[i].ext, r->cell_max);
		if (((i - home) & mask) >= ((i - hole) & mask)) {
			r->cell[hole] = r->cell[i];
			hole = i;
		}
	}
	r->cell[hole].tiers = 0;
	r->cell_cnt--;
	n->remembered--;
}

static void forget_tier(struct kvp_kv_norm *n, struct rank_state *r, enum kvp_kv_tier tier)
{
	/* Freeing moves later cells into the hole, so look at a place until it holds nothing to free; a cell
	 * that moved from the end to the front across the wrap has been seen already. */
	for (uint32_t i = 0; i < r->cell_max; i++) {
		while (r->cell[i].tiers == TIER_BIT(tier))
			forget_cell(n, r, &r->cell[i]);
		if (r->cell[i].tiers & TIER_BIT(tier)) {
			r->cell[i].tiers &= (uint8_t)~TIER_BIT(tier);
			note_block(n, r, &r->cell[i]);
		}
	}
}

/* The terms of LoRA and salt that hold for a store. */
struct names {
	uint64_t lora_term, salt_term;
	uint8_t has_lora, has_salt;
};

static enum kvp_kv_reason names_of(
	struct kvp_kv_norm *n, struct rank_state *r, const struct kvp_kv_event *ev, struct names *out)
{
	const struct memory *p = ev->has_parent ? recall(n, r, ev->parent) : NULL;
	memset(out, 0, sizeof(*out));
	if (ev->lora.p) {
		out->lora_term = kvp_hash_seed(ev->lora.p, ev->lora.len, NULL, 0) - KVP_HASH_BASE_SEED;
		out->has_lora = 1;
	} else if (p && p->has_lora) {
		out->lora_term = p->lora_term;
		out->has_lora = 1;
	}
	if (ev->salt.p) {
		out->salt_term = kvp_hash_seed(NULL, 0, ev->salt.p, ev->salt.len) - KVP_HASH_BASE_SEED;
		out->has_salt = 1;
	} else if (p && p->ambiguous) {
		return KVP_KV_REASON_AMBIGUOUS;
	} else if (p && p->has_salt) {
		out->salt_term = p->salt_term;
		out->has_salt = 1;
	}
	return KVP_KV_REASON_OK;
}

static int same_memory(const struct memory *a, const struct memory *b)
{
	return a->ext == b->ext && a->lora_term == b->lora_term && a->salt_term == b->salt_term &&
	       a->tiers == b->tiers && a->has_lora == b->has_lora && a->has_salt == b->has_salt &&
	       a->ambiguous == b->ambiguous;
}

static enum kvp_kv_reason remember(struct kvp_kv_norm *n, struct rank_state *r, const struct kvp_kv_event *ev,
	enum kvp_kv_tier tier, const struct names *names)
{
	int is_named = names->has_lora || names->has_salt;
	if (!is_named && !r->cell_cnt)
		return KVP_KV_REASON_OK;
	if ((is_named && reserve(n, r, ev->hash_cnt) != KVP_OK) || note_room(n, ev->hash_cnt) != KVP_OK)
		return KVP_KV_REASON_STATE_FULL;
	for (uint32_t i = 0; i < ev->hash_cnt; i++) {
		struct memory *m = recall(n, r, ev->hash[i]);
		if (m) {
			struct memory was = *m;
			if (m->has_salt != names->has_salt || m->salt_term != names->salt_term)
				m->ambiguous |= m->has_salt | names->has_salt;
			if (names->has_lora) {
				m->has_lora = 1;
				m->lora_term = names->lora_term;
			}
			m->tiers |= TIER_BIT(tier);
			if (!same_memory(&was, m))
				note_block(n, r, m);
			continue;
		}
		if (!is_named)
			continue;
		m = cell_of(n, r->cell, r->cell_max, ev->hash[i]);
		*m = (struct memory){.ext = ev->hash[i],
			.lora_term = names->lora_term,
			.salt_term = names->salt_term,
			.tiers = TIER_BIT(tier),
			.has_lora = names->has_lora,
			.has_salt = names->has_salt};
		note_block(n, r, m);
		r->cell_cnt++;
		n->remembered++;
	}
	return KVP_KV_REASON_OK;
}

/* ---- checks ---- */

static enum group_class class_of(struct kvp_kv_str kind)
{
	static const char *const main_kind[] = {"full_attention", "mla_attention", "sink_full_attention"};
	static const char *const other_kind[] = {"sliding_window", "sliding_window_mla", "mamba",
		"chunked_local_attention", "encoder_only_attention", "cross_attention"};
	for (size_t i = 0; i < sizeof(main_kind) / sizeof(main_kind[0]); i++)
		if (str_is(kind, main_kind[i]))
			return GROUP_MAIN;
	for (size_t i = 0; i < sizeof(other_kind) / sizeof(other_kind[0]); i++)
		if (str_is(kind, other_kind[i]))
			return GROUP_OTHER;
	return GROUP_UNKNOWN;
}

static void learn(
	struct kvp_kv_norm *n, struct rank_state *r, uint32_t group_idx, enum group_class class)
{
	uint32_t i = 0;
	while (i < r->learned_cnt && r->learned[i].group_idx != group_idx)
		i++;
	if (i == KVP_KV_GROUP_MAX || (i < r->learned_cnt && r->learned[i].class == class))
		return;
	r->learned_cnt += i == r->learned_cnt;
	r->learned[i] = (struct learned){group_idx, class};
	struct kvp_kv_note note = {
		group_idx, 0, 0, r->dp_rank, KVP_KV_NOTE_GROUP | NOTE_CLASS | (uint32_t)class};
	note_add(n, &note);
}

static enum kvp_kv_reason check_group(
	struct kvp_kv_norm *n, struct rank_state *r, const struct kvp_kv_event *ev)
{
	if (ev->group_kind.p) {
		enum group_class class = class_of(ev->group_kind);
		if (ev->has_group && ev->kind == KVP_KV_STORED)
			learn(n, r, ev->group_idx, class);
		return class == GROUP_MAIN      ? KVP_KV_REASON_OK
		       : class == GROUP_UNKNOWN ? KVP_KV_REASON_UNKNOWN_KIND
						: KVP_KV_REASON_NON_MAIN_KIND;
	}
	if (!ev->has_group)
		return KVP_KV_REASON_OK;
	for (uint32_t i = 0; i < r->learned_cnt; i++) {
		if (r->learned[i].group_idx != ev->group_idx)
			continue;
		return r->learned[i].class == GROUP_MAIN      ? KVP_KV_REASON_OK
		       : r->learned[i].class == GROUP_UNKNOWN ? KVP_KV_REASON_UNKNOWN_KIND
							      : KVP_KV_REASON_NON_MAIN_GROUP;
	}
	return ev->group_idx == 0 ? KVP_KV_REASON_OK : KVP_KV_REASON_UNLEARNED_GROUP;
}

/* Was h marked under the present stamp? Marks it. seen holds (hash, stamp) pairs. */
static int seen_before(struct kvp_kv_norm *n, uint64_t h)
{
	for (uint32_t i = slot_of(n, h, n->seen_max);; i = (i + 1) & (n->seen_max - 1)) {
		n->probes++;
		if (n->seen[2 * i + 1] != n->stamp) {
			n->seen[2 * i] = h;
			n->seen[2 * i + 1] = n->stamp;
			return 0;
		}
		if (n->seen[2 * i] == h)
			return 1;
	}
}

static enum kvp_kv_reason check_distinct(struct kvp_kv_norm *n, const struct kvp_kv_event *ev)
{
	uint32_t max = n->seen_max ? n->seen_max : 64;
	while (max / 2 < (uint64_t)ev->hash_cnt + 1)
		max *= 2;
	if (max != n->seen_max) {
		uint64_t *seen = calloc(max, 2 * sizeof(*seen));
		if (!seen)
			return KVP_KV_REASON_STATE_FULL;
		free(n->seen);
		n->seen = seen;
		n->seen_max = max;
		n->stamp = 0;
	}
	n->stamp++;
	if (ev->has_parent)
		(void)seen_before(n, ev->parent);
	for (uint32_t i = 0; i < ev->hash_cnt; i++)
		if (seen_before(n, ev->hash[i]))
			return KVP_KV_REASON_SELF_REFERENCE;
	return KVP_KV_REASON_OK;
}

/* ---- kinds ---- */

static enum kvp_kv_reason attach(
	struct kvp_kv_norm *n, struct rank_state *r, const struct kvp_kv_event *ev, struct kvp_kv_op *op)
{
	if (op->tier == KVP_KV_DEVICE || !ev->hash_cnt)
		return KVP_KV_REASON_EMPTY_STORE;
	for (uint32_t i = 0; i < ev->hash_cnt; i++) {
		struct memory *m = recall(n, r, ev->hash[i]);
		if (!m || (m->tiers & TIER_BIT(op->tier)))
			continue;
		m->tiers |= TIER_BIT(op->tier);
		note_block(n, r, m);
	}
	op->kind = KVP_KV_OP_ATTACH;
	op->ext = ev->hash;
	op->ext_cnt = ev->hash_cnt;
	return KVP_KV_REASON_OK;
}

static enum kvp_kv_reason store(
	struct kvp_kv_norm *n, struct rank_state *r, const struct kvp_kv_event *ev, struct kvp_kv_op *op)
{
	enum kvp_kv_reason why = check_distinct(n, ev);
	if (why != KVP_KV_REASON_OK)
		return why;
	if (!ev->tok_cnt || (!ev->block_size && op->tier != KVP_KV_DEVICE))
		return attach(n, r, ev, op);
	if (ev->block_size != n->block_size)
		return KVP_KV_REASON_BLOCK_SIZE;
	uint32_t blocks = (ev->tok_cnt - (ev->window == KVP_HASH_WINDOW_EAGLE)) / n->block_size;
	if (blocks > ev->hash_cnt)
		blocks = ev->hash_cnt;
	if (!blocks)
		return KVP_KV_REASON_EMPTY_STORE;
	struct names names;
	why = names_of(n, r, ev, &names);
	if (why == KVP_KV_REASON_OK)
		why = remember(n, r, ev, op->tier, &names);
	if (why != KVP_KV_REASON_OK)
		return why;
	op->kind = KVP_KV_OP_STORE;
	op->has_parent = ev->has_parent;
	op->parent = ev->parent;
	op->ext = ev->hash;
	op->ext_cnt = blocks;
	op->tok = ev->tok;
	op->tok_cnt = ev->tok_cnt;
	op->block_size = n->block_size;
	op->window = ev->window;
	op->seed = KVP_HASH_BASE_SEED + names.lora_term + names.salt_term;
	op->mm_cnt = ev->mm_cnt < blocks ? ev->mm_cnt : blocks;
	op->mm = ev->mm;
	return KVP_KV_REASON_OK;
}

static void removed(
	struct kvp_kv_norm *n, struct rank_state *r, const struct kvp_kv_event *ev, struct kvp_kv_op *op)
{
	for (uint32_t i = 0; i < ev->hash_cnt && r->cell_cnt; i++) {
		struct memory *m = recall(n, r, ev->hash[i]);
		if (!m)
			continue;
		if (m->tiers == TIER_BIT(op->tier)) {
			forget_cell(n, r, m);
		} else if (m->tiers & TIER_BIT(op->tier)) {
			m->tiers &= (uint8_t)~TIER_BIT(op->tier);
			note_block(n, r, m);
		}
	}
	op->kind = KVP_KV_OP_REMOVE;
	op->ext = ev->hash;
	op->ext_cnt = ev->hash_cnt;
}

static enum kvp_kv_reason check_origin(const struct kvp_kv_event *ev, enum kvp_kv_tier *tier)
{
	if (ev->locality.p && !str_is(ev->locality, "LOCAL"))
		return KVP_KV_REASON_NON_LOCAL;
	if (ev->ownership.p && !str_is(ev->ownership, "framework"))
		return KVP_KV_REASON_FOREIGN_OWNER;
	return kvp_kv_tier_of(ev->medium, tier) == KVP_OK ? KVP_KV_REASON_OK : KVP_KV_REASON_UNKNOWN_MEDIUM;
}

static enum kvp_kv_reason block_event(
	struct kvp_kv_norm *n, const struct kvp_kv_event *ev, uint32_t dp_rank, struct kvp_kv_op *op)
{
	struct rank_state *r = NULL;
	enum kvp_kv_reason why = check_origin(ev, &op->tier);
	if (why == KVP_KV_REASON_OK && !(r = rank_get(n, dp_rank)))
		why = KVP_KV_REASON_STATE_FULL;
	if (why == KVP_KV_REASON_OK)
		why = check_group(n, r, ev);
	if (why != KVP_KV_REASON_OK)
		return why;
	if (ev->kind == KVP_KV_STORED)
		return store(n, r, ev, op);
	removed(n, r, ev, op);
	return KVP_KV_REASON_OK;
}

enum kvp_kv_reason kvp_kv_normalise(
	struct kvp_kv_norm *n, const struct kvp_kv_event *ev, uint32_t dp_rank, struct kvp_kv_op *op)
{
	struct kvp_kv_op o = {.dp_rank = dp_rank};
	enum kvp_kv_reason why = KVP_KV_REASON_OK;
	struct rank_state *r = rank_find(n, dp_rank);
	n->note_cnt = 0;
	switch (ev->kind) {
	case KVP_KV_STORED:
	case KVP_KV_REMOVED:
		why = block_event(n, ev, dp_rank, &o);
		break;
	case KVP_KV_CLEARED:
		forget_rank(n, dp_rank);
		o.kind = KVP_KV_OP_CLEAR;
		break;
	case KVP_KV_TIER_CLEARED:
		if (kvp_kv_tier_of(ev->medium, &o.tier) != KVP_OK)
			return KVP_KV_REASON_UNKNOWN_MEDIUM;
		if (r)
			forget_tier(n, r, o.tier);
		o.kind = KVP_KV_OP_CLEAR_TIER;
		break;
	case KVP_KV_IGNORED:
		return KVP_KV_REASON_IGNORED_EVENT;
	case KVP_KV_UNKNOWN:
		return KVP_KV_REASON_UNKNOWN_EVENT;
	case KVP_KV_MALFORMED:
		return KVP_KV_REASON_MALFORMED_EVENT;
	}
	if (why == KVP_KV_REASON_OK)
		*op = o;
	return why;
}

/* ---- after a restart ---- */

static int restore_one(struct kvp_kv_norm *n, const struct kvp_kv_note *note)
{
	struct rank_state *r = rank_get(n, note->dp_rank);
	if (!r)
		return KVP_ERR_FULL;
	if (note->state & KVP_KV_NOTE_GROUP) {
		uint32_t class = note->state & ~(KVP_KV_NOTE_GROUP | NOTE_CLASS);
		if ((note->state & NOTE_CLASS) && class <= GROUP_UNKNOWN)
			learn(n, r, (uint32_t)note->id, (enum group_class)class);
		return KVP_OK;
	}
	if (!(note->state & NOTE_TIERS) || recall(n, r, note->id))
		return KVP_OK;
	if (reserve(n, r, 1) != KVP_OK)
		return KVP_ERR_FULL;
	*cell_of(n, r->cell, r->cell_max, note->id) = (struct memory){.ext = note->id,
		.lora_term = note->lora_term,
		.salt_term = note->salt_term,
		.tiers = note->state & NOTE_TIERS,
		.has_lora = (note->state & NOTE_LORA) != 0,
		.has_salt = (note->state & NOTE_SALT) != 0,
		.ambiguous = (note->state & NOTE_AMBIGUOUS) != 0};
	r->cell_cnt++;
	n->remembered++;
	return KVP_OK;
}

int kvp_kv_norm_restore(struct kvp_kv_norm *n, const struct kvp_kv_note *note, uint32_t cnt)
{
	int rc = KVP_OK;
	for (uint32_t i = 0; !rc && i < cnt; i++)
		rc = restore_one(n, &note[i]);
	n->note_cnt = 0;
	return rc;
}
