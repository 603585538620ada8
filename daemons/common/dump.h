/* daemons/common/dump.h — the index of a node as the text that `GET /dump` answers, made piece by piece.
 *
 * Shape      struct kvp_dump asks the indexer for one page after the other (daemons/common/dump_page.h), one
 *            ahead, and makes JSON of it: partition by partition, in each the device blocks of rank after
 *            rank, then those of lower tiers. It holds two pages and some 64 KiB of text, whatever the size
 *            of the index. No snapshot exists anywhere: a reader that stalls costs its own buffers only.
 * Content    every block that a schedulable rank of the role held, together with all blocks before it, from
 *            the beginning to the end of the dump; of what came or went meanwhile some (shm/radix.h, tours).
 *            Whoever received the engines' events since before the dump began, and applies them after it,
 *            ends with what the node has. A block may be told twice. A parent comes before its children.
 * Crash      indexer killed: the rank at hand is told anew by its successor. Owner killed: its command cell
 *            is freed by the sweep; the tour that it left is given up by the indexer after a minute.
 * Who        one thread of a process that has a slot (httpd, peer).
 * Proved by  tests/t_dump.c, tests/s_dump.t
 */
#ifndef KVP_DAEMONS_DUMP_H
#define KVP_DAEMONS_DUMP_H

#include <stddef.h>
#include <stdint.h>

#include "shm/region.h"

#define KVP_DUMP_WAIT_NS (10ull * 1000000000ull) /* for a page of the indexer */
#define KVP_DUMP_AGAIN_MAX 8			 /* times that one rank is told anew */

struct kvp_dump;

/* kvp_dump_open begins a dump of the partitions of a role. NULL without memory. region and ctr must outlive
 * it. kvp_dump_close: at any time, NULL is allowed. */
struct kvp_dump *kvp_dump_open(
	struct kvp_region *region, kvp_owner owner, struct kvp_ctr_column_shm *ctr, enum kvp_part_role role);
void kvp_dump_close(struct kvp_dump *d);

/* kvp_dump_next gives the next bytes of the text, valid until the next call. now_ns: CLOCK_MONOTONIC.
 * return  KVP_OK *len > 0 bytes; KVP_ERR_AGAIN the indexer has not answered yet, it wakes the owner's slot
 *         when it does; KVP_ERR_NOTFOUND the text is complete. Failures, after which only close is left:
 *         KVP_ERR_TIMEOUT the indexer did not answer for KVP_DUMP_WAIT_NS; KVP_ERR_CLOSED a rank had to be
 *         told anew too often; KVP_ERR_PROTO a page that cannot be; KVP_ERR_SYS no memory.
 * blocks  no. */
int kvp_dump_next(struct kvp_dump *d, uint64_t now_ns, const char **data, size_t *len);
#endif
