/* Certificates: what is generated, what is refused, and the watch over two files. */
#include "ipc/tls_cert.h"
#include "tests/tap.h"

#include <kvpick/err.h>

#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static char dir[64], cert_path[128], key_path[128], other_path[128];

static X509 *parse(const char *pem)
{
	BIO *b = BIO_new_mem_buf(pem, -1);
	X509 *x = PEM_read_bio_X509(b, NULL, NULL, NULL);
	BIO_free(b);
	return x;
}

static void generated(const struct kvp_tls_pair *p)
{
	static const unsigned char any[4] = {0};
	X509 *x = parse(p->cert);
	ok(x && X509_check_host(x, "localhost", 0, 0, NULL) == 1, "the certificate names localhost");
	ok(X509_check_ip(x, any, 4, 0) == 1, "and 0.0.0.0");
	ok(X509_check_host(x, "example.com", 0, 0, NULL) != 1, "and nobody else");
	int day = 0, sec = 0;
	ASN1_TIME_diff(&day, &sec, X509_get0_notBefore(x), X509_get0_notAfter(x));
	is_u64(day, 3651, "it is valid for ten years and a day");
	ok(X509_cmp_current_time(X509_get0_notBefore(x)) < 0, "from now on");
	ok(X509_get_extended_key_usage(x) == XKU_SSL_SERVER, "for servers only");
	ok(X509_check_ca(x) == 0, "and is no authority");
	EVP_PKEY *k = X509_get0_pubkey(x);
	ok(X509_verify(x, k) == 1 && EVP_PKEY_get_bits(k) == 256, "self-signed, P-256");
	X509_free(x);
}

static void put(const char *path, const char *text)
{
	FILE *f = fopen(path, "we");
	fputs(text, f);
	fclose(f);
}

static void checks(const struct kvp_tls_pair *a, const struct kvp_tls_pair *b)
{
	char both[8192];
	ok(kvp_tls_check(a->cert, a->key) == KVP_OK, "a pair is a pair");
	ok(kvp_tls_check(a->cert, b->key) == KVP_ERR_INVAL, "another key is not");
	ok(kvp_tls_check(a->key, a->cert) == KVP_ERR_INVAL, "nor is the exchange");
	ok(kvp_tls_check("", a->key) == KVP_ERR_INVAL && kvp_tls_check(a->cert, "") == KVP_ERR_INVAL &&
			kvp_tls_check("x", "y") == KVP_ERR_INVAL,
		"nor nothing, nor text");
	snprintf(both, sizeof(both), "%s%s", a->cert, b->cert);
	ok(kvp_tls_check(both, a->key) == KVP_OK, "a chain may follow");
	snprintf(both, sizeof(both), "%s-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
		a->cert);
	ok(kvp_tls_check(both, a->key) == KVP_ERR_INVAL, "a broken one may not");
}

static void files(const struct kvp_tls_pair *a, const struct kvp_tls_pair *b)
{
	struct kvp_tls_pair got = {0};
	struct stat sb;
	ok(kvp_tls_load(cert_path, key_path, &got) == KVP_ERR_SYS, "no files");
	ok(kvp_tls_save(cert_path, key_path, a) == KVP_OK, "saved");
	ok(stat(key_path, &sb) == 0 && (sb.st_mode & 0777) == 0600, "the key is for its owner");
	ok(kvp_tls_load(cert_path, key_path, &got) == KVP_OK, "loaded");
	is_str(got.cert, a->cert, "the same certificate");
	is_str(got.key, a->key, "the same key");
	kvp_tls_free(&got);
	ok(!got.cert && !got.key, "freed is empty");
	put(other_path, b->key);
	ok(kvp_tls_load(cert_path, other_path, &got) == KVP_ERR_INVAL, "files that are no pair");
	ok(kvp_tls_load(dir, key_path, &got) == KVP_ERR_INVAL, "a folder");
	ok(truncate(other_path, KVP_TLS_FILE_MAX + 1) == 0 &&
			kvp_tls_load(cert_path, other_path, &got) == KVP_ERR_LIMIT,
		"a file over the limit");
	ok(kvp_tls_save("/nonexistent/c", key_path, a) == KVP_ERR_SYS, "a place that can't be written");
}

static void watch(const struct kvp_tls_pair *a, const struct kvp_tls_pair *b)
{
	char link_path[160], target[160];
	struct kvp_tls_pair got = {0};
	struct kvp_tls_watch w = {.cert_path = cert_path, .key_path = key_path};
	kvp_tls_save(cert_path, key_path, a);
	is_u64(kvp_tls_watch_poll(&w, &got), 1, "the first look gives the pair");
	kvp_tls_free(&got);
	is_u64(kvp_tls_watch_poll(&w, &got), 0, "the second nothing");
	put(other_path, b->key);
	ok(rename(other_path, key_path) == 0, "the key changes first");
	ok(kvp_tls_watch_poll(&w, &got) == KVP_ERR_INVAL, "half a change is refused");
	ok(kvp_tls_watch_poll(&w, &got) == KVP_ERR_INVAL, "as long as it is one");
	put(other_path, b->cert);
	ok(rename(other_path, cert_path) == 0, "the certificate follows");
	is_u64(kvp_tls_watch_poll(&w, &got), 1, "now there is a new pair");
	is_str(got.cert, b->cert, "the new one");
	kvp_tls_free(&got);
	is_u64(kvp_tls_watch_poll(&w, &got), 0, "once");
	unlink(cert_path);
	ok(kvp_tls_watch_poll(&w, &got) == KVP_ERR_SYS, "a file that is gone is an error");
	kvp_tls_save(cert_path, key_path, b);
	is_u64(kvp_tls_watch_poll(&w, &got), 1, "until it is back");
	kvp_tls_free(&got);

	/* A mounted secret: the path is a link into a folder that is replaced as a whole. */
	snprintf(link_path, sizeof(link_path), "%s/link.pem", dir);
	snprintf(target, sizeof(target), "%s/a.pem", dir);
	put(target, a->key);
	unlink(key_path);
	ok(symlink(target, key_path) == 0, "a link");
	kvp_tls_save(cert_path, link_path, a);
	is_u64(kvp_tls_watch_poll(&w, &got), 1, "a pair behind a link");
	kvp_tls_free(&got);
	is_u64(kvp_tls_watch_poll(&w, &got), 0, "unchanged");
	ok(symlink(link_path, other_path) == 0 && rename(other_path, key_path) == 0, "the link moves");
	is_u64(kvp_tls_watch_poll(&w, &got), 1, "that is a change");
	kvp_tls_free(&got);
	unlink(link_path);
	unlink(target);
}

int main(void)
{
	struct kvp_tls_pair a, b;
	snprintf(dir, sizeof(dir), "/tmp/kvp-t-tls-XXXXXX");
	if (!mkdtemp(dir))
		return 1;
	snprintf(cert_path, sizeof(cert_path), "%s/cert.pem", dir);
	snprintf(key_path, sizeof(key_path), "%s/key.pem", dir);
	snprintf(other_path, sizeof(other_path), "%s/other.pem", dir);
	ok(kvp_tls_generate(&a) == KVP_OK && kvp_tls_generate(&b) == KVP_OK, "two pairs are made");
	ok(strcmp(a.cert, b.cert) != 0 && strcmp(a.key, b.key) != 0, "and differ");
	generated(&a);
	checks(&a, &b);
	files(&a, &b);
	watch(&a, &b);
	unlink(cert_path);
	unlink(key_path);
	unlink(other_path);
	rmdir(dir);
	kvp_tls_free(&a);
	kvp_tls_free(&b);
	return done();
}
