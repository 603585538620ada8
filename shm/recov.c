/* shm/recov.c — the state word of the recovery and its figures. */
#include "shm/recov.h"

#include <stdio.h>
#include <string.h>

#define KVP_RECOV_MAGIC 0x6b76702d72636f76ull
#define KVP_RECOV_LAYOUT 1

struct kvp_recov_shm {
	struct kvp_objhdr hdr;
	uint32_t state, pad;
	uint64_t begun_ns, ended_ns, attempts, blocks;
};

static uint32_t recov_layout_hash(void)
{
	static const size_t word[] = {sizeof(struct kvp_recov_shm), offsetof(struct kvp_recov_shm, begun_ns),
		offsetof(struct kvp_recov_shm, blocks)};
	return kvp_obj_hash(word, sizeof(word) / sizeof(word[0]));
}

uint64_t kvp_recov_align(void)
{
	return KVP_PAGE;
}

uint64_t kvp_recov_footprint(const struct kvp_geom *g)
{
	return g ? KVP_PAGE : 0;
}

int kvp_recov_new(void *mem, const struct kvp_geom *g)
{
	struct kvp_recov_shm *shm = mem;
	if (!mem || ((uintptr_t)mem & (KVP_CACHE_LINE - 1)) || !g)
		return KVP_ERR_INVAL;
	kvp_obj_begin(&shm->hdr, KVP_RECOV_LAYOUT, recov_layout_hash(), KVP_PAGE, g->region_gen);
	kvp_obj_ready(&shm->hdr, KVP_RECOV_MAGIC); /* zeros are KVP_RECOV_NONE */
	return KVP_OK;
}

int kvp_recov_join(void *mem, const struct kvp_geom *g, struct kvp_recov *out)
{
	if (!g || !out)
		return KVP_ERR_INVAL;
	int rc = kvp_obj_join(mem, KVP_RECOV_MAGIC, KVP_RECOV_LAYOUT, recov_layout_hash());
	if (rc)
		return rc;
	struct kvp_recov_shm *shm = mem;
	if (shm->hdr.footprint != KVP_PAGE || shm->hdr.region_gen != g->region_gen)
		return KVP_ERR_LAYOUT;
	out->shm = shm;
	return KVP_OK;
}

void kvp_recov_leave(struct kvp_recov *r)
{
	memset(r, 0, sizeof(*r));
}

int kvp_recov_delete(void *mem)
{
	if (!mem)
		return KVP_ERR_INVAL;
	kvp_obj_delete(mem);
	return KVP_OK;
}

static int is_end(uint32_t state)
{
	return state == KVP_RECOV_RECOVERED || state == KVP_RECOV_EMPTY || state == KVP_RECOV_EXHAUSTED;
}

uint64_t kvp_recov_check(const struct kvp_recov *r)
{
	struct kvp_recov_info i;
	uint64_t faults = 0;
	if (kvp_ld_acq_u32(&r->shm->state) >= KVP_RECOV_STATE_CNT) {
		fprintf(stderr, "recov: state %u\n", kvp_ld_acq_u32(&r->shm->state));
		return 1;
	}
	kvp_recov_get(r, &i);
	int is_begun = i.state != KVP_RECOV_NONE, is_ended = is_end((uint32_t)i.state);
	faults += is_begun != (i.begun_ns != 0);
	faults += is_ended && i.ended_ns < i.begun_ns;
	if (faults)
		fprintf(stderr, "recov: %s begun %llu ended %llu\n", kvp_recov_name(i.state),
			(unsigned long long)i.begun_ns, (unsigned long long)i.ended_ns);
	return faults;
}

void kvp_recov_begin(struct kvp_recov *r, uint64_t now_ns)
{
	kvp_st_rlx_u64(&r->shm->begun_ns, now_ns);
	kvp_st_rel_u32(&r->shm->state, KVP_RECOV_RUNNING); /* pairs with: kvp_recov_state */
}

int kvp_recov_refill(struct kvp_recov *r, uint64_t now_ns)
{
	if (!is_end(kvp_ld_rlx_u32(&r->shm->state)))
		return 0;
	kvp_st_rlx_u64(&r->shm->begun_ns, now_ns);
	kvp_st_rlx_u64(&r->shm->ended_ns, 0);
	kvp_st_rlx_u64(&r->shm->attempts, 0);
	kvp_st_rlx_u64(&r->shm->blocks, 0);
	kvp_st_rel_u32(&r->shm->state, KVP_RECOV_REFILLING); /* pairs with: kvp_recov_state */
	return 1;
}

void kvp_recov_tell(struct kvp_recov *r, uint64_t attempts, uint64_t blocks)
{
	kvp_st_rlx_u64(&r->shm->attempts, kvp_ld_rlx_u64(&r->shm->attempts) + attempts);
	kvp_st_rlx_u64(&r->shm->blocks, kvp_ld_rlx_u64(&r->shm->blocks) + blocks);
}

int kvp_recov_end(struct kvp_recov *r, enum kvp_recov_state state, uint64_t now_ns)
{
	if (!is_end((uint32_t)state) || !kvp_recov_is_active(r))
		return 0;
	kvp_st_rlx_u64(&r->shm->ended_ns, now_ns);
	kvp_st_rel_u32(&r->shm->state, (uint32_t)state); /* pairs with: kvp_recov_state */
	return 1;
}

enum kvp_recov_state kvp_recov_state(const struct kvp_recov *r)
{
	uint32_t s = kvp_ld_acq_u32(&r->shm->state); /* pairs with: kvp_recov_begin, kvp_recov_end */
	return s < KVP_RECOV_STATE_CNT ? (enum kvp_recov_state)s : KVP_RECOV_NONE;
}

int kvp_recov_is_shut(const struct kvp_recov *r)
{
	return kvp_recov_state(r) == KVP_RECOV_RUNNING;
}

int kvp_recov_is_active(const struct kvp_recov *r)
{
	enum kvp_recov_state s = kvp_recov_state(r);
	return s == KVP_RECOV_RUNNING || s == KVP_RECOV_REFILLING;
}

void kvp_recov_get(const struct kvp_recov *r, struct kvp_recov_info *out)
{
	out->state = kvp_recov_state(r);
	out->begun_ns = kvp_ld_rlx_u64(&r->shm->begun_ns);
	out->ended_ns = kvp_ld_rlx_u64(&r->shm->ended_ns);
	out->attempts = kvp_ld_rlx_u64(&r->shm->attempts);
	out->blocks = kvp_ld_rlx_u64(&r->shm->blocks);
}

const char *kvp_recov_name(enum kvp_recov_state s)
{
	static const char *const name[KVP_RECOV_STATE_CNT] = {
		"none", "running", "recovered", "empty_bootstrap", "exhausted", "refilling"};
	return s >= 0 && s < KVP_RECOV_STATE_CNT ? name[s] : "unknown";
}
