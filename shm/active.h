/* shm/active.h — how many live prompt blocks each rank holds, shared prefixes counted once.
 *
 * Shape      One open-addressing table of 16-byte entries {key, count 22 bit | weight 41 bit fixed point |
 *            tentative 1 bit}, in lines of four. key = secret mix of (rank slot, count epoch, sequence
 *            hash). An entry lies at most KVP_ACTIVE_REACH lines from its home; a shared high-water mark
 *            bounds the walk.
 * Truth      A cache of the key arrays of the reservations; weights other than 1 exist only here.
 * Writers    Bookers, each entry by 16-byte CAS: the first reference adds its weight (1.0) to the rank, the
 *            last release subtracts the entry's current weight.
 * Readers    kvp_active_depth; lock-free.
 * Ordering   CAS is a full barrier. Two processes inserting one key at once: both mark their entry tentative,
 *            then search again; the lower position stays and takes over the count of the other.
 * Lifetime   An entry as long as a live booking of the rank holds its block.
 * Crash      References cannot be undone one by one: the sweep gives the rank a new count epoch, counts its
 *            live reservations again and deletes the entries of the old epochs (kvp_book_sweep_owner).
 * Proved by  tests/m_book.c, tests/t_book_crash.c, tests/torture/x_book.c.
 */
#ifndef KVP_SHM_ACTIVE_H
#define KVP_SHM_ACTIVE_H

#include "shm/load.h"

#define KVP_ACTIVE_REACH 16 /* lines of four entries */

/* kvp_active_depth returns the length of the longest leading run of seq whose blocks are live on a rank.
 *
 * seq     n sequence hashes, raw 64-bit patterns, root first; n may be 0.
 * return  0..n; 0 for a slot out of range, a closed rank or another generation. Found by galloping and
 *         bisection: live prompts are prefix-closed on a rank. Bookings under way may be seen or not.
 * blocks  no; about 2 log2(depth) + 1 look-ups. who any reader. order: relaxed, no shared write.
 */
uint32_t kvp_active_depth(const struct kvp_book *b, uint32_t rank_slot, uint32_t rank_gen,
	const uint64_t *seq, uint32_t n);

#endif
