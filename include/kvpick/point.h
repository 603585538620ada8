/* kvpick/point.h — named places where tests kill, delay or weave: one mechanism for all of them.
 *
 * Shape      KVP_POINT("module:place"): nothing in a release build; in a build with KVP_TEST_POINTS a call of
 *            kvp_point_hit.
 * Use        KVP_CRASH_AT="place:n" kills the process with SIGKILL at the n-th hit of the place (n from 1).
 *            kvp_point_hook, when set by a test, is called at every hit instead.
 * Who        any thread. Crash: that is what it is for.
 */
#ifndef KVPICK_POINT_H
#define KVPICK_POINT_H

#ifdef KVP_TEST_POINTS
extern void (*kvp_point_hook)(const char *place);
void kvp_point_hit(const char *place);
#define KVP_POINT(place) kvp_point_hit(place)
#else
#define KVP_POINT(place) ((void)0)
#endif
#endif
