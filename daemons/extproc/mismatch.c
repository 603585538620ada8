#include "daemons/extproc/mismatch.h"

enum kvp_mismatch_word kvp_mismatch_report(
	struct kvp_mismatch *m, uint64_t prompt_tok, uint64_t predicted_tok, uint64_t reported_tok)
{
	m->prompt_tok += prompt_tok;
	m->predicted_tok += predicted_tok;
	m->reported_tok += reported_tok;
	if (++m->seen < KVP_MISMATCH_WINDOW)
		return KVP_MISMATCH_NOTHING;
	/* One side sees half of the tokens cached, the other a tenth of that. */
	enum kvp_mismatch_word found = KVP_MISMATCH_NOTHING;
	if (2 * m->reported_tok >= m->prompt_tok && 10 * m->predicted_tok <= m->reported_tok)
		found = KVP_MISMATCH_UNDERSTATED;
	else if (2 * m->predicted_tok >= m->prompt_tok && 10 * m->reported_tok <= m->predicted_tok)
		found = KVP_MISMATCH_OVERSTATED;
	if (!m->prompt_tok)
		found = KVP_MISMATCH_NOTHING;
	int began = found && !m->stands;
	m->stands = found != KVP_MISMATCH_NOTHING;
	m->seen = 0;
	m->prompt_tok = m->predicted_tok = m->reported_tok = 0;
	return began ? found : KVP_MISMATCH_NOTHING;
}
