/* ipc/kube.h — the Kubernetes API: who and where it is, single GETs, and reflectors (LIST, then WATCH for
 * ever).
 *
 * Shape      struct kvp_kube_access: address and credentials, from the pod's service account, a kubeconfig or
 *            a plain address. struct kvp_kube: one client on one loop (libcurl's multi interface; its sockets
 *            are watched through one epoll descriptor). struct kvp_kube_reflector: a copy of all objects of
 *            one kind under one path, each reduced to the bytes that the user keeps of it.
 * Truth      the API server. A reflector holds what it was last told completely: pages of a list are gathered
 *            aside and take effect together behind the last one, as differences to what was known.
 * Writers    the loop's thread.
 * Readers    the same thread.
 * Ordering   on_change calls come in the order of the server's events; those of a list before its on_synced.
 *            resourceVersions are passed back as they came. Where they are numbers (they are with every known
 *            server) an event that is not newer than the last one of its watch is not applied: a repeated one
 *            is forgotten, one that comes late has the objects listed anew.
 * Lifetime   open to close. Reflectors are closed before their client, neither from a callback.
 * Failures   never final: back-off from KVP_KUBE_BACKOFF_MIN_MS doubling to KVP_KUBE_BACKOFF_MAX_MS, each
 *            shortened by up to a half at random, or Retry-After when that is longer. What is known stays
 *            meanwhile. The token file is read before every request, so a rotated one is used at once and
 *            after 401.
 * Limits     KVP_KUBE_PAGE_BYTES a page (a longer one is asked for in smaller pages), KVP_KUBE_EVENT_BYTES an
 *            event. No proxy is used and no redirect followed: both would be given the token.
 * Crash      process-local.
 * Proved by  tests/t_kube.c (access, framing), tests/s_kube_reflector.t (against a server that misbehaves)
 */
#ifndef KVP_IPC_KUBE_H
#define KVP_IPC_KUBE_H

#include "ipc/json_in.h"
#include "ipc/loop.h"

#define KVP_KUBE_PAGE_CNT 500u		/* objects a page */
#define KVP_KUBE_PAGE_BYTES (64u << 20) /* of a page */
#define KVP_KUBE_EVENT_BYTES (8u << 20) /* of a line of a watch */
#define KVP_KUBE_BACKOFF_MIN_MS 800u
#define KVP_KUBE_BACKOFF_MAX_MS 30000u
#define KVP_KUBE_RETRY_AFTER_MAX_MS 60000u
#define KVP_KUBE_WATCH_S 290u	      /* after which the server ends a watch */
#define KVP_KUBE_IDLE_MS 120000u      /* a watch without a byte (bookmarks come every minute) is made anew */
#define KVP_KUBE_LIST_MS 60000u	      /* for one page */
#define KVP_KUBE_RELIST_GAP_MS 10000u /* between two lists that only doubts ask for */
#define KVP_KUBE_NAME_MAX 253u

/* ---- access ---- */

/* Fixed strings; "" = none. Bytes of certificates and keys are PEM, heap. */
struct kvp_kube_access {
	char base[1280];       /* "https://10.0.0.1:443", without a final slash */
	char token_file[1024]; /* read before every request */
	char ca_file[1024];
	char namespace_[254];		   /* that the credentials name */
	char *token;			   /* heap, NULL = none; token_file goes before it */
	char *ca_pem, *cert_pem, *key_pem; /* heap, NULL = none */
	int insecure; /* 1: the server's certificate is not checked (the kubeconfig says so) */
};

struct kvp_kube_where {
	const char *url;	 /* wins; with the service account's token and CA if these are there */
	const char *host;	 /* KUBERNETES_SERVICE_HOST */
	uint32_t port;		 /* KUBERNETES_SERVICE_PORT, 0 = none */
	const char *kubeconfig;	 /* KUBECONFIG, its first file */
	const char *account_dir; /* NULL = where the kubelet puts the service account */
};

/* kvp_kube_access_find chooses: url, else in-cluster, else kubeconfig. KVP_OK; KVP_ERR_NOTFOUND nothing is
 * configured; KVP_ERR_INVAL with *why (one line). Free with kvp_kube_access_free, also after an error. */
int kvp_kube_access_find(
	const struct kvp_kube_where *w, struct kvp_kube_access *out, char *why, size_t why_cap);
/* kvp_kube_access_file reads the current context of a kubeconfig. Same answers. */
int kvp_kube_access_file(const char *path, struct kvp_kube_access *out, char *why, size_t why_cap);
void kvp_kube_access_free(struct kvp_kube_access *a);

/* ---- client ---- */

enum kvp_kube_trouble {
	KVP_KUBE_CONNECT,   /* no connection, TLS, or it broke */
	KVP_KUBE_STATUS,    /* an HTTP status that is an error */
	KVP_KUBE_FORBIDDEN, /* 403: a rule of RBAC is missing; text says which */
	KVP_KUBE_DENIED,    /* 401: the token or certificate is not accepted */
	KVP_KUBE_ABSENT,    /* 404: the API does not have that */
	KVP_KUBE_GARBLED,   /* an answer that is not what it should be, or too long */
	KVP_KUBE_IDLE,	    /* a watch without a byte for too long */
	KVP_KUBE_TROUBLE_CNT
};
const char *kvp_kube_trouble_name(enum kvp_kube_trouble t);

struct kvp_kube_stat { /* since open */
	uint64_t requests, bytes;
	uint64_t lists, pages, watches, events, bookmarks;
	uint64_t relists; /* lists after the first: 410, a late event, an event that could not be read */
	uint64_t gone;	  /* 410 */
	uint64_t repeated, late; /* events not newer than what was seen */
	uint64_t skipped;	 /* objects without a name, or that digest refused */
	uint64_t token_reads;
	uint64_t trouble[KVP_KUBE_TROUBLE_CNT];
};

struct kvp_kube_cfg {
	const struct kvp_kube_access *access; /* outlives the client */
	uint32_t backoff_min_ms, backoff_max_ms, idle_ms, list_ms, watch_s, page_cnt; /* 0 = the constants */
	uint32_t page_bytes, event_bytes, relist_gap_ms;			      /* same */
	uint64_t seed;								      /* of the jitter */
	/* once a failed request; path is the request's, text one line */
	void (*on_trouble)(void *ctx, enum kvp_kube_trouble t, const char *path, const char *text);
	void *ctx;
};

struct kvp_kube;
struct kvp_kube_reflector;

/* kvp_kube_open: KVP_ERR_SYS. */
int kvp_kube_open(struct kvp_loop *l, const struct kvp_kube_cfg *cfg, struct kvp_kube **out);
void kvp_kube_close(struct kvp_kube *k);
const struct kvp_kube_stat *kvp_kube_stat(const struct kvp_kube *k);

/* kvp_kube_get asks once. on_reply: status of HTTP (0 = no answer: text says why) and the body, valid during
 * the call; the struct may be reused or freed in it. kvp_kube_get_end gives up; no callback. */
struct kvp_kube_get {
	struct kvp_kube *k; /* NULL = not under way */
	void *transfer;
	void (*on_reply)(void *ctx, struct kvp_kube_get *g, long status, const char *text, size_t len);
	void *ctx;
};
int kvp_kube_get(struct kvp_kube *k, struct kvp_kube_get *g, const char *path,
	void (*on_reply)(void *, struct kvp_kube_get *, long, const char *, size_t), void *ctx);
void kvp_kube_get_end(struct kvp_kube_get *g);

/* ---- reflector ---- */

/* Growing bytes that digest writes. kvp_kube_put: KVP_ERR_SYS without memory. */
struct kvp_kube_buf {
	char *p;
	size_t len, cap;
};
int kvp_kube_put(struct kvp_kube_buf *b, const void *p, size_t len);

struct kvp_kube_bytes {
	const char *p; /* NULL = there is no object */
	size_t len;
};

struct kvp_kube_reflector_cfg {
	const char *
		path[2]; /* from "/api": of a collection; the second is tried where the first is not served */
	const char *query; /* further parameters, encoded, without & or ?; NULL = none */
	/* digest appends to out what is kept of an object; equal bytes are no change. which: index of path.
	 * Anything but KVP_OK: the object is left out as if it did not exist, and counted. */
	int (*digest)(void *ctx, int which, struct kvp_json_val object, struct kvp_kube_buf *out);
	/* An object came (was.p NULL), changed, or went (is.p NULL). name has a final 0. */
	void (*on_change)(void *ctx, const char *name, struct kvp_kube_bytes was, struct kvp_kube_bytes is);
	/* A list is complete and all its differences were told. */
	void (*on_synced)(void *ctx);
	void *ctx;
};

/* kvp_kube_reflect starts listing. The cfg is copied; path and query need not outlive the call. KVP_ERR_SYS,
 * KVP_ERR_INVAL. */
int kvp_kube_reflect(
	struct kvp_kube *k, const struct kvp_kube_reflector_cfg *cfg, struct kvp_kube_reflector **out);
void kvp_kube_reflector_close(struct kvp_kube_reflector *r);
/* kvp_kube_is_synced: 1 after the first complete list. kvp_kube_is_listing: 1 while a list is under way, so
 * that changes are to come together. kvp_kube_is_watching: 1 while a watch is open. */
int kvp_kube_is_synced(const struct kvp_kube_reflector *r);
int kvp_kube_is_listing(const struct kvp_kube_reflector *r);
int kvp_kube_is_watching(const struct kvp_kube_reflector *r);
uint32_t kvp_kube_count(const struct kvp_kube_reflector *r);
/* kvp_kube_find: what is kept of an object by name; p NULL = there is none. kvp_kube_each calls fn for all,
 * in no order; fn changes nothing. */
struct kvp_kube_bytes kvp_kube_find(const struct kvp_kube_reflector *r, const char *name);
void kvp_kube_each(const struct kvp_kube_reflector *r,
	void (*fn)(void *ctx, const char *name, struct kvp_kube_bytes is), void *ctx);
/* kvp_kube_relist has everything listed anew, soon. */
void kvp_kube_relist(struct kvp_kube_reflector *r);
#endif
