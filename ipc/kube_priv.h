/* ipc/kube_priv.h — what the parts of the Kubernetes client share: transfers and stores. kube*.c only. */
#ifndef KVP_IPC_KUBE_PRIV_H
#define KVP_IPC_KUBE_PRIV_H

#include "ipc/kube.h"

#include <curl/curl.h>

#define KUBE_ERROR_BYTES 4096u /* kept of the body of an error */
#define KUBE_RV_MAX 128u
#define KUBE_SECRET_MAX (1u << 20) /* bytes of a token, certificate, kubeconfig */

/* One HTTP exchange. on_data: 0 = go on, else the transfer ends (CURLE_WRITE_ERROR). on_end
 * comes once, from the loop, never from inside start; the transfer may be started again in it. */
struct kube_transfer {
	struct kvp_kube *k; /* NULL = not under way */
	CURL *easy;
	struct curl_slist *header;
	const char *path; /* for people; the owner's */
	int (*on_data)(struct kube_transfer *t, const char *p, size_t len);
	void (*on_end)(struct kube_transfer *t);
	void *ctx;
	CURLcode result;
	long status;	   /* of HTTP, 0 = none came */
	uint32_t retry_ms; /* Retry-After, 0 = none */
	uint32_t time_ms;  /* for all of it, 0 = for ever */
	size_t error_len;  /* of an answer other than 200 */
	char error[KUBE_ERROR_BYTES];
	char why[CURL_ERROR_SIZE];
};

struct kvp_kube {
	struct kvp_loop *loop;
	struct kvp_kube_cfg cfg;
	struct kvp_kube_stat stat;
	CURLM *multi;
	int epoll_fd;
	struct kvp_watch watch;
	struct kvp_timer timer;
	struct kvp_json *json;
	uint64_t random;
};

/* kube_transfer_start: path_query begins with a slash. on_data is called for bodies of answers with status
 * 200; others are kept in t->error. KVP_ERR_SYS. */
int kube_transfer_start(struct kvp_kube *k, struct kube_transfer *t, const char *path_query);
void kube_transfer_stop(struct kube_transfer *t); /* not under way: nothing; not from on_data */
/* kube_transfer_text says in one line how an ended transfer went: the API's message, curl's, or the
 * status. */
void kube_transfer_text(struct kube_transfer *t, char *text, size_t cap);
enum kvp_kube_trouble kube_transfer_trouble(const struct kube_transfer *t);
void kube_trouble(struct kvp_kube *k, enum kvp_kube_trouble what, const char *path, const char *text);
/* kube_backoff_ms: wait after the nth failure in a row, n from 1. */
uint32_t kube_backoff_ms(struct kvp_kube *k, uint32_t nth, uint32_t retry_ms);

/* Whole file, at most KUBE_SECRET_MAX bytes, with a final 0; heap. NULL: errno. */
char *kube_read_file(const char *path, size_t *len);

/* ---- store: name -> bytes ---- */

struct kube_entry {
	struct kube_entry *next;
	uint64_t hash;
	uint32_t name_len, mark;
	size_t len;
	char bytes[]; /* name, 0, what is kept */
};
struct kube_store {
	struct kube_entry **bucket;
	uint32_t bucket_cnt, cnt;
};
static inline struct kvp_kube_bytes kube_entry_bytes(const struct kube_entry *e)
{
	return (struct kvp_kube_bytes){e ? e->bytes + e->name_len + 1 : NULL, e ? e->len : 0};
}
struct kube_entry *kube_store_find(const struct kube_store *s, const char *name, size_t name_len);
/* kube_store_put adds or replaces; *was is the entry of before (NULL: none), the caller frees it.
 * KVP_ERR_SYS. */
int kube_store_put(struct kube_store *s, const char *name, size_t name_len, struct kvp_kube_bytes is,
	struct kube_entry **was);
/* kube_store_take removes and returns; the caller frees. NULL: there is none. */
struct kube_entry *kube_store_take(struct kube_store *s, const char *name, size_t name_len);
void kube_store_clear(struct kube_store *s);
/* kube_store_next walks: e NULL = from the start. Nothing may be put or taken meanwhile. */
struct kube_entry *kube_store_next(const struct kube_store *s, const struct kube_entry *e);
#endif
