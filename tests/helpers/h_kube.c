/* A reflector on the command line: one JSON line an event on stdout, for tests/s_kube_reflector.t.
 *
 * h_kube KEY=VALUE...: url, account, kubeconfig, path, path2, query; page, page_bytes, event_bytes, idle_ms,
 * list_ms, backoff_ms, backoff_max_ms, watch_s, gap_ms. Kept of an object is the text spec.v; spec.bad has it
 * refused. A line on stdin: relist, stat, each, get PATH, quit. */
#include "ipc/json_out.h"
#include "ipc/kube.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct kvp_loop *loop;
static struct kvp_kube *kube;
static struct kvp_kube_reflector *ref;
static struct kvp_kube_get get;
static char get_path[1024];

static const char *arg_text(int argc, char **argv, const char *key)
{
	size_t n = strlen(key);
	for (int i = 1; i < argc; i++)
		if (strncmp(argv[i], key, n) == 0 && argv[i][n] == '=')
			return argv[i] + n + 1;
	return NULL;
}

static uint32_t arg_u32(int argc, char **argv, const char *key)
{
	const char *s = arg_text(argc, argv, key);
	return s ? (uint32_t)strtoul(s, NULL, 10) : 0;
}

static void say(const char *what, const char *a, const char *b, const char *c)
{
	struct kvp_jw w;
	kvp_jw_init(&w);
	kvp_jw_arr(&w);
	kvp_jw_str(&w, what);
	for (int i = 0; i < 3; i++) {
		const char *s = i == 0 ? a : i == 1 ? b : c;
		if (s)
			kvp_jw_str(&w, s);
		else
			kvp_jw_null(&w);
	}
	kvp_jw_end(&w);
	printf("%.*s\n", (int)w.len, w.buf);
	fflush(stdout);
	kvp_jw_free(&w);
}

static int digest(void *ctx, int which, struct kvp_json_val obj, struct kvp_kube_buf *out)
{
	struct kvp_json_val spec, v;
	const char *s = "";
	size_t len = 0;
	(void)ctx;
	(void)which;
	if (!kvp_json_get(obj, "spec", &spec)) {
		if (!kvp_json_get(spec, "bad", &v))
			return KVP_ERR_PROTO;
		if (!kvp_json_get(spec, "v", &v))
			kvp_json_str(v, &s, &len);
	}
	return kvp_kube_put(out, s, len + 1);
}

static void on_change(void *ctx, const char *name, struct kvp_kube_bytes was, struct kvp_kube_bytes is)
{
	(void)ctx;
	say("change", name, was.p, is.p);
}

static void on_synced(void *ctx)
{
	char n[32];
	(void)ctx;
	snprintf(n, sizeof(n), "%u", kvp_kube_count(ref));
	say("synced", n, NULL, NULL);
}

static void on_trouble(void *ctx, enum kvp_kube_trouble t, const char *path, const char *text)
{
	(void)ctx;
	say("trouble", kvp_kube_trouble_name(t), path, text);
}

static void say_stat(void)
{
	const struct kvp_kube_stat *s = kvp_kube_stat(kube);
	struct kvp_jw w;
	kvp_jw_init(&w);
	kvp_jw_arr(&w);
	kvp_jw_str(&w, "stat");
	kvp_jw_obj(&w);
	kvp_jw_ku64(&w, "lists", s->lists);
	kvp_jw_ku64(&w, "pages", s->pages);
	kvp_jw_ku64(&w, "watches", s->watches);
	kvp_jw_ku64(&w, "events", s->events);
	kvp_jw_ku64(&w, "bookmarks", s->bookmarks);
	kvp_jw_ku64(&w, "gone", s->gone);
	kvp_jw_ku64(&w, "repeated", s->repeated);
	kvp_jw_ku64(&w, "late", s->late);
	kvp_jw_ku64(&w, "skipped", s->skipped);
	kvp_jw_ku64(&w, "requests", s->requests);
	kvp_jw_ku64(&w, "watching", (uint64_t)kvp_kube_is_watching(ref));
	kvp_jw_ku64(&w, "synced", (uint64_t)kvp_kube_is_synced(ref));
	kvp_jw_end(&w);
	kvp_jw_end(&w);
	printf("%.*s\n", (int)w.len, w.buf);
	fflush(stdout);
	kvp_jw_free(&w);
}

static void on_each(void *ctx, const char *name, struct kvp_kube_bytes is)
{
	(void)ctx;
	say("each", name, is.p, kvp_kube_find(ref, name).p);
}

static void on_reply(void *ctx, struct kvp_kube_get *g, long status, const char *text, size_t len)
{
	char code[32], body[256];
	(void)ctx;
	(void)g;
	snprintf(code, sizeof(code), "%ld", status);
	snprintf(body, sizeof(body), "%.*s", (int)(len < 200 ? len : 200), text);
	say("got", code, body, NULL);
}

static void command(const char *line)
{
	if (strcmp(line, "quit") == 0)
		kvp_loop_stop(loop);
	else if (strcmp(line, "relist") == 0)
		kvp_kube_relist(ref);
	else if (strcmp(line, "stat") == 0)
		say_stat();
	else if (strcmp(line, "each") == 0)
		kvp_kube_each(ref, on_each, NULL);
	else if (strncmp(line, "get ", 4) == 0) {
		snprintf(get_path, sizeof(get_path), "%s", line + 4);
		kvp_kube_get(kube, &get, get_path, on_reply, NULL);
	}
}

static void on_stdin(void *ctx, int fd)
{
	static char line[1024];
	static size_t len;
	char *end;
	(void)ctx;
	ssize_t n = read(fd, line + len, sizeof(line) - 1 - len);
	if (n <= 0) {
		kvp_loop_stop(loop);
		return;
	}
	len += (size_t)n;
	line[len] = 0;
	while ((end = strchr(line, '\n'))) {
		*end = 0;
		command(line);
		len -= (size_t)(end + 1 - line);
		memmove(line, end + 1, len + 1);
	}
}

int main(int argc, char **argv)
{
	static struct kvp_kube_access access;
	char why[512] = "";
	struct kvp_watch in = {.fd = -1};
	const char *url = arg_text(argc, argv, "url");
	struct kvp_kube_where where = {.url = url,
		.kubeconfig = arg_text(argc, argv, "kubeconfig"),
		.account_dir = arg_text(argc, argv, "account"),
		.host = arg_text(argc, argv, "host"),
		.port = arg_u32(argc, argv, "port")};
	if (kvp_kube_access_find(&where, &access, why, sizeof(why))) {
		say("access", why, NULL, NULL);
		return 1;
	}
	struct kvp_kube_cfg cfg = {.access = &access,
		.page_cnt = arg_u32(argc, argv, "page"),
		.page_bytes = arg_u32(argc, argv, "page_bytes"),
		.event_bytes = arg_u32(argc, argv, "event_bytes"),
		.idle_ms = arg_u32(argc, argv, "idle_ms"),
		.list_ms = arg_u32(argc, argv, "list_ms"),
		.backoff_min_ms = arg_u32(argc, argv, "backoff_ms"),
		.backoff_max_ms = arg_u32(argc, argv, "backoff_max_ms"),
		.relist_gap_ms = arg_u32(argc, argv, "gap_ms"),
		.watch_s = arg_u32(argc, argv, "watch_s"),
		.seed = 7,
		.on_trouble = on_trouble};
	struct kvp_kube_reflector_cfg rc = {
		.path = {arg_text(argc, argv, "path"), arg_text(argc, argv, "path2")},
		.query = arg_text(argc, argv, "query"),
		.digest = digest,
		.on_change = on_change,
		.on_synced = on_synced};
	if (kvp_loop_open(&loop, 0) || kvp_kube_open(loop, &cfg, &kube) ||
		kvp_kube_reflect(kube, &rc, &ref) || kvp_loop_watch_fd(loop, &in, 0, on_stdin, NULL))
		return 2;
	kvp_loop_run(loop);
	kvp_kube_get_end(&get);
	kvp_kube_reflector_close(ref);
	kvp_kube_close(kube);
	kvp_loop_close(loop);
	kvp_kube_access_free(&access);
	return 0;
}
