/* ipc/json_ids.h - parts of a JSON text that the parser's tree is too slow or too far from the text for: huge
 * arrays of token ids and hashes, and the bytes of one member's value.
 *
 * Shape      functions over the caller's text and a parser of ipc/json_in.h.
 * Truth      the text. Verdicts are those of the parser: whatever is accepted here the parser accepts, with
 *            the same meaning (duplicate members: the last; names may be spelled with escapes).
 * Method     the numbers are read in one pass straight from the text; the parser then judges the text around
 *            them. Anything unusual (no such array, an element that is no plain number, a repeated name) is
 *            left to the parser alone.
 * Who        tokenizer answers; prompts that are hashed as text; bodies of the Selection API. The parser's
 *            thread.
 * Crash      process-local.
 * Proved by  tests/t_json_ids.c, tests/fuzz/f_json_ids.c, bench/b_tok.c
 */
#ifndef KVP_IPC_JSON_IDS_H
#define KVP_IPC_JSON_IDS_H

#include <stddef.h>
#include <stdint.h>

#include "ipc/json_in.h"

#define KVP_JSON_IDS_KEEP (1u << 21) /* room for more ids is given back at the next read */

struct kvp_json_ids { /* zero it at first */
	uint32_t *id;
	size_t cnt, cap;
	struct kvp_json_val
		obj; /* the object around them; doc NULL = there is none. The array may look empty */
	char *rest;  /* private: the text without the ids */
	size_t rest_cap;
};

/* kvp_json_ids_read reads member key of the outermost object (or of the only element of an outermost array:
 * what a completion renderer answers) as an array of integers 0 .. 2^32-1. An array that holds nothing but
 * one array is read as that one.
 *
 * text, len  KVP_JSON_SLACK_BYTES readable bytes (any values) behind it.
 * err        of the parser; may be NULL. code KVP_OK if the text is JSON.
 * return     KVP_OK: id[0..cnt). KVP_ERR_PROTO not JSON, KVP_ERR_LIMIT nested too deeply or too long, or (obj
 *            is there) an element out of range; KVP_ERR_INVAL another outer form, or no array of integers;
 *            KVP_ERR_NOTFOUND no such member, or null; KVP_ERR_FULL no memory. obj is set in any case and
 *            valid until the parser's next text; cnt is 0 after a failure.
 */
int kvp_json_ids_read(struct kvp_json *p, const char *text, size_t len, const char *key,
	struct kvp_json_ids *out, struct kvp_json_err *err);
void kvp_json_ids_free(struct kvp_json_ids *ids);

#define KVP_JSON_LISTS_MAX 4

enum kvp_json_list_of { KVP_JSON_LIST_U32, KVP_JSON_LIST_I64 };
struct kvp_json_list {
	const char *key;
	enum kvp_json_list_of of;
	uint32_t is_read; /* the numbers are here, and in the tree the member is an empty array */
	union {
		void *mem; /* kept from read to read */
		uint32_t *u32;
		int64_t *i64;
	};
	size_t cnt, cap;
	const char *text; /* the array in the caller's text if kvp_jw_i64s would write the same, else NULL */
	size_t text_len;
};
struct kvp_json_lists { /* zero it at first, but for keys, kinds and list_cnt */
	struct kvp_json_list list[KVP_JSON_LISTS_MAX];
	size_t list_cnt;
	const char *judged; /* what the parser got: the text, or what is left of it; as long as both live */
	size_t judged_len;
	char *rest; /* private */
	size_t rest_len, rest_cap;
};

/* kvp_json_lists_read is kvp_json_parse_slack, with its verdicts, but that members of the outermost object
 * called list[i].key may be read past the tree: non-empty arrays of plain numbers that fit, a name that
 * occurs once. Whatever else they are is in the tree.
 *
 * text, len  KVP_JSON_SLACK_BYTES readable bytes (any values) behind it.
 * lists      list[].is_read is set in any case; mem[0..cnt) is valid until the next read.
 */
int kvp_json_lists_read(struct kvp_json *p, const char *text, size_t len, struct kvp_json_lists *lists,
	struct kvp_json_val *root, struct kvp_json_err *err);
void kvp_json_lists_free(struct kvp_json_lists *lists);

/* kvp_json_span finds where the value of the last member called key of the outermost object stands in the
 * text: KVP_OK and *off, *n; KVP_ERR_NOTFOUND. root: what the parser made of exactly this text. */
int kvp_json_span(
	const char *text, size_t len, struct kvp_json_val root, const char *key, size_t *off, size_t *n);
#endif
