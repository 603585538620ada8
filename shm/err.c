#include <kvpick/err.h>

#include <stdio.h>
#include <stdlib.h>

const char *kvp_strerror(int code)
{
	switch (code) {
#define X(name, num, text)                                                                                   \
	case num:                                                                                            \
		return text;
		KVP_ERR_LIST(X)
#undef X
	default:
		return "unknown error";
	}
}

void kvp_assert_failed(const char *expr, const char *file, int line)
{
	fprintf(stderr, "kvpick: %s:%d: assertion failed: %s\n", file, line, expr);
	abort();
}
