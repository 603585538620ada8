/* ipc/json_check.h - whether a text is JSON, judged piece by piece; no byte of it is kept.
 *
 * Shape      a state machine of a few words: what may come next, and one bit for each bracket that is open.
 * Truth      the bytes fed, in order; how they are cut does not matter.
 * Rules      those of kvp_json_parse (json_in.h): RFC 8259, UTF-8, depth up to KVP_JSON_DEPTH_MAX; numbers of
 *            any size and lone surrogate escapes are fine.
 * Who        who needs the verdict on a text of any length, and of its values only a few.
 * Crash      process-local.
 * Proved by  tests/t_json_check.c, tests/fuzz/f_json.c (both against kvp_json_parse)
 */
#ifndef KVP_IPC_JSON_CHECK_H
#define KVP_IPC_JSON_CHECK_H

#include <stdint.h>

#include "ipc/json_in.h"

struct kvp_json_check { /* zeroed; private but for first */
	uint8_t is_obj[KVP_JSON_DEPTH_MAX / 8];
	uint32_t depth;
	uint8_t state, literal, at; /* at: bytes of the literal that were seen */
	uint8_t is_key;
	uint8_t left, low, high; /* bytes of a UTF-8 sequence that are missing, bounds of the next */
	uint8_t first;		 /* first byte of the value: '{' is an object */
	int rc;
};

/* kvp_json_check_feed: KVP_OK so far, KVP_ERR_PROTO, KVP_ERR_LIMIT (depth); a failure stays.
 * kvp_json_check_end: the same for the text as a whole. */
int kvp_json_check_feed(struct kvp_json_check *c, const void *data, uint64_t len);
int kvp_json_check_end(const struct kvp_json_check *c);
#endif
