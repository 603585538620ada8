#include <kvpick/point.h>

#ifdef KVP_TEST_POINTS
#include <kvpick/atomic.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void (*kvp_point_hook)(const char *place);

void kvp_point_hit(const char *place)
{
	static uint64_t hits;
	if (kvp_point_hook) {
		kvp_point_hook(place);
		return;
	}
	const char *spec = getenv("KVP_CRASH_AT");
	const char *colon = spec ? strrchr(spec, ':') : NULL;
	if (!colon || strlen(place) != (size_t)(colon - spec) || strncmp(spec, place, strlen(place)) != 0)
		return;
	if (kvp_faa_rlx_u64(&hits, 1) + 1 == strtoull(colon + 1, NULL, 10))
		kill(getpid(), SIGKILL);
}
#else
typedef int kvp_point_is_empty_in_this_build;
#endif
