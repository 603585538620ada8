/* daemons/extproc/tokenizer_priv.h — pure parts of the tokenizer client: its address, media in an answer.
 *
 * Shape      functions over plain structs.
 * Crash      process-local.
 * Proved by  tests/t_tokenizer.c
 */
#ifndef KVP_EXTPROC_TOKENIZER_PRIV_H
#define KVP_EXTPROC_TOKENIZER_PRIV_H

#include "daemons/extproc/request.h"
#include "ipc/http_url.h"

#define KVP_TKZ_PATH_MAX 1152

/* kvp_tkz_path writes base and endpoint: KVP_OK, KVP_ERR_LIMIT. */
int kvp_tkz_path(const struct kvp_http_url *u, const char *endpoint, char out[KVP_TKZ_PATH_MAX]);

struct kvp_tkz_mm { /* grows; zero it at first */
	struct kvp_ask_mm *obj;
	uint32_t cap;
};
/* kvp_tkz_mm_read fills the media part of t from the features member of a vLLM answer. Anything that does not
 * fit together makes KVP_ASK_MM_UNKNOWN, from the first place that is known (0 if none). */
void kvp_tkz_mm_read(struct kvp_tkz_mm *m, struct kvp_json_val answer, struct kvp_ask_tokens *t);
void kvp_tkz_mm_free(struct kvp_tkz_mm *m);
#endif
