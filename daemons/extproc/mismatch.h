/* daemons/extproc/mismatch.h — notices predictions of cached tokens that engines' reports don't bear out.
 * (Prompts that match nothing at all are noticed by the indexer: shm/hits.h.)
 *
 * Shape      sums over a window of responses that report cached tokens.
 * Truth      this process's requests; each process looks at its own.
 * Crash      process-local.
 * Proved by  tests/t_mismatch.c
 */
#ifndef KVP_EXTPROC_MISMATCH_H
#define KVP_EXTPROC_MISMATCH_H

#include <stdint.h>

#define KVP_MISMATCH_WINDOW 200 /* responses */

enum kvp_mismatch_word {
	KVP_MISMATCH_NOTHING,
	KVP_MISMATCH_UNDERSTATED, /* engines report far more cached tokens than predicted */
	KVP_MISMATCH_OVERSTATED	  /* far fewer */
};
struct kvp_mismatch {
	uint32_t seen;
	uint64_t prompt_tok, predicted_tok, reported_tok;
	int stands; /* the finding of the last window */
};

/* kvp_mismatch_report: a response told of its cached tokens. The finding of a window, once when it begins. */
enum kvp_mismatch_word kvp_mismatch_report(
	struct kvp_mismatch *m, uint64_t prompt_tok, uint64_t predicted_tok, uint64_t reported_tok);
#endif
