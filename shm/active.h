/* shm/active.h — how many live prompt blocks each rank holds, shared prefixes counted once.
 *
 * Shape      Runs. Prompts are cut into groups of KVP_ACTIVE_RUN blocks; an entry stands for
 *            1..KVP_ACTIVE_RUN consecutive blocks of one group, all held by the same number of bookings with
 *            the same weight. One open-addressing table of 16-byte gates {tag of the first block's key 40 bit
 *            | slot 8 | nonce 16, count 20 | length 3 | weight 41, fixed point} in lines of four, each line
 *            followed by the sequence hashes of its entries. key = secret mix of (rank slot, count epoch,
 *            first hash). An entry lies at most KVP_ACTIVE_REACH lines from its home; a shared high-water
 *            mark bounds the walk. A booking that leaves an entry's path, or ends within it, splits it there.
 * Truth      A cache of the key arrays of the reservations; weights other than 1 exist only here.
 * Writers    Bookers, each entry by 16-byte CAS of its gate. The weights of all entries of a rank are its
 *            blocks: whoever inserts, shortens or deletes one accounts for the difference.
 * Readers    kvp_active_depth; lock-free.
 * Ordering   CAS is a full barrier. Insertion: take the gate with count 0, write the hashes, set the count;
 *            the nonce tells a reader that the entry changed hands while it compared. Split: further entries
 *            take the references to the rest first, then one CAS shortens the entry; it fails if the entry
 *            changed, and the others are given back. Two processes inserting one key at once: both look again
 *            after their insertion, and the references of the higher entry are moved to the lower one.
 * Lifetime   An entry as long as a live booking of the rank holds its blocks.
 * Crash      References cannot be undone one by one: the sweep gives the rank a new count epoch, counts its
 *            live reservations again and deletes the entries of the old epochs (kvp_book_sweep_owner). A gate
 *            whose hashes were being written is named by its performer, which alone, or the sweep, empties
 *            it; hashes of a split are kept in a chunk of the performer's reservation, so the sweep finds
 *            them.
 * Proved by  tests/m_book.c, tests/r_book.c, tests/t_book_crash.c, tests/torture/x_book.c.
 */
#ifndef KVP_SHM_ACTIVE_H
#define KVP_SHM_ACTIVE_H

#include "shm/load.h"

#define KVP_ACTIVE_REACH 16 /* lines of four entries */
#define KVP_ACTIVE_RUN 8    /* blocks of a group, and of an entry at most */

/* kvp_active_depth returns the length of the longest leading run of seq whose blocks are live on a rank.
 *
 * seq     n sequence hashes, raw 64-bit patterns, root first, none twice; n may be 0.
 * return  0..n; 0 for a slot out of range, a closed rank or another generation. Found by galloping and
 *         bisection: live prompts are prefix-closed on a rank. Bookings under way may be seen or not.
 * blocks  no; about 2 log2(depth / KVP_ACTIVE_RUN) + 2 look-ups. who any reader. order: relaxed, no shared
 *         write.
 */
uint32_t kvp_active_depth(const struct kvp_book *b, uint32_t rank_slot, uint32_t rank_gen,
	const uint64_t *seq, uint32_t n);

/* kvp_active_prefetch asks for the memory that kvp_active_depth looks at first. first: seq[0]; any reader. */
void kvp_active_prefetch(const struct kvp_book *b, uint32_t rank_slot, uint64_t first);

#endif
