/* daemons/extproc/stages.h — where the processor time of a stream goes: every KVP_STAGE_EVERYth is measured.
 *
 * Shape      sums of nanoseconds of this thread's processor time, as counters of the node
 *            (extproc.timed.*). What a stream takes beyond them is transport: gRPC, sockets, messages.
 * Cost       two clock calls a stage of a measured stream, nothing for the others.
 */
#ifndef KVP_EXTPROC_STAGES_H
#define KVP_EXTPROC_STAGES_H

#include "shm/counter.h"
#include <kvpick/clock.h>

#define KVP_STAGE_EVERY 16u

/* kvp_stage_now: the thread's processor time; 0 when the stream is not measured. */
static inline uint64_t kvp_stage_now(int is_timed)
{
	return is_timed ? kvp_clock_ns(CLOCK_THREAD_CPUTIME_ID) : 0;
}

/* kvp_stage_clock_ns: what one clock call takes; it is no vDSO call, so it would show in the short stages. */
static inline uint64_t kvp_stage_clock_ns(void)
{
	static uint64_t least;
	for (int i = 0; i < 64 && (!least || i); i++) {
		uint64_t from = kvp_stage_now(1), took = kvp_stage_now(1) - from;
		least = !least || took < least ? took : least;
	}
	return least;
}

/* kvp_stage_sum adds ns that cnt spans took. */
static inline void kvp_stage_sum(struct kvp_ctr_column_shm *c, enum kvp_ctr stage, uint64_t ns, uint64_t cnt)
{
	uint64_t clocks = cnt * kvp_stage_clock_ns();
	if (ns > clocks)
		kvp_ctr_add(c, stage, ns - clocks);
}

/* kvp_stage_add adds the time since from, unless from is 0. */
static inline void kvp_stage_add(struct kvp_ctr_column_shm *c, enum kvp_ctr stage, uint64_t from)
{
	if (from)
		kvp_stage_sum(c, stage, kvp_stage_now(1) - from, 1);
}
#endif
