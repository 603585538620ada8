/* bench/load/product.h — the product's selection in this process as the chooser of a simulated run.
 *
 * Shape      a private node (kvp_selection_open_local) with one worker an engine. It hears every block that
 *            enters or leaves a cache at once; bookings are made, told of the first token, and freed.
 * Truth      the private node. Writers, readers: the owning thread. Ordering: none. Crash: process-local.
 * Lifetime   from kvp_product_open to kvp_product_close.
 * Proved by  tests/t_load_trace.c
 */
#ifndef KVP_BENCH_LOAD_PRODUCT_H
#define KVP_BENCH_LOAD_PRODUCT_H

#include "bench/load/simulate.h"
#include <kvpick/selection.h>

struct kvp_product {
	struct kvp_selection *selection;
	struct kvp_chooser chooser; /* for kvp_simulate_cfg */
	enum kvp_part_role role;
	uint64_t failed_cnt; /* calls that were not answered as they must */
};

/* kvp_product_open makes a node for the engines of a run that compares ranks by policy; seed as of the run.
 * KVP_ERR_SYS: memory, or a worker was refused. p must stay where it is. */
int kvp_product_open(
	struct kvp_product *p, const struct kvp_simulate_cfg *run, enum kvp_local_policy policy);
void kvp_product_close(struct kvp_product *p);
#endif
