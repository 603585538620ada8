/* kvpick/atomic.h — every access to a word that another process or thread may touch.
 *
 * Shape      plain uint32_t/uint64_t words, naturally aligned; kvp_u128 pairs 16-byte aligned.
 * Ordering   in the name: _rlx relaxed, _acq acquire load, _rel release store, _ar acquire-release
 *            read-modify-write, _sc sequentially consistent. An acquire load pairs with the release store or
 *            read-modify-write whose value it reads.
 * Back ends  Concurrency Kit (default); compiler atomics under KVP_ATOMIC_C11, because ThreadSanitizer sees
 *            neither ck_pr operations nor free-standing fences. Its 16-byte operations hold a lock of the
 *            process, so in that build pairs are atomic among threads only, not between processes.
 * Crash      one access is one instruction or one lock-free loop: a kill leaves the old or the new value.
 */
#ifndef KVPICK_ATOMIC_H
#define KVPICK_ATOMIC_H

#include <stdbool.h>
#include <stdint.h>

/* A 16-byte word pair, changed only by kvp_cas_u128. */
struct kvp_u128 {
	uint64_t lo, hi;
} __attribute__((aligned(16)));

#ifdef KVP_ATOMIC_C11
#define KVP_LD(n, b, t)                                                                                      \
	static inline t kvp_ld_rlx_##n(const t *p)                                                           \
	{                                                                                                    \
		return __atomic_load_n(p, __ATOMIC_RELAXED);                                                 \
	}                                                                                                    \
	static inline t kvp_ld_acq_##n(const t *p)                                                           \
	{                                                                                                    \
		return __atomic_load_n(p, __ATOMIC_ACQUIRE);                                                 \
	}                                                                                                    \
	static inline t kvp_ld_sc_##n(const t *p)                                                            \
	{                                                                                                    \
		return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                 \
	}
#define KVP_ST(n, b, t)                                                                                      \
	static inline void kvp_st_rlx_##n(t *p, t v)                                                         \
	{                                                                                                    \
		__atomic_store_n(p, v, __ATOMIC_RELAXED);                                                    \
	}                                                                                                    \
	static inline void kvp_st_rel_##n(t *p, t v)                                                         \
	{                                                                                                    \
		__atomic_store_n(p, v, __ATOMIC_RELEASE);                                                    \
	}                                                                                                    \
	static inline void kvp_st_sc_##n(t *p, t v)                                                          \
	{                                                                                                    \
		__atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                                    \
	}
#define KVP_RMW(n, b, t)                                                                                     \
	static inline t kvp_faa_rlx_##n(t *p, t v)                                                           \
	{                                                                                                    \
		return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);                                           \
	}                                                                                                    \
	static inline t kvp_faa_ar_##n(t *p, t v)                                                            \
	{                                                                                                    \
		return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL);                                           \
	}                                                                                                    \
	static inline t kvp_xchg_ar_##n(t *p, t v)                                                           \
	{                                                                                                    \
		return __atomic_exchange_n(p, v, __ATOMIC_ACQ_REL);                                          \
	}                                                                                                    \
	static inline t kvp_xchg_sc_##n(t *p, t v)                                                           \
	{                                                                                                    \
		return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);                                          \
	}                                                                                                    \
	static inline bool kvp_cas_ar_##n(t *p, t want, t v)                                                 \
	{                                                                                                    \
		return __atomic_compare_exchange_n(p, &want, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);  \
	}
/* ThreadSanitizer does not model fences and gcc refuses them. Under it a fence is the machine's instruction
 * only: the ordering is there, but the tool learns nothing of it. That cannot hide a race - a fence would
 * only have added happens-before edges -, it makes a stricter rule: what a fence orders must be words of this
 * header on both sides, because plain accesses beside it are then reported. */
#ifdef __SANITIZE_THREAD__
#if defined(__x86_64__)
#define KVP_FENCE(c11, x86, arm) __asm__ __volatile__(x86 ::: "memory")
#elif defined(__aarch64__)
#define KVP_FENCE(c11, x86, arm) __asm__ __volatile__(arm ::: "memory")
#else
#error "no fence instruction known for this machine"
#endif
#else
#define KVP_FENCE(c11, x86, arm) __atomic_thread_fence(c11)
#endif
static inline void kvp_fence_acq(void)
{
	KVP_FENCE(__ATOMIC_ACQUIRE, "", "dmb ishld");
}
static inline void kvp_fence_rel(void)
{
	KVP_FENCE(__ATOMIC_RELEASE, "", "dmb ish");
}
static inline void kvp_fence_sc(void)
{
	KVP_FENCE(__ATOMIC_SEQ_CST, "mfence", "dmb ish");
}
#undef KVP_FENCE
static inline void kvp_pause(void)
{
	__asm__ __volatile__("" ::: "memory");
}
/* kvp_cas_u128 replaces *p by v if it equals *want; otherwise loads *p into *want. Full barrier. */
static inline bool kvp_cas_u128(struct kvp_u128 *p, struct kvp_u128 *want, struct kvp_u128 v)
{
	unsigned __int128 w = ((unsigned __int128)want->hi << 64) | want->lo;
	unsigned __int128 n = ((unsigned __int128)v.hi << 64) | v.lo;
	unsigned __int128 *q = (unsigned __int128 *)(void *)p;
	if (__atomic_compare_exchange_n(q, &w, n, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
		return true;
	want->lo = (uint64_t)w;
	want->hi = (uint64_t)(w >> 64);
	return false;
}
#else
#include <ck_pr.h>
/* A locked read-modify-write is a full barrier on x86-64; mfences round it cost 20-30 ns each. */
#ifdef __x86_64__
#define KVP_RMW_FENCE() ck_pr_barrier()
#else
#define KVP_RMW_FENCE() ck_pr_fence_memory()
#endif
#define KVP_LD(n, b, t)                                                                                      \
	static inline t kvp_ld_rlx_##n(const t *p)                                                           \
	{                                                                                                    \
		return ck_pr_load_##b(p);                                                                    \
	}                                                                                                    \
	static inline t kvp_ld_acq_##n(const t *p)                                                           \
	{                                                                                                    \
		t v = ck_pr_load_##b(p);                                                                     \
		ck_pr_fence_acquire();                                                                       \
		return v;                                                                                    \
	}                                                                                                    \
	static inline t kvp_ld_sc_##n(const t *p)                                                            \
	{                                                                                                    \
		ck_pr_fence_memory();                                                                        \
		t v = ck_pr_load_##b(p);                                                                     \
		ck_pr_fence_acquire();                                                                       \
		return v;                                                                                    \
	}
#define KVP_ST(n, b, t)                                                                                      \
	static inline void kvp_st_rlx_##n(t *p, t v)                                                         \
	{                                                                                                    \
		ck_pr_store_##b(p, v);                                                                       \
	}                                                                                                    \
	static inline void kvp_st_rel_##n(t *p, t v)                                                         \
	{                                                                                                    \
		ck_pr_fence_release();                                                                       \
		ck_pr_store_##b(p, v);                                                                       \
	}                                                                                                    \
	static inline void kvp_st_sc_##n(t *p, t v)                                                          \
	{                                                                                                    \
		ck_pr_fence_release();                                                                       \
		ck_pr_store_##b(p, v);                                                                       \
		ck_pr_fence_memory();                                                                        \
	}
#define KVP_RMW(n, b, t)                                                                                     \
	static inline t kvp_faa_rlx_##n(t *p, t v)                                                           \
	{                                                                                                    \
		return ck_pr_faa_##b(p, v);                                                                  \
	}                                                                                                    \
	static inline t kvp_faa_ar_##n(t *p, t v)                                                            \
	{                                                                                                    \
		ck_pr_fence_release();                                                                       \
		t o = ck_pr_faa_##b(p, v);                                                                   \
		ck_pr_fence_acquire();                                                                       \
		return o;                                                                                    \
	}                                                                                                    \
	static inline t kvp_xchg_ar_##n(t *p, t v)                                                           \
	{                                                                                                    \
		ck_pr_fence_release();                                                                       \
		t o = ck_pr_fas_##b(p, v);                                                                   \
		ck_pr_fence_acquire();                                                                       \
		return o;                                                                                    \
	}                                                                                                    \
	static inline t kvp_xchg_sc_##n(t *p, t v)                                                           \
	{                                                                                                    \
		KVP_RMW_FENCE();                                                                             \
		t o = ck_pr_fas_##b(p, v);                                                                   \
		KVP_RMW_FENCE();                                                                             \
		return o;                                                                                    \
	}                                                                                                    \
	static inline bool kvp_cas_ar_##n(t *p, t want, t v)                                                 \
	{                                                                                                    \
		KVP_RMW_FENCE();                                                                             \
		bool done_ = ck_pr_cas_##b(p, want, v);                                                      \
		KVP_RMW_FENCE();                                                                             \
		return done_;                                                                                \
	}
static inline void kvp_fence_acq(void)
{
	ck_pr_fence_acquire();
}
static inline void kvp_fence_rel(void)
{
	ck_pr_fence_release();
}
static inline void kvp_fence_sc(void)
{
	ck_pr_fence_memory(); /* a real one: no locked operation stands beside it */
}
static inline void kvp_pause(void)
{
	ck_pr_stall();
}
/* kvp_cas_u128 replaces *p by v if it equals *want; otherwise loads *p into *want. Full barrier. */
static inline bool kvp_cas_u128(struct kvp_u128 *p, struct kvp_u128 *want, struct kvp_u128 v)
{
	uint64_t w[2] = {want->lo, want->hi}, n[2] = {v.lo, v.hi}, old[2];
	KVP_RMW_FENCE();
	bool done_ = ck_pr_cas_64_2_value((uint64_t *)(void *)p, w, n, old);
	KVP_RMW_FENCE();
	if (!done_) {
		want->lo = old[0];
		want->hi = old[1];
	}
	return done_;
}
#endif

KVP_LD(u32, 32, uint32_t)
KVP_LD(u64, 64, uint64_t)
KVP_ST(u32, 32, uint32_t)
KVP_ST(u64, 64, uint64_t)
KVP_RMW(u32, 32, uint32_t)
KVP_RMW(u64, 64, uint64_t)
#undef KVP_LD
#undef KVP_ST
#undef KVP_RMW

/* kvp_add_sw_u64 adds to a counter that only the caller writes: a load and a store, no locked instruction. */
static inline void kvp_add_sw_u64(uint64_t *p, uint64_t v)
{
	kvp_st_rlx_u64(p, kvp_ld_rlx_u64(p) + v);
}

/* kvp_ld_u128 reads a pair as lo, hi, lo until lo is stable (at most 8 tries): the caller's CAS decides
 * whether the two halves belonged together. */
static inline struct kvp_u128 kvp_ld_u128(const struct kvp_u128 *p)
{
	struct kvp_u128 v = {0, 0};
	for (int i = 0; i < 8; i++) {
		v.lo = kvp_ld_acq_u64(&p->lo);
		v.hi = kvp_ld_acq_u64(&p->hi);
		if (kvp_ld_rlx_u64(&p->lo) == v.lo)
			break;
	}
	return v;
}

/* kvp_copy_in fills shared words from n bytes, kvp_copy_out reads n bytes from shared words, word by word and
 * relaxed: for a buffer that its writer may begin anew while readers copy it and validate a version
 * afterwards. to/from are n bytes rounded up to whole words; the bytes of the last word past n become 0. */
static inline void kvp_copy_in(uint64_t *to, const void *from, uint64_t n)
{
	for (uint64_t i = 0; i < n; i += 8) {
		uint64_t w = 0;
		__builtin_memcpy(&w, (const char *)from + i, n - i < 8 ? n - i : 8);
		kvp_st_rlx_u64(&to[i / 8], w);
	}
}
static inline void kvp_copy_out(void *to, const uint64_t *from, uint64_t n)
{
	for (uint64_t i = 0; i < n; i += 8) {
		uint64_t w = kvp_ld_rlx_u64(&from[i / 8]);
		__builtin_memcpy((char *)to + i, &w, n - i < 8 ? n - i : 8);
	}
}
#endif
