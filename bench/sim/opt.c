/* bench/sim/opt.c — see opt.h. */
#include "bench/sim/opt.h"
#include <kvpick/err.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void kvp_opt_bad(const char *name, const char *text, const char *wanted)
{
	fprintf(stderr, "--%s: '%s' is not %s\n", name, text, wanted);
	exit(KVP_EXIT_CONFIG);
}

uint64_t kvp_opt_u64(const char *name, const char *text, uint64_t min, uint64_t max)
{
	char *end, wanted[96];
	errno = 0;
	uint64_t v = strtoull(text, &end, 10);
	snprintf(wanted, sizeof(wanted), "a whole number from %" PRIu64 " to %" PRIu64, min, max);
	if (errno || end == text || *end || *text == '-' || v < min || v > max)
		kvp_opt_bad(name, text, wanted);
	return v;
}

double kvp_opt_f64(const char *name, const char *text, double min, double max)
{
	char *end, wanted[96];
	errno = 0;
	double v = strtod(text, &end);
	snprintf(wanted, sizeof(wanted), "a number from %g to %g", min, max);
	if (errno || end == text || *end || !(v >= min && v <= max))
		kvp_opt_bad(name, text, wanted);
	return v;
}

int kvp_opt_word(const char *name, const char *text, const char *const *word)
{
	char wanted[256] = "one of";
	size_t len = strlen(wanted);
	for (int i = 0; word[i]; i++) {
		if (!strcmp(word[i], text))
			return i;
		len += (size_t)snprintf(wanted + len, sizeof(wanted) - len, " %s", word[i]);
		if (len >= sizeof(wanted))
			break;
	}
	kvp_opt_bad(name, text, wanted);
}
