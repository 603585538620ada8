/* daemons/common/token.h — a bearer token from a file: asked for by the Selection API, sent to the tokenizer.
 *
 * Shape      struct kvp_token: path, last seen file state, and the token (1..4096 bytes, surrounding white
 *            space removed).
 * Truth      the file; it is looked at once a heartbeat and read again when it changed. While it cannot be
 *            read the last good token stays in force.
 * Crash      process-local.
 * Proved by  tests/t_token.c, tests/s_token.t
 */
#ifndef KVP_COMMON_TOKEN_H
#define KVP_COMMON_TOKEN_H

#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>

#define KVP_TOKEN_MAX 4096

struct kvp_token {
	const char *path; /* "" = no token wanted */
	struct stat seen;
	size_t len; /* 0 = none read yet: nobody passes */
	char text[KVP_TOKEN_MAX + 2];
};

/* kvp_token_refresh reads the file if it changed. KVP_OK, KVP_ERR_SYS (errno), KVP_ERR_INVAL for an empty or
 * too long file. */
int kvp_token_refresh(struct kvp_token *t);

/* kvp_token_passes: 1 if no token is wanted or the value of an Authorization header (NULL = absent) carries
 * it. The comparison takes the same time for every wrong token of the right length. */
int kvp_token_passes(const struct kvp_token *t, const char *authorization, uint32_t len);
#endif
