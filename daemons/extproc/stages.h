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

/* kvp_stage_add adds the time since from, less part of it that belongs to other stages. */
static inline void kvp_stage_add(
	struct kvp_ctr_column_shm *c, enum kvp_ctr stage, uint64_t from, uint64_t others_ns)
{
	uint64_t took = from ? kvp_clock_ns(CLOCK_THREAD_CPUTIME_ID) - from : 0;
	if (took > others_ns)
		kvp_ctr_add(c, stage, took - others_ns);
}
#endif
