/* ipc/kube_http.c — exchanges with the API server: libcurl's sockets and timer on our loop, credentials,
 * errors. HTTP/1.1 only: every watch has its own connection, so none waits behind another. */
#include "ipc/kube_priv.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <unistd.h>

#define CONNECT_MS 10000L
#define KEEP_IDLE_S 15L /* a server that is gone without a word is noticed in half a minute */
#define KEEP_EVERY_S 5L
#define EVENTS 32

const char *kvp_kube_trouble_name(enum kvp_kube_trouble t)
{
	static const char *const name[] = {
		"connection", "status", "forbidden", "unauthorized", "not_served", "garbled", "idle"};
	return (uint32_t)t < KVP_KUBE_TROUBLE_CNT ? name[t] : "?";
}

void kube_trouble(struct kvp_kube *k, enum kvp_kube_trouble what, const char *path, const char *text)
{
	k->stat.trouble[what]++;
	if (k->cfg.on_trouble)
		k->cfg.on_trouble(k->cfg.ctx, what, path, text);
}

/* ---- libcurl on the loop ---- */

static void reap(struct kvp_kube *k)
{
	CURLMsg *m;
	int left;
	while ((m = curl_multi_info_read(k->multi, &left))) {
		struct kube_transfer *t = NULL;
		if (m->msg != CURLMSG_DONE)
			continue;
		CURLcode result = m->data.result;
		curl_easy_getinfo(m->easy_handle, CURLINFO_PRIVATE, (char **)&t);
		curl_off_t wait_s = 0;
		curl_easy_getinfo(m->easy_handle, CURLINFO_RETRY_AFTER, &wait_s);
		curl_easy_getinfo(m->easy_handle, CURLINFO_RESPONSE_CODE, &t->status);
		t->retry_ms = wait_s <= 0				    ? 0
			      : wait_s > KVP_KUBE_RETRY_AFTER_MAX_MS / 1000 ? KVP_KUBE_RETRY_AFTER_MAX_MS
									    : (uint32_t)wait_s * 1000;
		t->result = result;
		kube_transfer_stop(t);
		t->on_end(t);
	}
}

static void on_epoll(void *ctx, int fd)
{
	struct kvp_kube *k = ctx;
	struct epoll_event ev[EVENTS];
	int running, n = epoll_wait(fd, ev, EVENTS, 0);
	for (int i = 0; i < n; i++) {
		int what = (ev[i].events & EPOLLIN ? CURL_CSELECT_IN : 0) |
			   (ev[i].events & EPOLLOUT ? CURL_CSELECT_OUT : 0) |
			   (ev[i].events & (EPOLLERR | EPOLLHUP) ? CURL_CSELECT_ERR : 0);
		curl_multi_socket_action(k->multi, ev[i].data.fd, what, &running);
	}
	reap(k);
}

static void on_timer(void *ctx, struct kvp_timer *timer)
{
	struct kvp_kube *k = ctx;
	int running;
	(void)timer;
	curl_multi_socket_action(k->multi, CURL_SOCKET_TIMEOUT, 0, &running);
	reap(k);
}

static int set_timer(CURLM *multi, long ms, void *ctx)
{
	struct kvp_kube *k = ctx;
	(void)multi;
	if (ms < 0)
		kvp_timer_cancel(k->loop, &k->timer);
	else
		kvp_timer_set(
			k->loop, &k->timer, kvp_loop_now_ns(k->loop) + (uint64_t)ms * 1000000, on_timer, k);
	return 0;
}

static int set_socket(CURL *easy, curl_socket_t fd, int what, void *ctx, void *known)
{
	struct kvp_kube *k = ctx;
	struct epoll_event ev = {.data.fd = fd};
	(void)easy;
	if (what == CURL_POLL_REMOVE) {
		epoll_ctl(k->epoll_fd, EPOLL_CTL_DEL, fd, NULL); /* closed already: nothing to remove */
		return 0;
	}
	ev.events = (what & CURL_POLL_IN ? EPOLLIN : 0u) | (what & CURL_POLL_OUT ? EPOLLOUT : 0u);
	if (epoll_ctl(k->epoll_fd, known ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd, &ev) != 0)
		epoll_ctl(k->epoll_fd, known ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, fd, &ev);
	curl_multi_assign(k->multi, fd, k);
	return 0;
}

int kvp_kube_open(struct kvp_loop *l, const struct kvp_kube_cfg *cfg, struct kvp_kube **out)
{
	static int is_set_up;
	if (!is_set_up && curl_global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK)
		return KVP_ERR_SYS;
	is_set_up = 1;
	struct kvp_kube *k = calloc(1, sizeof(*k));
	if (!k)
		return KVP_ERR_SYS;
	k->loop = l;
	k->cfg = *cfg;
	k->random = cfg->seed | 1;
	k->cfg.backoff_min_ms = cfg->backoff_min_ms ? cfg->backoff_min_ms : KVP_KUBE_BACKOFF_MIN_MS;
	k->cfg.backoff_max_ms = cfg->backoff_max_ms ? cfg->backoff_max_ms : KVP_KUBE_BACKOFF_MAX_MS;
	k->cfg.idle_ms = cfg->idle_ms ? cfg->idle_ms : KVP_KUBE_IDLE_MS;
	k->cfg.list_ms = cfg->list_ms ? cfg->list_ms : KVP_KUBE_LIST_MS;
	k->cfg.watch_s = cfg->watch_s ? cfg->watch_s : KVP_KUBE_WATCH_S;
	k->cfg.page_cnt = cfg->page_cnt ? cfg->page_cnt : KVP_KUBE_PAGE_CNT;
	k->cfg.page_bytes = cfg->page_bytes ? cfg->page_bytes : KVP_KUBE_PAGE_BYTES;
	k->cfg.event_bytes = cfg->event_bytes ? cfg->event_bytes : KVP_KUBE_EVENT_BYTES;
	k->cfg.relist_gap_ms = cfg->relist_gap_ms ? cfg->relist_gap_ms : KVP_KUBE_RELIST_GAP_MS;
	k->json = kvp_json_new();
	k->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	k->multi = curl_multi_init();
	if (!k->json || k->epoll_fd < 0 || !k->multi ||
		kvp_loop_watch_fd(l, &k->watch, k->epoll_fd, on_epoll, k)) {
		kvp_kube_close(k);
		return KVP_ERR_SYS;
	}
	curl_multi_setopt(k->multi, CURLMOPT_SOCKETFUNCTION, set_socket);
	curl_multi_setopt(k->multi, CURLMOPT_SOCKETDATA, k);
	curl_multi_setopt(k->multi, CURLMOPT_TIMERFUNCTION, set_timer);
	curl_multi_setopt(k->multi, CURLMOPT_TIMERDATA, k);
	*out = k;
	return KVP_OK;
}

void kvp_kube_close(struct kvp_kube *k)
{
	if (!k)
		return;
	if (k->multi)
		curl_multi_cleanup(k->multi);
	kvp_timer_cancel(k->loop, &k->timer);
	kvp_loop_unwatch(&k->watch);
	if (k->epoll_fd >= 0)
		close(k->epoll_fd);
	kvp_json_free(k->json);
	free(k);
}

const struct kvp_kube_stat *kvp_kube_stat(const struct kvp_kube *k)
{
	return &k->stat;
}

/* ---- transfers ---- */

/* The status is known when the headers are complete, not only with the first byte of a body. */
static size_t on_header(char *p, size_t one, size_t n, void *ctx)
{
	struct kube_transfer *t = ctx;
	(void)one;
	if (n == 2 && p[0] == '\r')
		curl_easy_getinfo(t->easy, CURLINFO_RESPONSE_CODE, &t->status);
	return n;
}

static size_t on_body(char *p, size_t one, size_t n, void *ctx)
{
	struct kube_transfer *t = ctx;
	(void)one;
	t->k->stat.bytes += n;
	if (t->status == 200)
		return t->on_data(t, p, n) == 0 ? n : 0;
	size_t room = KUBE_ERROR_BYTES - t->error_len, keep = n < room ? n : room;
	memcpy(t->error + t->error_len, p, keep);
	t->error_len += keep;
	return n;
}

/* The token as it is now: of the file, if there is one, so that a rotated one counts at once. It does not go
 * over a connection that anybody can read. */
static int set_token(struct kube_transfer *t)
{
	const struct kvp_kube_access *a = t->k->cfg.access;
	char *head = NULL, *read = NULL;
	const char *token = a->token;
	size_t len = 0;
	if (strncmp(a->base, "https://", 8) != 0)
		return KVP_OK;
	if (a->token_file[0]) {
		t->k->stat.token_reads++;
		token = read = kube_read_file(a->token_file, &len);
		if (read)
			read[strcspn(read, " \t\r\n")] = 0;
	}
	int rc = KVP_OK;
	if (token && token[0]) {
		rc = asprintf(&head, "Authorization: Bearer %s", token) < 0 ? KVP_ERR_SYS : KVP_OK;
		struct curl_slist *l = rc ? NULL : curl_slist_append(t->header, head);
		rc = l ? KVP_OK : KVP_ERR_SYS;
		t->header = l ? l : t->header;
		if (head)
			explicit_bzero(head, strlen(head));
		free(head);
	}
	if (read)
		explicit_bzero(read, len);
	free(read);
	return rc;
}

static void set_blob(CURL *e, CURLoption what, char *pem)
{
	struct curl_blob b = {.data = pem, .len = strlen(pem), .flags = CURL_BLOB_COPY};
	curl_easy_setopt(e, what, &b);
}

static void set_tls(CURL *e, const struct kvp_kube_access *a)
{
	if (a->ca_file[0]) {
		curl_easy_setopt(e, CURLOPT_CAINFO, a->ca_file);
		curl_easy_setopt(e, CURLOPT_CAPATH, NULL);
	}
	if (a->ca_pem) {
		set_blob(e, CURLOPT_CAINFO_BLOB, a->ca_pem);
		curl_easy_setopt(e, CURLOPT_CAPATH, NULL);
	}
	if (a->cert_pem && a->key_pem) {
		set_blob(e, CURLOPT_SSLCERT_BLOB, a->cert_pem);
		set_blob(e, CURLOPT_SSLKEY_BLOB, a->key_pem);
	}
	if (a->insecure) {
		curl_easy_setopt(e, CURLOPT_SSL_VERIFYPEER, 0L);
		curl_easy_setopt(e, CURLOPT_SSL_VERIFYHOST, 0L);
	}
}

static int set_up(struct kube_transfer *t, const char *path_query)
{
	CURL *e = t->easy;
	char *url = NULL;
	if (asprintf(&url, "%s%s", t->k->cfg.access->base, path_query) < 0)
		return KVP_ERR_SYS;
	CURLcode rc = curl_easy_setopt(e, CURLOPT_URL, url);
	free(url);
	if (rc != CURLE_OK || set_token(t))
		return KVP_ERR_SYS;
	struct curl_slist *l = curl_slist_append(t->header, "Accept: application/json");
	if (!l)
		return KVP_ERR_SYS;
	t->header = l;
	curl_easy_setopt(e, CURLOPT_PRIVATE, t);
	curl_easy_setopt(e, CURLOPT_HTTPHEADER, t->header);
	curl_easy_setopt(e, CURLOPT_USERAGENT, "kvpick");
	curl_easy_setopt(e, CURLOPT_NOSIGNAL, 1L);
	curl_easy_setopt(e, CURLOPT_PROXY, "");
	curl_easy_setopt(e, CURLOPT_PROTOCOLS_STR, "http,https");
	curl_easy_setopt(e, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
	curl_easy_setopt(e, CURLOPT_HEADERFUNCTION, on_header);
	curl_easy_setopt(e, CURLOPT_HEADERDATA, t);
	curl_easy_setopt(e, CURLOPT_WRITEFUNCTION, on_body);
	curl_easy_setopt(e, CURLOPT_WRITEDATA, t);
	curl_easy_setopt(e, CURLOPT_ERRORBUFFER, t->why);
	curl_easy_setopt(e, CURLOPT_CONNECTTIMEOUT_MS, CONNECT_MS);
	curl_easy_setopt(e, CURLOPT_TIMEOUT_MS, (long)t->time_ms);
	curl_easy_setopt(e, CURLOPT_TCP_KEEPALIVE, 1L);
	curl_easy_setopt(e, CURLOPT_TCP_KEEPIDLE, KEEP_IDLE_S);
	curl_easy_setopt(e, CURLOPT_TCP_KEEPINTVL, KEEP_EVERY_S);
	set_tls(e, t->k->cfg.access);
	return KVP_OK;
}

int kube_transfer_start(struct kvp_kube *k, struct kube_transfer *t, const char *path_query)
{
	t->k = k;
	t->header = NULL;
	t->result = CURLE_OK;
	t->status = 0;
	t->retry_ms = 0;
	t->error_len = 0;
	t->why[0] = 0;
	t->easy = curl_easy_init();
	if (!t->easy || set_up(t, path_query) || curl_multi_add_handle(k->multi, t->easy) != CURLM_OK) {
		if (t->easy)
			curl_easy_cleanup(t->easy);
		curl_slist_free_all(t->header);
		t->k = NULL;
		return KVP_ERR_SYS;
	}
	k->stat.requests++;
	return KVP_OK;
}

void kube_transfer_stop(struct kube_transfer *t)
{
	if (!t->k)
		return;
	curl_multi_remove_handle(t->k->multi, t->easy);
	curl_easy_cleanup(t->easy);
	curl_slist_free_all(t->header);
	t->easy = NULL;
	t->header = NULL;
	t->k = NULL;
}

enum kvp_kube_trouble kube_transfer_trouble(const struct kube_transfer *t)
{
	return t->result != CURLE_OK || !t->status ? KVP_KUBE_CONNECT
	       : t->status == 401		   ? KVP_KUBE_DENIED
	       : t->status == 403		   ? KVP_KUBE_FORBIDDEN
	       : t->status == 404		   ? KVP_KUBE_ABSENT
						   : KVP_KUBE_STATUS;
}

/* The message of a Status object, without bytes that would disturb a log. */
static size_t api_message(struct kvp_json *json, const char *body, size_t len, char *text, size_t cap)
{
	struct kvp_json_val root, v;
	const char *s;
	size_t n = 0, to = 0;
	if (!len || kvp_json_parse(json, body, len, 16, &root, NULL) || kvp_json_get(root, "message", &v) ||
		kvp_json_str(v, &s, &n))
		return 0;
	for (size_t i = 0; i < n && to + 1 < cap; i++)
		text[to++] = (unsigned char)s[i] < ' ' ? ' ' : s[i];
	text[to] = 0;
	return to;
}

void kube_transfer_text(struct kube_transfer *t, char *text, size_t cap)
{
	char message[512];
	if (t->result != CURLE_OK) {
		snprintf(text, cap, "%s", t->why[0] ? t->why : curl_easy_strerror(t->result));
		return;
	}
	struct kvp_json *json = kvp_json_new();
	size_t n = json ? api_message(json, t->error, t->error_len, message, sizeof(message)) : 0;
	kvp_json_free(json);
	snprintf(text, cap, "HTTP %ld%s%s", t->status, n ? ": " : "", n ? message : "");
}

uint32_t kube_backoff_ms(struct kvp_kube *k, uint32_t nth, uint32_t retry_ms)
{
	uint64_t ms = k->cfg.backoff_min_ms;
	for (uint32_t i = 1; i < nth && ms < k->cfg.backoff_max_ms; i++)
		ms *= 2;
	if (ms > k->cfg.backoff_max_ms)
		ms = k->cfg.backoff_max_ms;
	k->random ^= k->random << 13;
	k->random ^= k->random >> 7;
	k->random ^= k->random << 17;
	ms -= k->random % (ms / 2 + 1);
	return ms > retry_ms ? (uint32_t)ms : retry_ms;
}

/* ---- single requests ---- */

struct get {
	struct kube_transfer t;
	struct kvp_kube *k; /* the transfer forgets its own at its end */
	struct kvp_kube_get *of;
	struct kvp_kube_buf body;
};

static void get_free(struct get *g)
{
	kube_transfer_stop(&g->t);
	free(g->body.p);
	free(g);
}

static int get_data(struct kube_transfer *t, const char *p, size_t len)
{
	struct get *g = t->ctx;
	return g->body.len + len > KUBE_SECRET_MAX ? -1 : kvp_kube_put(&g->body, p, len);
}

static void get_end(struct kube_transfer *t)
{
	struct get *g = t->ctx;
	struct kvp_kube_get *of = g->of;
	char text[CURL_ERROR_SIZE + 64];
	of->k = NULL;
	of->transfer = NULL;
	if (t->result == CURLE_OK && t->status == 200) {
		of->on_reply(of->ctx, of, t->status, g->body.p ? g->body.p : "", g->body.len);
	} else {
		kube_transfer_text(t, text, sizeof(text));
		kube_trouble(g->k, kube_transfer_trouble(t), t->path, text);
		of->on_reply(of->ctx, of, t->result == CURLE_OK ? t->status : 0, text, strlen(text));
	}
	get_free(g);
}

int kvp_kube_get(struct kvp_kube *k, struct kvp_kube_get *of, const char *path,
	void (*on_reply)(void *, struct kvp_kube_get *, long, const char *, size_t), void *ctx)
{
	struct get *g = calloc(1, sizeof(*g));
	if (!g)
		return KVP_ERR_SYS;
	g->k = k;
	g->of = of;
	g->t.path = path;
	g->t.on_data = get_data;
	g->t.on_end = get_end;
	g->t.ctx = g;
	g->t.time_ms = k->cfg.list_ms;
	*of = (struct kvp_kube_get){.k = k, .transfer = g, .on_reply = on_reply, .ctx = ctx};
	int rc = kube_transfer_start(k, &g->t, path);
	if (rc) {
		of->k = NULL;
		free(g);
	}
	return rc;
}

void kvp_kube_get_end(struct kvp_kube_get *of)
{
	if (!of->k)
		return;
	of->k = NULL;
	get_free(of->transfer);
}
