/* ipc/extproc_priv.h - what the two files of extproc_msg share: the arena of a decoder. */
#ifndef KVP_IPC_EXTPROC_PRIV_H
#define KVP_IPC_EXTPROC_PRIV_H

#include "ipc/extproc.pb-c.h"
#include "ipc/extproc_msg.h"

#define KVP_EXTPROC_MSG_MAX (1u << 30)

struct kvp_extproc_dec {
	uint8_t *arena;
	size_t size;	  /* allocated */
	size_t max, used; /* of this message */
	int over;	  /* the message asked for more than max */
	uint8_t *flat;	  /* a message in parts that has to be in one piece */
	size_t flat_size;
	ProtobufCAllocator alloc;
};

int kvp_extproc_arena_begin(struct kvp_extproc_dec *d, size_t len);
void *kvp_extproc_arena_alloc(void *ctx, size_t bytes);
struct kvp_extproc_str kvp_extproc_text(ProtobufCBinaryData b);
int kvp_extproc_take_headers(struct kvp_extproc_dec *d, const Kvp__Extproc__HeaderMap *map,
	const struct kvp_extproc_header **header, uint32_t *cnt);
#endif
