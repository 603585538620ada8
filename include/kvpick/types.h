/* kvpick/types.h — small types that several public headers share.
 *
 * Shape      enums and value structs only; no function.
 */
#ifndef KVPICK_TYPES_H
#define KVPICK_TYPES_H

#include <stddef.h>

/* Role of a partition: which scheduler its workers belong to. */
enum kvp_part_role { KVP_PART_AGGREGATED, KVP_PART_PREFILL, KVP_PART_DECODE, KVP_PART_ROLE_CNT };

/* A length-counted string, not 0-terminated; ptr NULL = absent. */
struct kvp_str {
	const char *ptr;
	size_t len;
};

/* A switch that may be absent. */
enum kvp_tristate { KVP_UNSET = -1, KVP_NO = 0, KVP_YES = 1 };

#endif
