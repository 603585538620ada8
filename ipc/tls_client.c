#include "ipc/tls_client.h"

#include <arpa/inet.h>
#include <kvpick/err.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct kvp_tls_client {
	SSL_CTX *ctx;
	char name[256];
};

struct kvp_tls_conn {
	SSL *ssl;
	BIO *from_peer, *to_peer; /* belong to ssl */
	char why[200];
};

static int refuse(struct kvp_tls_client *c, char *err, size_t cap, const char *what)
{
	unsigned long e = ERR_peek_last_error();
	snprintf(err, cap, "%s%s%s", what, e ? ": " : "", e ? ERR_reason_error_string(e) : "");
	ERR_clear_error();
	kvp_tls_client_close(c);
	return KVP_ERR_INVAL;
}

int kvp_tls_client_open(
	struct kvp_tls_client **out, const char *ca_path, const char *name, char *err, size_t cap)
{
	struct kvp_tls_client *c = calloc(1, sizeof(*c));
	ERR_clear_error();
	if (c)
		c->ctx = SSL_CTX_new(TLS_client_method());
	if (!c || !c->ctx) {
		free(c);
		snprintf(err, cap, "out of memory");
		return KVP_ERR_SYS;
	}
	if (!name[0] || strlen(name) >= sizeof(c->name))
		return refuse(c, err, cap, "no host name, or one that is too long");
	memcpy(c->name, name, strlen(name) + 1);
	SSL_CTX_set_min_proto_version(c->ctx, TLS1_2_VERSION);
	SSL_CTX_set_verify(c->ctx, SSL_VERIFY_PEER, NULL);
	SSL_CTX_set_mode(c->ctx, SSL_MODE_RELEASE_BUFFERS);
	int ok = ca_path[0] ? SSL_CTX_load_verify_locations(c->ctx, ca_path, NULL)
			    : SSL_CTX_set_default_verify_paths(c->ctx);
	if (ok != 1)
		return refuse(c, err, cap, ca_path[0] ? ca_path : "the system's certificates");
	*out = c;
	return KVP_OK;
}

void kvp_tls_client_close(struct kvp_tls_client *c)
{
	if (c)
		SSL_CTX_free(c->ctx);
	free(c);
}

static int is_literal(const char *name)
{
	uint8_t ip[16];
	return inet_pton(AF_INET, name, ip) == 1 || inet_pton(AF_INET6, name, ip) == 1;
}

struct kvp_tls_conn *kvp_tls_conn_new(struct kvp_tls_client *c)
{
	return kvp_tls_conn_new_for(c, c->name);
}

struct kvp_tls_conn *kvp_tls_conn_new_for(struct kvp_tls_client *c, const char *name)
{
	struct kvp_tls_conn *t = calloc(1, sizeof(*t));
	if (!t)
		return NULL;
	t->ssl = SSL_new(c->ctx);
	t->from_peer = BIO_new(BIO_s_mem());
	t->to_peer = BIO_new(BIO_s_mem());
	if (!t->ssl || !t->from_peer || !t->to_peer) {
		BIO_free(t->from_peer);
		BIO_free(t->to_peer);
		SSL_free(t->ssl);
		free(t);
		return NULL;
	}
	BIO_set_mem_eof_return(t->from_peer, -1); /* empty is not the end */
	SSL_set_bio(t->ssl, t->from_peer, t->to_peer);
	SSL_set_connect_state(t->ssl);
	int ok = is_literal(name) ? X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(t->ssl), name)
				  : SSL_set1_host(t->ssl, name) && SSL_set_tlsext_host_name(t->ssl, name);
	if (ok == 1)
		return t;
	kvp_tls_conn_free(t);
	return NULL;
}

void kvp_tls_conn_free(struct kvp_tls_conn *t)
{
	if (t)
		SSL_free(t->ssl);
	free(t);
}

int kvp_tls_conn_in(struct kvp_tls_conn *t, const void *data, size_t len)
{
	size_t put = 0;
	return BIO_write_ex(t->from_peer, data, len, &put) == 1 && put == len ? KVP_OK : KVP_ERR_SYS;
}

/* outcome turns what the library says about its last call into ours. */
static int outcome(struct kvp_tls_conn *t, int rc)
{
	int e = SSL_get_error(t->ssl, rc);
	if (e == SSL_ERROR_WANT_READ || e == SSL_ERROR_WANT_WRITE)
		return KVP_ERR_AGAIN;
	if (e == SSL_ERROR_ZERO_RETURN)
		return KVP_ERR_CLOSED;
	long verify = SSL_get_verify_result(t->ssl);
	unsigned long last = ERR_peek_last_error();
	if (verify != X509_V_OK)
		snprintf(t->why, sizeof(t->why), "certificate: %s", X509_verify_cert_error_string(verify));
	else
		snprintf(t->why, sizeof(t->why), "%s", last ? ERR_reason_error_string(last) : "broken off");
	ERR_clear_error();
	return KVP_ERR_PROTO;
}

int kvp_tls_conn_handshake(struct kvp_tls_conn *t)
{
	ERR_clear_error();
	int rc = SSL_do_handshake(t->ssl);
	if (rc == 1)
		return KVP_OK;
	rc = outcome(t, rc);
	return rc == KVP_ERR_CLOSED ? KVP_ERR_PROTO : rc;
}

const char *kvp_tls_conn_why(const struct kvp_tls_conn *t)
{
	return t->why;
}

int kvp_tls_conn_read(struct kvp_tls_conn *t, void *buf, size_t cap, size_t *len)
{
	ERR_clear_error();
	int rc = SSL_read_ex(t->ssl, buf, cap, len);
	return rc == 1 ? KVP_OK : outcome(t, rc);
}

int kvp_tls_conn_write(struct kvp_tls_conn *t, const void *data, size_t len)
{
	size_t put = 0;
	ERR_clear_error();
	if (!len)
		return KVP_OK;
	return SSL_write_ex(t->ssl, data, len, &put) == 1 && put == len ? KVP_OK : KVP_ERR_PROTO;
}

int kvp_tls_conn_out(struct kvp_tls_conn *t, char **buf, size_t *len)
{
	size_t n = BIO_ctrl_pending(t->to_peer), got = 0;
	char *p = n ? malloc(n) : NULL;
	if (n && (!p || BIO_read_ex(t->to_peer, p, n, &got) != 1 || got != n)) {
		free(p);
		return KVP_ERR_SYS;
	}
	*buf = p;
	*len = n;
	return KVP_OK;
}
