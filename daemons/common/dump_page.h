/* daemons/common/dump_page.h — a piece of what one rank holds, as the indexer hands it out on KVP_CMD_DUMP.
 *
 * Shape      command: arg[0] number of the tour (0: begin one), arg[1] index slot << 32 | its generation,
 *            arg[2] enum kvp_radix_tour_part, arg[3] for the lower tiers: number of the rank's tour of the
 *            device. Reply: struct kvp_dump_page, then event_cnt events; an event is
 *            struct kvp_dump_event, n local and n external hashes.
 * Status     KVP_OK the tour came to its end with this page; KVP_ERR_AGAIN there is more, page.tour is the
 *            number to go on with; KVP_ERR_NOTFOUND void number: begin anew, what was told may be told again;
 *            KVP_ERR_FENCED the index slot is another rank's by now, nothing to tell; KVP_ERR_INVAL.
 * Writers    the indexer. Readers: daemons/common/dump.c, which checks every length.
 * Crash      the indexer dies: its tours are void, so a command that is repeated to its successor answers
 *            KVP_ERR_NOTFOUND or begins anew.
 * Proved by  tests/t_dump.c, tests/s_dump.t
 */
#ifndef KVP_DAEMONS_DUMP_PAGE_H
#define KVP_DAEMONS_DUMP_PAGE_H

#include "shm/cmdring.h"
#include "shm/radix.h"

struct kvp_dump_page {
	uint64_t tour;
	uint32_t event_cnt, bytes; /* bytes of all events */
};
struct kvp_dump_event {
	uint64_t parent; /* external hash; 0 with KVP_RADIX_ROOT */
	uint32_t n;	 /* blocks, not 0 */
	uint16_t how, tier;
};
#define KVP_DUMP_EVENT_BYTES(n) (sizeof(struct kvp_dump_event) + 16ull * (n))
#endif
