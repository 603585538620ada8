/* ipc/tls_cert.c - PEM pairs with OpenSSL. The gRPC core has its own OpenSSL context; what we check here is
 * only that it will be able to use the pair. */
#include "ipc/tls_cert.h"

#include <errno.h>
#include <fcntl.h>
#include <kvpick/err.h>
#include <openssl/bio.h>
#include <openssl/ec.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509v3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define DAY_S 86400L

void kvp_tls_free(struct kvp_tls_pair *p)
{
	if (p->key)
		OPENSSL_cleanse(p->key, strlen(p->key));
	free(p->key);
	free(p->cert);
	*p = (struct kvp_tls_pair){0};
}

static int add_extension(X509 *x, int nid, const char *value)
{
	X509V3_CTX ctx;
	X509V3_set_ctx_nodb(&ctx);
	X509V3_set_ctx(&ctx, x, x, NULL, NULL, 0);
	X509_EXTENSION *e = X509V3_EXT_conf_nid(NULL, &ctx, nid, value);
	int good = e && X509_add_ext(x, e, -1);
	X509_EXTENSION_free(e);
	return good;
}

static int fill(X509 *x, EVP_PKEY *key)
{
	uint64_t serial = 0;
	X509_NAME *name = X509_get_subject_name(x);
	const unsigned char *org = (const unsigned char *)"kvpick", *cn = (const unsigned char *)"localhost";
	return RAND_bytes((unsigned char *)&serial, sizeof(serial)) == 1 &&
	       ASN1_INTEGER_set_uint64(X509_get_serialNumber(x), (serial >> 1) | 1) &&
	       X509_set_version(x, 2) && X509_gmtime_adj(X509_getm_notBefore(x), -DAY_S) &&
	       X509_gmtime_adj(X509_getm_notAfter(x), 3650 * DAY_S) && X509_set_pubkey(x, key) &&
	       X509_NAME_add_entry_by_txt(name, "O", MBSTRING_ASC, org, -1, -1, 0) &&
	       X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC, cn, -1, -1, 0) &&
	       X509_set_issuer_name(x, name) &&
	       add_extension(x, NID_basic_constraints, "critical,CA:FALSE") &&
	       add_extension(x, NID_key_usage, "critical,digitalSignature") &&
	       add_extension(x, NID_ext_key_usage, "serverAuth") &&
	       add_extension(x, NID_subject_alt_name, "DNS:localhost,IP:0.0.0.0") &&
	       X509_sign(x, key, EVP_sha256()) > 0;
}

static char *take_bio(BIO *b)
{
	char *data;
	long len = BIO_get_mem_data(b, &data);
	char *out = len > 0 ? malloc((size_t)len + 1) : NULL;
	if (out) {
		memcpy(out, data, (size_t)len);
		out[len] = 0;
	}
	return out;
}

int kvp_tls_generate(struct kvp_tls_pair *out)
{
	struct kvp_tls_pair p = {0};
	EVP_PKEY *key = EVP_EC_gen("P-256");
	X509 *x = X509_new();
	BIO *cert_bio = BIO_new(BIO_s_mem()), *key_bio = BIO_new(BIO_s_secmem());
	if (key && x && cert_bio && key_bio && fill(x, key) && PEM_write_bio_X509(cert_bio, x) &&
		PEM_write_bio_PrivateKey(key_bio, key, NULL, NULL, 0, NULL, NULL)) {
		p.cert = take_bio(cert_bio);
		p.key = take_bio(key_bio);
	}
	BIO_free(key_bio);
	BIO_free(cert_bio);
	X509_free(x);
	EVP_PKEY_free(key);
	ERR_clear_error();
	if (!p.cert || !p.key) {
		kvp_tls_free(&p);
		return KVP_ERR_SYS;
	}
	*out = p;
	return KVP_OK;
}

/* A key with a pass phrase can't be used; without this, OpenSSL would ask on the terminal. */
static int no_phrase(char *buf, int size, int rw, void *u)
{
	(void)buf;
	(void)size;
	(void)rw;
	(void)u;
	return -1;
}

/* The chain's first certificate is ours; every other block must be a certificate too. */
static X509 *read_chain(const char *pem)
{
	BIO *b = BIO_new_mem_buf(pem, -1);
	X509 *first = b ? PEM_read_bio_X509(b, NULL, no_phrase, NULL) : NULL, *more;
	ERR_clear_error();
	while (first && (more = PEM_read_bio_X509(b, NULL, no_phrase, NULL)))
		X509_free(more);
	if (first && ERR_GET_REASON(ERR_peek_last_error()) != PEM_R_NO_START_LINE) {
		X509_free(first);
		first = NULL;
	}
	BIO_free(b);
	return first;
}

int kvp_tls_check(const char *cert_pem, const char *key_pem)
{
	BIO *b = BIO_new_mem_buf(key_pem, -1);
	EVP_PKEY *key = b ? PEM_read_bio_PrivateKey(b, NULL, no_phrase, NULL) : NULL;
	X509 *x = read_chain(cert_pem);
	int good = key && x && X509_check_private_key(x, key) == 1;
	X509_free(x);
	EVP_PKEY_free(key);
	BIO_free(b);
	ERR_clear_error();
	return good ? KVP_OK : KVP_ERR_INVAL;
}

/* read_file gives the text and what was read; the stamp is of the open file, so both belong together. */
static int read_file(const char *path, char **out, struct kvp_tls_stamp *stamp)
{
	struct stat sb;
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
	if (fd < 0)
		return KVP_ERR_SYS;
	int rc = KVP_ERR_SYS;
	char *text = NULL;
	size_t len = 0;
	if (fstat(fd, &sb) != 0)
		goto out;
	rc = sb.st_size > KVP_TLS_FILE_MAX ? KVP_ERR_LIMIT : !S_ISREG(sb.st_mode) ? KVP_ERR_INVAL : KVP_OK;
	if (rc != KVP_OK)
		goto out;
	text = calloc(1, (size_t)sb.st_size + 1);
	for (ssize_t n = 1; text && n > 0 && len<(size_t)sb.st_size; len += n> 0 ? (size_t)n : 0)
		n = read(fd, text + len, (size_t)sb.st_size - len);
	rc = text ? KVP_OK : KVP_ERR_SYS;
	if (rc == KVP_OK) {
		*out = text;
		*stamp = (struct kvp_tls_stamp){sb.st_dev, sb.st_ino, sb.st_size, sb.st_mtim};
	}
out:
	close(fd);
	return rc;
}

static int load(const char *cert_path, const char *key_path, struct kvp_tls_pair *out,
	struct kvp_tls_stamp *cert, struct kvp_tls_stamp *key)
{
	struct kvp_tls_pair p = {0};
	int rc = read_file(cert_path, &p.cert, cert);
	if (rc == KVP_OK)
		rc = read_file(key_path, &p.key, key);
	if (rc == KVP_OK)
		rc = kvp_tls_check(p.cert, p.key);
	if (rc == KVP_OK)
		*out = p;
	else
		kvp_tls_free(&p);
	return rc;
}

int kvp_tls_load(const char *cert_path, const char *key_path, struct kvp_tls_pair *out)
{
	struct kvp_tls_stamp cert, key;
	return load(cert_path, key_path, out, &cert, &key);
}

static int write_file(const char *path, const char *text)
{
	char tmp[4096];
	size_t len = strlen(text), done = 0;
	if (snprintf(tmp, sizeof(tmp), "%s.%d.tmp", path, (int)getpid()) >= (int)sizeof(tmp)) {
		errno = ENAMETOOLONG;
		return KVP_ERR_SYS;
	}
	unlink(tmp);
	int fd = open(tmp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
	if (fd < 0)
		return KVP_ERR_SYS;
	for (ssize_t n = 1; n > 0 && done<len; done += n> 0 ? (size_t)n : 0)
		n = write(fd, text + done, len - done);
	if ((close(fd) != 0) | (done < len) || rename(tmp, path) != 0) {
		int e = errno;
		unlink(tmp);
		errno = e;
		return KVP_ERR_SYS;
	}
	return KVP_OK;
}

int kvp_tls_save(const char *cert_path, const char *key_path, const struct kvp_tls_pair *p)
{
	int rc = write_file(key_path, p->key);
	return rc == KVP_OK ? write_file(cert_path, p->cert) : rc;
}

static int stamp_is(const char *path, const struct kvp_tls_stamp *s)
{
	struct stat sb;
	return stat(path, &sb) == 0 && sb.st_dev == s->dev && sb.st_ino == s->ino && sb.st_size == s->size &&
	       sb.st_mtim.tv_sec == s->mtime.tv_sec && sb.st_mtim.tv_nsec == s->mtime.tv_nsec;
}

int kvp_tls_watch_poll(struct kvp_tls_watch *w, struct kvp_tls_pair *out)
{
	struct kvp_tls_stamp cert, key;
	if (stamp_is(w->cert_path, &w->cert) && stamp_is(w->key_path, &w->key))
		return 0;
	int rc = load(w->cert_path, w->key_path, out, &cert, &key);
	if (rc != KVP_OK)
		return rc;
	w->cert = cert;
	w->key = key;
	return 1;
}
