/* daemons/sidecar/target.h - the prefill engine that the request names: x-prefiller-host-port and the list of
 * those that are allowed.
 *
 * Shape      struct kvp_target: host without brackets, port, and the authority as it is sent in Host.
 * Truth      the header's value; no I/O, names are not resolved here.
 * Crash      process-local.
 * Proved by  tests/v_disagg.c, tests/fuzz/f_sidecar_body.c
 */
#ifndef KVP_SIDECAR_TARGET_H
#define KVP_SIDECAR_TARGET_H

#include <stddef.h>
#include <stdint.h>

#define KVP_TARGET_HEADER "x-prefiller-host-port"
#define KVP_TARGET_HOST_MAX 254

struct kvp_target {
	char host[KVP_TARGET_HOST_MAX + 1];	 /* IPv6 without brackets */
	char authority[KVP_TARGET_HOST_MAX + 9]; /* host:port, IPv6 in brackets, port without leading zeros */
	uint16_t port;
};

/* kvp_target_parse reads one host:port. Host: a name or IPv4 of A-Z a-z 0-9 - . _ ~, or IPv6 in brackets;
 * port 1..65535. KVP_ERR_INVAL for anything else. */
int kvp_target_parse(const char *v, size_t len, struct kvp_target *out);

/* kvp_target_allowed answers whether list (members host, host:port or CIDR, comma-separated; "" = everything)
 * has the target. Names compare as written, case aside; a name is never in a CIDR. */
int kvp_target_allowed(const char *list, const struct kvp_target *t);

/* The other profile's reading of the header: values of all its lines, split at commas, trimmed, doubles and
 * empty ones left out, "http://" cut. kvp_target_pick returns how many there are, at most `most`, and points
 * out[] at them; 0 = none, or the first of all is empty: the request is passed through. */
struct kvp_target_text {
	const char *ptr;
	size_t len;
};
size_t kvp_target_pick(
	const struct kvp_target_text *line, size_t line_cnt, struct kvp_target_text *out, size_t most);
#endif
