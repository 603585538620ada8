/* daemons/extproc/stream_priv.h — between the files of the stream. */
#ifndef KVP_EXTPROC_STREAM_PRIV_H
#define KVP_EXTPROC_STREAM_PRIV_H

#include "daemons/extproc/stream.h"

/* stream_say: an answer without content: headers, body or trailers go on as they are. */
void stream_say(struct kvp_stream *s, enum kvp_extproc_answer kind);
/* stream_say_routing sends the routing answer in a message of this kind. */
void stream_say_routing(struct kvp_stream *s, enum kvp_extproc_answer kind, const struct kvp_pick_answer *a);
/* stream_say_pieces hands a body on in pieces; kept: the memory that it lies in, or NULL; ends: the last one
 * ends the body. */
void stream_say_pieces(struct kvp_stream *s, enum kvp_extproc_answer kind, struct kvp_extproc_str body,
	struct kvp_extproc_kept *kept, int ends);
/* stream_reject answers the client itself and finishes the stream. */
void stream_reject(struct kvp_stream *s, int status, const char *text, uint64_t retry_after_s);

/* stream_take_headers copies the request's headers; 0 without memory. */
int stream_take_headers(struct kvp_stream *s, const struct kvp_extproc_req *m);
/* stream_take_subset remembers the subset hint if the message has one; 0 without memory. */
int stream_take_subset(struct kvp_stream *s, const struct kvp_extproc_req *m);
int stream_name_is(struct kvp_extproc_str name, const char *lower); /* in any case */
#endif
