/* bench/sim/opt.h — numbers on the command lines of kvpick-sim and kvpick-load.
 *
 * Shape      pure functions but for the message: a value that is not a number in range prints one line to
 *            stderr naming option, value and range, and exits with KVP_EXIT_CONFIG.
 * Truth, Writers, Readers, Ordering, Lifetime, Crash: no state.
 * Proved by  tests/s_sim.t
 */
#ifndef KVP_BENCH_SIM_OPT_H
#define KVP_BENCH_SIM_OPT_H

#include <stdint.h>

uint64_t kvp_opt_u64(const char *name, const char *text, uint64_t min, uint64_t max);
double kvp_opt_f64(const char *name, const char *text, double min, double max);
/* kvp_opt_word is the index of the text in a NULL-terminated list. */
int kvp_opt_word(const char *name, const char *text, const char *const *word);
void kvp_opt_bad(const char *name, const char *text, const char *wanted) __attribute__((noreturn));
#endif
