/* ipc/tls_cert.h - certificate and private key for TLS listeners: generated, or from watched files.
 *
 * Shape      a pair of PEM texts; a watch over two files.
 * Truth      the files; the watch remembers what it last saw of them.
 * Crash      process-local. kvp_tls_save replaces both files by rename, the key first: a reader between the
 *            two sees a pair that does not match, which the watch refuses and reads again.
 * Proved by  tests/t_tls_cert.c, tests/t_grpc_server.c.
 */
#ifndef KVP_IPC_TLS_CERT_H
#define KVP_IPC_TLS_CERT_H

#include <stdint.h>
#include <sys/types.h>
#include <time.h>

#define KVP_TLS_FILE_MAX (256u << 10) /* longest PEM file that is read */

struct kvp_tls_pair { /* both from malloc; zero = empty */
	char *cert;   /* PEM, certificate chain */
	char *key;    /* PEM, private key */
};
void kvp_tls_free(struct kvp_tls_pair *p); /* the key is wiped first */

/* kvp_tls_generate makes a self-signed P-256 certificate: organisation "kvpick", names DNS:localhost and
 * IP:0.0.0.0, server authentication, valid from one day ago for ten years. KVP_ERR_SYS. Milliseconds. */
int kvp_tls_generate(struct kvp_tls_pair *out);
/* kvp_tls_check: KVP_OK when both parse and belong together, else KVP_ERR_INVAL. */
int kvp_tls_check(const char *cert_pem, const char *key_pem);
/* kvp_tls_load reads two files and checks them. KVP_ERR_SYS (errno), KVP_ERR_LIMIT, KVP_ERR_INVAL. */
int kvp_tls_load(const char *cert_path, const char *key_path, struct kvp_tls_pair *out);
/* kvp_tls_save writes both with mode 0600. KVP_ERR_SYS. */
int kvp_tls_save(const char *cert_path, const char *key_path, const struct kvp_tls_pair *p);

/* A watch over the two files, asked now and then (a timer of a second); a change of the target of a symbolic
 * link, as Kubernetes mounts make it, counts too. */
struct kvp_tls_stamp {
	dev_t dev;
	ino_t ino;
	off_t size;
	struct timespec mtime;
};
struct kvp_tls_watch {
	const char *cert_path, *key_path; /* the caller's text, stays */
	struct kvp_tls_stamp cert, key;
};
/* kvp_tls_watch_poll: 1 and the pair when the files changed since the last call (the first call always) and
 * are good; 0 unchanged; KVP_ERR_* of load when they changed and are bad: reported at every call until they
 * are good, the caller keeps what it has. */
int kvp_tls_watch_poll(struct kvp_tls_watch *w, struct kvp_tls_pair *out);
#endif
