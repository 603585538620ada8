/* daemons/common/metrics_text.h — the node's counters as Prometheus text (exposition format 0.0.4).
 *
 * Shape      struct kvp_text: a growing byte buffer; kvp_metrics_write appends every family of counters.def,
 *            histograms as cumulative buckets of seconds, then the published names that stand for some of
 *            them, gauges read from the region's objects, and the settings as info series.
 * Truth      counter columns and catalogue; read without lock, so two families may stem from two instants.
 * Names      kvpick_<daemon>_<object>_<event>, `_total` for counters; published names where they exist.
 * Crash      reads only.
 * Proved by  tests/s_selection.t, tests/s_extproc.t
 */
#ifndef KVP_METRICS_TEXT_H
#define KVP_METRICS_TEXT_H

#include "daemons/common/config.h"
#include "shm/region.h"

struct kvp_text {
	char *buf;
	size_t len, cap;
	int err; /* KVP_OK, or KVP_ERR_FULL: out of memory, the text is incomplete */
};

void kvp_text_add(struct kvp_text *t, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void kvp_text_free(struct kvp_text *t);

/* kvp_text_label escapes what the text format wants escaped in a label's value; cut at cap. */
void kvp_text_label(const char *in, char *out, size_t cap);

/* kvp_metrics_epp appends the Endpoint Picker's families under their published names. */
void kvp_metrics_epp(struct kvp_text *t, const struct kvp_region *r, const struct kvp_config *cfg);
/* kvp_metrics_node appends what is in the region now: workers, loads, bookings, queue, index. */
void kvp_metrics_node(struct kvp_text *t, const struct kvp_region *r);
void kvp_metrics_write(struct kvp_text *t, const struct kvp_region *r, const struct kvp_config *cfg);
#endif
