/* A reader and the tree's writer woven without threads. First the reader is held up in the middle of a walk,
 * where it asks for more hashes, while the writer changes what it stands on; then the writer is held up at
 * each of its named places while a reader looks. Whatever a walk reports must have been true at some instant
 * of it, exactly when it says that it did not give up. */
#include <kvpick/point.h>

#include "shm/radix_priv.h"
#include "tests/radix_model.h"
#include "tests/tap.h"

/* Slots f, f + FAMILIES, ... hold blocks of family f; all families begin with the same TRUNK blocks. */
enum { FAMILIES = 4, HOLDERS = 10 * FAMILIES, TRUNK = 20, PROMPT = 300, FILLER = 50, PART = 9 };

static const struct kvp_geom geom = {.slot_max = 8,
	.rank_max = 64,
	.index_rank_max = 64,
	.block_max = 8000,
	.region_gen = 7,
	.salt = {11, 22}};
static struct seg seg;
static struct kvp_radix reader;
static struct kvp_radix_w *writer;
static struct kvp_radix_match match;
/* Blocks of its family's prompt that a slot holds, from the first on: before and after the operation under
 * way; low: in host memory. */
static uint32_t before[HOLDERS], after[HOLDERS], low_before[HOLDERS], low_after[HOLDERS];
static uint64_t looks, gave_up, wrong;

static void prompt_of(uint32_t family, uint64_t *local, uint64_t *ext)
{
	for (uint32_t i = 0; i < PROMPT; i++) {
		local[i] = i < TRUNK && family < FAMILIES ? 1000 + i : (family + 1) * 1000000 + i;
		ext[i] = family * 77777 + i + 1;
	}
}

static void store(uint32_t slot, uint32_t family, uint32_t n)
{
	uint64_t local[PROMPT], ext[PROMPT];
	prompt_of(family, local, ext);
	kvp_radix_store(writer, slot, PART, KVP_RADIX_ROOT, 0, n, local, ext, NULL);
}

static void drop_from(uint32_t slot, uint32_t family, uint32_t at)
{
	uint64_t local[PROMPT], ext[PROMPT];
	prompt_of(family, local, ext);
	kvp_radix_remove(writer, slot, PROMPT - at, ext + at, NULL);
}

/* Of what slot s held, the part that is also a prefix of n blocks of family f. */
static uint32_t common_len(uint32_t s, uint32_t f, uint32_t n, uint32_t held)
{
	uint32_t most = s % FAMILIES == f || n < TRUNK ? n : TRUNK;
	return held < most ? held : most;
}

/* Where a walk ends with host memory, which it goes on with where the device's blocks end. */
static uint32_t end_of(uint32_t dev, uint32_t low)
{
	return dev > low ? dev : low;
}

static void judge_low(const char *where, uint32_t s, uint32_t f, uint32_t n, uint32_t dev)
{
	uint32_t got = dev + kvp_radix_match_ext(&match, KVP_RADIX_HOST, s), a = 0, b = 0;
	if (s < HOLDERS) {
		a = common_len(s, f, n, end_of(before[s], low_before[s]));
		b = common_len(s, f, n, end_of(after[s], low_after[s]));
	}
	uint32_t least = match.gave_up ? 0 : a < b ? a : b, most = a > b ? a : b;
	if ((got < least || got > most) && wrong++ < 5)
		printf("# %s: slot %u, family %u, %u blocks: %u with host memory, not %u to %u\n", where, s,
			f, n, got, least, most);
}

/* Judges a match of n blocks of family f. */
static void judge(const char *where, uint32_t f, uint32_t n)
{
	for (uint32_t s = 0; s < 64; s++) {
		uint32_t got = match.active[0] >> s & 1 ? match.depth[s] : 0, a = 0, b = 0;
		if (s < HOLDERS) {
			a = common_len(s, f, n, before[s]);
			b = common_len(s, f, n, after[s]);
		}
		uint32_t least = match.gave_up ? 0 : a < b ? a : b, most = a > b ? a : b;
		if ((got < least || got > most) && wrong++ < 5)
			printf("# %s: slot %u, family %u, %u blocks: %u, not %u to %u\n", where, s, f, n, got,
				least, most);
		judge_low(where, s, f, n, got);
	}
	looks++;
	gave_up += match.gave_up;
}

static void look(const char *where, uint32_t f, uint32_t n)
{
	uint64_t local[PROMPT], ext[PROMPT];
	prompt_of(f, local, ext);
	struct kvp_radix_query q = {.part_salt = PART, .local = local, .local_cnt = n, .total_blk = n};
	if (kvp_radix_find(&reader, &q, &match) != KVP_OK)
		wrong++;
	else
		judge(where, f, n);
}

/* ---- the reader is held up ---- */

static uint64_t long_local[PROMPT];
static void (*deed)(void);
static int deeds_left;

static uint32_t give_more(void *ctx, struct kvp_radix_query *q)
{
	(void)ctx;
	if (deeds_left) {
		deeds_left--;
		deed();
	}
	q->local_cnt = q->total_blk;
	return q->local_cnt;
}

static struct kvp_radix_hdr_shm *header_of_3(void)
{
	uint64_t local[PROMPT], ext[PROMPT];
	prompt_of(3, local, ext);
	uint64_t key = kvp_radix_step(reader.key_salt, kvp_radix_seed(reader.key_salt, PART), local[0]);
	uint32_t at = 0;
	while (kvp_radix_hdr(writer, at)->key != key)
		at++;
	return kvp_radix_hdr(writer, at);
}

/* Family 3 goes, and another run takes the place of its header in the table. */
static void d_reuse(void)
{
	const struct kvp_radix_hdr_shm *h = header_of_3();
	kvp_radix_clear(writer, 3);
	for (uint32_t i = 0; i < 20000 && h->key < KVP_RADIX_KEY_MIN; i++) {
		kvp_radix_clear(writer, FILLER);
		store(FILLER, 100 + i, 250);
	}
}
/* Nothing goes; the old table's memory is given back. */
static void d_table(void)
{
	uint64_t was = writer->pub->table;
	for (uint32_t i = 0; i < 3000 && writer->pub->table == was; i++)
		store(FILLER, 100 + i, 2);
	for (uint32_t i = 0; i < 1000 && writer->old.bytes; i++)
		kvp_radix_table_tend(writer, 100000);
	wrong += writer->pub->table == was || writer->old.bytes;
}
static void d_split(void)
{
	drop_from(3, 3, 150);
	store(3, 3, 200);
}
static void d_clear(void)
{
	kvp_radix_clear(writer, 3);
}
static void d_same(void)
{
	kvp_radix_clear(writer, 3);
	store(3, 3, 250);
}

static void start(void)
{
	for (uint32_t s = 0; s < 64; s++)
		kvp_radix_clear(writer, s);
	memset(before, 0, sizeof(before));
	before[3] = PROMPT;
	store(3, 3, PROMPT);
	memcpy(after, before, sizeof(after));
}

static void hold_reader(const char *what, void (*d)(void), uint32_t left)
{
	uint64_t ext[PROMPT];
	start();
	wrong = 0;
	prompt_of(3, long_local, ext);
	struct kvp_radix_query q = {.part_salt = PART,
		.local = long_local,
		.local_cnt = 64,
		.total_blk = PROMPT,
		.more = give_more};
	deed = d;
	deeds_left = 1;
	after[3] = left;
	int rc = kvp_radix_find(&reader, &q, &match);
	judge(what, 3, PROMPT);
	ok(rc == KVP_OK && !deeds_left && !wrong, "a reader held up in the middle of a run: %s", what);
	before[3] = left;
	look("afterwards", 3, PROMPT);
	ok(!wrong, "and afterwards it sees what is there");
}

/* In host memory slot 3 holds 128 blocks of its prompt and slot 7 all of it; the walk of lower tiers is held
 * up where it asks for the hashes of the second run. */
static struct kvp_radix_hdr_shm *second;

static uint32_t give_low(void *ctx, struct kvp_radix_query *q)
{
	(void)ctx;
	if (q->local_cnt >= 192 && deeds_left) {
		deeds_left--;
		deed();
	}
	return q->local_cnt += 64;
}

/* Slot 7 goes, and with it the second run; another one of slot 3 takes the place of its header. */
static void d_low_reuse(void)
{
	uint64_t local[PROMPT], ext[PROMPT];
	struct kvp_radix_stats st;
	uint32_t i = 100, at = 0;
	kvp_radix_stats(&reader, &st);
	while (kvp_radix_hdr(writer, at) != second)
		at++;
	do /* a prompt whose first block belongs there */
		prompt_of(++i, local, ext);
	while ((kvp_radix_step(reader.key_salt, kvp_radix_seed(reader.key_salt, PART), local[0]) &
		       (st.table_slots - 1)) != at);
	kvp_radix_clear(writer, 7);
	kvp_radix_store_tier(writer, 3, KVP_RADIX_HOST, PART, KVP_RADIX_ROOT, 0, 250, local, ext, NULL);
}

static void hold_low_reader(void)
{
	uint64_t local[PROMPT], ext[PROMPT], key;
	start();
	memset(before, 0, sizeof(before));
	memset(after, 0, sizeof(after));
	wrong = 0;
	kvp_radix_clear(writer, 3);
	prompt_of(3, long_local, ext);
	kvp_radix_store_tier(writer, 3, KVP_RADIX_HOST, PART, KVP_RADIX_ROOT, 0, 128, long_local, ext, NULL);
	kvp_radix_store_tier(
		writer, 7, KVP_RADIX_HOST, PART, KVP_RADIX_ROOT, 0, PROMPT, long_local, ext, NULL);
	memcpy(local, long_local, sizeof(local));
	for (uint32_t i = 0; i < PROMPT; i++)
		ext[i] += 7000000;
	local[128] = 17; /* a branch, so that the run ends there */
	kvp_radix_store_tier(writer, 3, KVP_RADIX_HOST, PART, KVP_RADIX_ROOT, 0, 129, local, ext, NULL);
	low_before[3] = low_after[3] = 128;
	low_before[7] = PROMPT;
	key = kvp_radix_seed(reader.key_salt, PART);
	for (uint32_t i = 0; i <= 128; i++)
		key = kvp_radix_step(reader.key_salt, key, long_local[i]);
	for (uint32_t at = 0; (second = kvp_radix_hdr(writer, at))->key != key; at++)
		;
	struct kvp_radix_query q = {.part_salt = PART,
		.local = long_local,
		.local_cnt = 64,
		.total_blk = PROMPT,
		.more = give_low};
	deed = d_low_reuse;
	deeds_left = 1;
	int rc = kvp_radix_find(&reader, &q, &match);
	judge("second run of host memory", 3, PROMPT);
	ok(rc == KVP_OK && !deeds_left && !wrong && second->key >= KVP_RADIX_KEY_MIN,
		"a reader held up in lower tiers: its run's header goes to another run");
	memset(low_before, 0, sizeof(low_before));
	memset(low_after, 0, sizeof(low_after));
}

/* ---- garbage in a header, as a wild store would leave it ---- */

static void garbage(void)
{
	start();
	wrong = 0;
	struct kvp_radix_hdr_shm *h = header_of_3(), keep = *h;
	h->base = UINT32_MAX - PROMPT;
	look("base", 3, 100); /* ends inside the run, so the column is looked at */
	ok(match.gave_up && match.longest == 0, "a place outside the key column is not looked at");
	h->base = keep.base;
	h->len = KVP_RADIX_RUN_BLK_MAX + 1;
	look("length", 3, 100);
	ok(match.gave_up && match.longest == 0, "nor a run longer than runs can be");
	h->len = keep.len;
	h->cut_ref = UINT32_MAX - 8;
	h->cut_n = 1u << 16 | 4;
	look("cutoffs", 3, 100);
	ok(match.gave_up && match.longest == 0, "nor a cutoff list outside its arena");
	h->cut_ref = keep.cut_ref;
	h->cut_n = keep.cut_n;
	uint64_t local[PROMPT], ext[PROMPT];
	prompt_of(3, local, ext);
	low_before[3] = low_after[3] = 10;
	kvp_radix_store_tier(writer, 3, KVP_RADIX_HOST, PART, KVP_RADIX_ROOT, 0, 10, local, ext, NULL);
	h = header_of_3();
	keep = *h;
	h->low_ref = UINT32_MAX - KVP_RADIX_CUT_GRAN + 1;
	look("intervals", 3, 100);
	ok(match.gave_up && match.depth[3] == 100, "nor intervals outside theirs; the device's blocks count");
	h->low_ref = keep.low_ref;
	look("again", 3, 100);
	ok(!wrong && match.longest == 100, "with the header as it was the walk goes on");
}

/* ---- the writer is held up ---- */

static int busy;
static uint64_t state;

static void weave(const char *place)
{
	if (busy)
		return;
	busy = 1;
	for (uint32_t f = 0; f < FAMILIES; f++)
		look(place, f, f % 2 ? PROMPT : 100);
	busy = 0;
}

static uint32_t next(uint32_t below)
{
	state = state * 6364136223846793005ULL + 1442695040888963407ULL;
	return (uint32_t)(state >> 33) % below;
}

static void clear_one(uint32_t slot)
{
	after[slot] = low_after[slot] = 0;
	kvp_radix_clear(writer, slot);
	before[slot] = low_before[slot] = 0;
}

static void change_low(void)
{
	uint32_t slot = next(HOLDERS), n = 1 + next(PROMPT);
	uint64_t local[PROMPT], ext[PROMPT];
	prompt_of(slot % FAMILIES, local, ext);
	if (next(2)) {
		low_after[slot] = n > low_before[slot] ? n : low_before[slot];
		kvp_radix_store_tier(
			writer, slot, KVP_RADIX_HOST, PART, KVP_RADIX_ROOT, 0, n, local, ext, NULL);
	} else {
		low_after[slot] = n < low_before[slot] ? n : low_before[slot];
		kvp_radix_remove_tier(writer, slot, KVP_RADIX_HOST, PROMPT - n, ext + n, NULL);
	}
	low_before[slot] = low_after[slot];
}

static void change(void)
{
	uint32_t slot = next(HOLDERS), n = 1 + next(PROMPT);
	switch (next(5)) {
	case 0:
		clear_one(slot);
		break;
	case 1:
		after[slot] = n < before[slot] ? n : before[slot];
		drop_from(slot, slot % FAMILIES, n);
		break;
	default:
		after[slot] = n > before[slot] ? n : before[slot];
		store(slot, slot % FAMILIES, n);
	}
	before[slot] = after[slot];
	if (next(30) == 0) /* runs of another shape from now on */
		for (uint32_t i = 0; i < HOLDERS; i++)
			clear_one(i);
}

enum tiers { DEVICE_ONLY, WITH_HOST };

static void hold_writer(enum tiers tiers)
{
	start();
	wrong = looks = gave_up = 0;
	kvp_point_hook = weave;
	for (int i = 0; i < 3000; i++)
		if (tiers == WITH_HOST && next(2))
			change_low();
		else
			change();
	kvp_point_hook = NULL;
	printf("# %" PRIu64 " looks, %" PRIu64 " given up\n", looks, gave_up);
	is_u64(wrong, 0, "a writer held up at any place: readers see what was before or what will be");
	ok(looks > 10000 && gave_up < looks / 2, "and most walks come to an end");
	wrong = 0;
	for (uint32_t f = 0; f < FAMILIES; f++)
		look("at the end", f, PROMPT);
	is_u64(wrong, 0, "at the end the tree is what it should be");
}

int main(void)
{
	state = tap_seed(0);
	ok(seg_new(&seg, &geom) == 0 && kvp_radix_join(seg.pub, &geom, &reader) == KVP_OK &&
			kvp_radix_w_open(seg.pub, seg.priv, &geom, KVP_RADIX_RESET, NULL, &writer, NULL) ==
				KVP_OK,
		"a tree");
	kvp_radix_w_set_ready(writer, 1);
	hold_reader("its header goes to another run", d_reuse, 0);
	hold_reader("the table is replaced", d_table, PROMPT);
	hold_reader("the run is cut and extended", d_split, 200);
	hold_reader("the run goes", d_clear, 0);
	hold_reader("the run comes anew, shorter", d_same, 250);
	hold_low_reader();
	garbage();
	hold_writer(DEVICE_ONLY);
	hold_writer(WITH_HOST);
	ok(kvp_radix_check(&reader) == 0 && kvp_radix_w_check(writer) == 0, "the tree is sound");
	kvp_radix_w_close(writer);
	seg_free(&seg);
	return done();
}
