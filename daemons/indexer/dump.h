/* daemons/indexer/dump.h — the indexer's side of a dump: one page a command (daemons/common/dump_page.h). */
#ifndef KVP_INDEXER_DUMP_H
#define KVP_INDEXER_DUMP_H

#include "daemons/indexer/indexer.h"
#include "shm/cmdring.h"

/* kvp_idx_dump answers a KVP_CMD_DUMP: fills buf (KVP_CMD_PAYLOAD_MAX bytes) and *len; returns the status.
 * Bounded: some thousand blocks or some hundred looks at runs. */
int kvp_idx_dump(struct kvp_idx *idx, const struct kvp_cmd_cell *c, void *buf, uint32_t *len);

/* kvp_idx_names answers a KVP_CMD_NAMES in place: KVP_OK and *len; KVP_ERR_FENCED the index slot is another
 * rank's; KVP_ERR_INVAL. */
int kvp_idx_names(struct kvp_idx *idx, const struct kvp_cmd_cell *c, void *buf, uint32_t *len);
#endif
