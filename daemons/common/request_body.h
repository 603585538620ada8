/* daemons/common/request_body.h — JSON bodies of the Selection API to the structs of kvpick/selection.h.
 *
 * Shape      struct kvp_parse: a JSON parser and scratch arrays that only grow; one per event loop.
 * Truth      the request body. Strings and arrays of the result point into the parser until the next parse.
 * Errors     0, or the HTTP status of the answer with a text that names the member: 400 syntax, depth or
 *            length limits; 422 wrong type, missing mandatory member, number out of range, rejected override
 *            value.
 * Crash      process-local.
 * Proved by  tests/t_request_body.c, tests/fuzz/f_request_body.c, tests/s_selection.t
 */
#ifndef KVP_REQUEST_BODY_H
#define KVP_REQUEST_BODY_H

#include <kvpick/selection.h>
#include "ipc/json_ids.h"

struct kvp_parse_buf {
	void *ptr;
	size_t bytes;
};

enum kvp_parse_list { KVP_PARSE_TOKENS, KVP_PARSE_BLOCK_HASHES, KVP_PARSE_SEQ_HASHES, KVP_PARSE_LIST_CNT };

struct kvp_parse {
	struct kvp_json *json;
	struct kvp_json_val root;
	struct kvp_json_lists lists; /* by enum kvp_parse_list; in the tree they look empty */
	int lone_surrogate; /* the body holds an unpaired surrogate escape somewhere */
	struct kvp_parse_buf token, routing_token, block_hash, seq_hash, allowed, required, preferred, mm,
		mm_hash;
	char err[512];
};

int kvp_parse_open(struct kvp_parse *p);
void kvp_parse_close(struct kvp_parse *p);

/* kvp_parse_body parses a body whose slack bytes are readable (HTTP server's promise) and insists on an
 * object. */
int kvp_parse_body(struct kvp_parse *p, const void *body, size_t len);

/* kvp_parse_seq_text: seq[0..cnt) as a JSON array in the body last parsed, if that is where the hashes are
 * from and a writer would write the same; else empty. Lives as long as the body. */
struct kvp_str kvp_parse_seq_text(const struct kvp_parse *p, const uint64_t *seq, uint32_t cnt);

/* Each reads the object last parsed. q is filled completely on success. */
int kvp_parse_select(struct kvp_parse *p, struct kvp_select_request *q);
int kvp_parse_reserve(struct kvp_parse *p, struct kvp_reserve_request *q, enum kvp_tristate *has_worker);
int kvp_parse_output_block(struct kvp_parse *p, double *fraction, enum kvp_tristate *has);
#endif
