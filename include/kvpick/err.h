/* kvpick/err.h — the one list of error codes, their texts, and the assertions.
 *
 * Shape      functions that can fail return int: 0 or a negative KVP_ERR_*; results go to out-parameters,
 *            left untouched on failure. Constructors return a pointer or NULL.
 * Wire       each protocol maps these codes to its statuses in exactly one table, in its daemon.
 */
#ifndef KVPICK_ERR_H
#define KVPICK_ERR_H

#define KVP_ERR_LIST(X)                                                                                      \
	X(OK, 0, "ok")                                                                                       \
	X(INVAL, -1, "argument outside the documented range")                                                \
	X(LAYOUT, -2, "magic, layout version or size mismatch")                                              \
	X(FULL, -3, "fixed capacity exhausted")                                                              \
	X(NOTFOUND, -4, "no such object")                                                                    \
	X(AGAIN, -5, "transient; retry later")                                                               \
	X(FENCED, -6, "caller's slot was reclaimed")                                                         \
	X(CORRUPT, -7, "invariant violated; rebuild needed")                                                 \
	X(SYS, -8, "system call failed; errno is set")                                                       \
	X(EXISTS, -9, "already there")                                                                       \
	X(TIMEOUT, -10, "deadline passed")                                                                   \
	X(CLOSED, -11, "the other side is gone")                                                             \
	X(LIMIT, -12, "input over a documented limit")                                                       \
	X(PROTO, -13, "input violates its protocol")

enum kvp_err {
#define X(name, code, text) KVP_ERR_##name = (code),
	KVP_ERR_LIST(X)
#undef X
};
#define KVP_OK KVP_ERR_OK

/* kvp_strerror returns the constant text of a code, "unknown error" for any other number. Never NULL. */
const char *kvp_strerror(int code);

/* Exit codes of every daemon (the supervisor decides by them). */
#define KVP_EXIT_OK 0
#define KVP_EXIT_CONFIG 2   /* bad configuration: not restarted */
#define KVP_EXIT_DEPEND 69  /* a dependency is missing */
#define KVP_EXIT_CORRUPT 70 /* an invariant is broken: the region is rebuilt */
#define KVP_EXIT_AGAIN 75   /* try again */

/* KVP_ASSERT stays compiled in (caller bug: abort with the place); KVP_DASSERT is for hot paths. */
void kvp_assert_failed(const char *expr, const char *file, int line) __attribute__((noreturn, cold));
#define KVP_ASSERT(e) ((e) ? (void)0 : kvp_assert_failed(#e, __FILE__, __LINE__))
#ifdef KVP_DEBUG
#define KVP_DASSERT(e) KVP_ASSERT(e)
#else
#define KVP_DASSERT(e) ((void)sizeof(!(e)))
#endif
#endif
