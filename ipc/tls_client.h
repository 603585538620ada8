/* ipc/tls_client.h - TLS of a client, as a transformer of bytes: what the peer sent in, plain text out, and
 * back.
 *
 * Shape      one kvp_tls_client a service: what is trusted and the name that the service must prove. One
 *            kvp_tls_conn a connection. No sockets here: the user moves the bytes.
 * Truth      the library's state.
 * Writers    one thread.
 * Ordering   in; then handshake until it says OK, then read and write; after each of them what out gives must
 *            be sent, in order.
 * Trust      the peer's chain must end in one of the given certificates (without any: the system's), and its
 *            certificate must name the host. TLS 1.2 or newer. There is no way to switch this off.
 * Lifetime   a client outlives its connections.
 * Crash      process-local.
 * Proved by  tests/t_tls_client.c, tests/s_tokenizer_tls.t
 */
#ifndef KVP_IPC_TLS_CLIENT_H
#define KVP_IPC_TLS_CLIENT_H

#include <stddef.h>
#include <stdint.h>

struct kvp_tls_client;
struct kvp_tls_conn;

/* kvp_tls_client_open reads what is trusted.
 *
 * ca_path  PEM file of one or more certificates; "" = the system's.
 * name     host that the peer must be: a DNS name or an IP literal; copied.
 * return   KVP_OK; KVP_ERR_INVAL with a line in err (no certificate in the file, ...); KVP_ERR_SYS.
 */
int kvp_tls_client_open(
	struct kvp_tls_client **out, const char *ca_path, const char *name, char *err, size_t cap);
void kvp_tls_client_close(struct kvp_tls_client *c); /* NULL is fine */

struct kvp_tls_conn *kvp_tls_conn_new(struct kvp_tls_client *c); /* NULL without memory */
/* kvp_tls_conn_new_for: the same, where the peer must be another host: name, as above. */
struct kvp_tls_conn *kvp_tls_conn_new_for(struct kvp_tls_client *c, const char *name);
void kvp_tls_conn_free(struct kvp_tls_conn *t);			 /* NULL is fine */

/* kvp_tls_conn_in takes bytes from the peer: KVP_OK, KVP_ERR_SYS. */
int kvp_tls_conn_in(struct kvp_tls_conn *t, const void *data, size_t len);
/* kvp_tls_conn_handshake goes on with it, the first call begins it: KVP_OK it is done; KVP_ERR_AGAIN more
 * bytes are needed; KVP_ERR_PROTO it has failed: kvp_tls_conn_why says why (valid until free). */
int kvp_tls_conn_handshake(struct kvp_tls_conn *t);
const char *kvp_tls_conn_why(const struct kvp_tls_conn *t);
/* kvp_tls_conn_read: KVP_OK and 1..cap bytes; KVP_ERR_AGAIN; KVP_ERR_CLOSED the peer has said that it is
 * done; KVP_ERR_PROTO. kvp_tls_conn_write encrypts all of data: KVP_OK; KVP_ERR_PROTO. */
int kvp_tls_conn_read(struct kvp_tls_conn *t, void *buf, size_t cap, size_t *len);
int kvp_tls_conn_write(struct kvp_tls_conn *t, const void *data, size_t len);
/* kvp_tls_conn_out takes what is to be sent: KVP_OK and *buf (malloc, the caller's), *len (0 and NULL:
 * nothing); KVP_ERR_SYS. */
int kvp_tls_conn_out(struct kvp_tls_conn *t, char **buf, size_t *len);
#endif
