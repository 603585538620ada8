/* daemons/common/log.h — log lines to stderr: key=value, or JSON with DYN_LOGGING_JSONL.
 *
 * Shape      2025-01-31T12:00:00.123456Z W extproc[3]/4711 resv.book selection=9f2c code=FULL cnt=65536
 *            {"time":"..","level":"W","process":"extproc","instance":3,"pid":4711,"event":"resv.book",..}
 * Levels     D detail, I informational, N notice, W warning, E the process can't go on and is about to exit
 *            with a code of err.h (logging itself never exits).
 * Truth      nothing is kept but the settings of this process.
 * Writers    kvp_log_setup once before threads start; kvp_log_write from any thread.
 * Ordering   one write(2) a line of at most KVP_LOG_LINE_MAX bytes, so lines of several processes on one pipe
 *            don't mix.
 * Crash      a kill loses at most the line being written.
 * Limits     never waits: when stderr can't take a line at once it is dropped and counted (kvp_log_count).
 *            Not for the path of a request above D; tokens, prompts and header values are never logged.
 * Proved by  tests/t_log.c
 */
#ifndef KVP_COMMON_LOG_H
#define KVP_COMMON_LOG_H

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#define KVP_LOG_LINE_MAX 4096 /* PIPE_BUF: longer writes may be torn */
#define KVP_LOG_VALUE_MAX 768 /* bytes of one value before escaping; the rest is cut, marked by ".." */

enum kvp_log_level { KVP_LOG_LEVEL_D, KVP_LOG_LEVEL_I, KVP_LOG_LEVEL_N, KVP_LOG_LEVEL_W, KVP_LOG_LEVEL_E };
enum kvp_log_form { KVP_LOG_FORM_TEXT, KVP_LOG_FORM_JSON };

/* The fixed head of a line. instance < 0: the process has no number. */
struct kvp_log_head {
	enum kvp_log_level level;
	enum kvp_log_form form;
	const char *process;
	int instance;
	int pid;
	int64_t real_ns; /* CLOCK_REALTIME */
};

/* kvp_log_setup names the process and sets the least level that is written. process must stay valid. Before
 * it is called lines carry the name "kvpick", level I, text. */
void kvp_log_setup(const char *process, int instance, enum kvp_log_level least, enum kvp_log_form form);

/* kvp_log_write writes one line: fmt is "module.event key=%s other=%u", a printf format in which blanks of
 * the format (not of values) separate the fields. Each value is quoted and escaped as a whole if it needs
 * it, so text from outside can't forge fields or lines. Conversions: s c d i u x f g with the lengths l ll
 * z and precision. */
__attribute__((format(printf, 2, 3))) void kvp_log_write(enum kvp_log_level level, const char *fmt, ...);

#define KVP_LOG_D(event, ...) kvp_log_write(KVP_LOG_LEVEL_D, event " " __VA_ARGS__)
#define KVP_LOG_I(event, ...) kvp_log_write(KVP_LOG_LEVEL_I, event " " __VA_ARGS__)
#define KVP_LOG_N(event, ...) kvp_log_write(KVP_LOG_LEVEL_N, event " " __VA_ARGS__)
#define KVP_LOG_W(event, ...) kvp_log_write(KVP_LOG_LEVEL_W, event " " __VA_ARGS__)
#define KVP_LOG_E(event, ...) kvp_log_write(KVP_LOG_LEVEL_E, event " " __VA_ARGS__)

/* kvp_log_line builds a line, newline included, into buf (cap >= 256) and returns its length; no I/O. A
 * line that does not fit loses whole fields at its end and says truncated=1. */
__attribute__((format(printf, 4, 0))) size_t kvp_log_line(
	char *buf, size_t cap, const struct kvp_log_head *head, const char *fmt, va_list ap);

/* kvp_log_printable copies text for a terminal: bytes other than printable ASCII become \xNN. What does not
 * fit into cap bytes (at least 1) is cut, never within an escape. Returns the length without the final 0. */
size_t kvp_log_printable(const char *text, char *out, size_t cap);

/* kvp_log_count names the word that counts the lines dropped because stderr would have blocked: it must stay
 * until another one is named (NULL: nobody looks). While there is one thread only. */
void kvp_log_count(uint64_t *counter);

/* A place that may repeat: one line each interval, the number left out is reported with the next one. Zero
 * initialised, any thread. */
struct kvp_log_limit {
	uint64_t next_ns;
	uint64_t suppressed;
};

/* kvp_log_limit_pass answers 1 when the caller should log now, and then stores the number of lines suppressed
 * since the last one; else 0, counting this one. now_ns and interval_ns: any monotonic clock, ns.
 * Lock-free. */
int kvp_log_limit_pass(struct kvp_log_limit *l, uint64_t now_ns, uint64_t interval_ns, uint64_t *suppressed);
#endif
