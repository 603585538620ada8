#include "daemons/discovery/workers_file.h"
#include "daemons/common/worker_record.h"
#include "ipc/json_out.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>
#include <yaml.h>

#define DEPTH_MAX 8 /* of a worker */

/* Beside the members of a registration: which role the worker has, with roles. */
#define ROLE "role"

struct reading {
	yaml_document_t doc;
	enum kvp_part_role role; /* of the worker at hand */
	struct kvp_jw w;	 /* the worker at hand */
	struct kvp_json *json;
	char *err;
	size_t err_cap;
	struct kvp_workers_list list;
};

static int fail(struct reading *r, const yaml_node_t *at, int rc, const char *what, const char *more)
{
	snprintf(r->err, r->err_cap, "line %zu: %s%s%.200s", at ? at->start_mark.line + 1 : 1, what,
		more[0] ? ": " : "", more);
	return rc;
}

/* ---- a YAML node as JSON ---- */

static int is_word(const yaml_node_t *n, const char *word)
{
	return strcasecmp((const char *)n->data.scalar.value, word) == 0;
}

/* is_number tells what JSON calls one. */
static int is_number(const char *t)
{
	t += *t == '-';
	if (*t == '0')
		t++;
	else if (*t >= '1' && *t <= '9')
		t += strspn(t, "0123456789");
	else
		return 0;
	if (*t == '.') {
		size_t n = strspn(t + 1, "0123456789");
		if (!n)
			return 0;
		t += 1 + n;
	}
	if (*t == 'e' || *t == 'E') {
		t += 1 + (t[1] == '+' || t[1] == '-');
		size_t n = strspn(t, "0123456789");
		if (!n)
			return 0;
		t += n;
	}
	return !*t;
}

static void scalar(struct kvp_jw *w, const yaml_node_t *n)
{
	const char *t = (const char *)n->data.scalar.value;
	size_t len = n->data.scalar.length;
	if (n->data.scalar.style != YAML_PLAIN_SCALAR_STYLE || strlen(t) != len)
		kvp_jw_strn(w, t, len);
	else if (!len || is_word(n, "null") || is_word(n, "~"))
		kvp_jw_null(w);
	else if (is_word(n, "true") || is_word(n, "false"))
		kvp_jw_bool(w, is_word(n, "true"));
	else if (is_number(t))
		kvp_jw_raw(w, t, len);
	else
		kvp_jw_strn(w, t, len);
}

/* value writes a node with everything in it. Aliases are written out, so depth and length have bounds. */
static int value(struct reading *r, int at, int depth)
{
	yaml_node_t *n = yaml_document_get_node(&r->doc, at);
	if (!n)
		return KVP_ERR_PROTO;
	if (depth > DEPTH_MAX)
		return fail(r, n, KVP_ERR_LIMIT, "nested too deep", "");
	if (r->w.len > KVP_CMD_PAYLOAD_MAX)
		return fail(r, n, KVP_ERR_LIMIT, "a worker is longer than 73728 bytes", "");
	int rc = KVP_OK;
	if (n->type == YAML_SCALAR_NODE) {
		scalar(&r->w, n);
	} else if (n->type == YAML_SEQUENCE_NODE) {
		kvp_jw_arr(&r->w);
		for (yaml_node_item_t *i = n->data.sequence.items.start;
			i < n->data.sequence.items.top && !rc; i++)
			rc = value(r, *i, depth + 1);
		kvp_jw_end(&r->w);
	} else {
		kvp_jw_obj(&r->w);
		yaml_node_pair_t *p = n->data.mapping.pairs.start;
		for (; p < n->data.mapping.pairs.top && !rc; p++) {
			yaml_node_t *k = yaml_document_get_node(&r->doc, p->key);
			if (!k || k->type != YAML_SCALAR_NODE)
				return fail(r, n, KVP_ERR_PROTO, "a key is not a scalar", "");
			if (depth == 0 && strcmp((const char *)k->data.scalar.value, ROLE) == 0)
				continue;
			kvp_jw_keyn(&r->w, (const char *)k->data.scalar.value, k->data.scalar.length);
			rc = value(r, p->value, depth + 1);
		}
		kvp_jw_end(&r->w);
	}
	return rc || r->w.err == KVP_OK ? rc : fail(r, n, KVP_ERR_SYS, "out of memory", "");
}

/* ---- one worker ---- */

static int read_role(struct reading *r, const yaml_node_t *at)
{
	if (!at || at->type != YAML_SCALAR_NODE)
		return fail(r, at, KVP_ERR_PROTO, "role is not prefill or decode", "");
	if (!is_word(at, "prefill") && !is_word(at, "decode"))
		return fail(r, at, KVP_ERR_PROTO, "role is not prefill or decode",
			(const char *)at->data.scalar.value);
	r->role = is_word(at, "prefill") ? KVP_PART_PREFILL : KVP_PART_DECODE;
	return KVP_OK;
}

/* check_members: every key is a member of a registration, and comes once. */
static int check_members(struct reading *r, const yaml_node_t *n)
{
	for (yaml_node_pair_t *p = n->data.mapping.pairs.start; p < n->data.mapping.pairs.top; p++) {
		const yaml_node_t *k = yaml_document_get_node(&r->doc, p->key);
		if (!k || k->type != YAML_SCALAR_NODE)
			return fail(r, n, KVP_ERR_PROTO, "a key is not a scalar", "");
		const char *name = (const char *)k->data.scalar.value;
		int is_role = strcmp(name, ROLE) == 0;
		if (strlen(name) != k->data.scalar.length || (!is_role && !kvp_wrec_is_member(name)))
			return fail(r, k, KVP_ERR_PROTO, "unknown member", name);
		int rc = is_role ? read_role(r, yaml_document_get_node(&r->doc, p->value)) : KVP_OK;
		if (rc)
			return rc;
		for (yaml_node_pair_t *q = n->data.mapping.pairs.start; q < p; q++) {
			const yaml_node_t *o = yaml_document_get_node(&r->doc, q->key);
			if (strcmp((const char *)o->data.scalar.value, name) == 0)
				return fail(r, k, KVP_ERR_PROTO, "member comes twice", name);
		}
	}
	return KVP_OK;
}

static int one_worker(struct reading *r, int at)
{
	const yaml_node_t *n = yaml_document_get_node(&r->doc, at);
	struct kvp_wrec rec;
	struct kvp_wrec_err why;
	if (!n || n->type != YAML_MAPPING_NODE)
		return fail(r, n, KVP_ERR_PROTO, "a worker is not a mapping", "");
	kvp_jw_reset(&r->w);
	r->role = KVP_PART_AGGREGATED;
	int rc = check_members(r, n);
	rc = rc ? rc : value(r, at, 0);
	if (rc)
		return rc;
	if (r->w.len > KVP_CMD_PAYLOAD_MAX)
		return fail(r, n, KVP_ERR_LIMIT, "a worker is longer than 73728 bytes", "");
	if (kvp_wrec_post(r->json, r->w.buf, r->w.len, &rec, &why))
		return fail(r, n, KVP_ERR_PROTO, "not a worker", why.text);
	char *json = malloc(r->w.len);
	if (json) {
		memcpy(json, r->w.buf, r->w.len);
		r->list.want[r->list.cnt++] = (struct kvp_catalog_want){
			.worker_id = rec.worker_id, .json = json, .len = (uint32_t)r->w.len, .role = r->role};
	}
	kvp_wrec_free(&rec);
	return json ? KVP_OK : fail(r, n, KVP_ERR_SYS, "out of memory", "");
}

/* ---- the list ---- */

static int all_workers(struct reading *r, const yaml_node_t *list)
{
	const yaml_node_item_t *i = list->data.sequence.items.start, *top = list->data.sequence.items.top;
	size_t n = (size_t)(top - i);
	if (n > KVP_WORKERS_MAX)
		return fail(r, list, KVP_ERR_LIMIT, "more than 65536 workers", "");
	r->list.want = calloc(n + 1, sizeof(*r->list.want));
	int rc = r->list.want ? KVP_OK : fail(r, list, KVP_ERR_SYS, "out of memory", "");
	for (; i < top && !rc; i++)
		rc = one_worker(r, *i);
	return rc;
}

static int document(struct reading *r)
{
	const yaml_node_t *root = yaml_document_get_root_node(&r->doc);
	if (!root || root->type != YAML_MAPPING_NODE)
		return fail(r, root, KVP_ERR_PROTO, "not a mapping with the key workers", "");
	const yaml_node_pair_t *p = root->data.mapping.pairs.start;
	const yaml_node_t *k =
		p < root->data.mapping.pairs.top ? yaml_document_get_node(&r->doc, p->key) : NULL;
	if (!k || k->type != YAML_SCALAR_NODE || strcmp((const char *)k->data.scalar.value, "workers") != 0 ||
		p + 1 < root->data.mapping.pairs.top)
		return fail(r, root, KVP_ERR_PROTO, "the one key is workers", "");
	const yaml_node_t *list = yaml_document_get_node(&r->doc, p->value);
	if (list && list->type == YAML_SCALAR_NODE && !list->data.scalar.length)
		return KVP_OK; /* "workers:" and nothing: none */
	if (!list || list->type != YAML_SEQUENCE_NODE)
		return fail(r, list ? list : root, KVP_ERR_PROTO, "workers is not a list", "");
	return all_workers(r, list);
}

int kvp_workers_parse(const char *text, size_t len, struct kvp_workers_list *out, char *err, size_t err_cap)
{
	struct reading r = {.err = err, .err_cap = err_cap};
	yaml_parser_t p;
	if (!yaml_parser_initialize(&p)) {
		snprintf(err, err_cap, "out of memory");
		return KVP_ERR_SYS;
	}
	yaml_parser_set_input_string(&p, (const unsigned char *)text, len);
	int rc;
	if (!yaml_parser_load(&p, &r.doc)) {
		snprintf(err, err_cap, "line %zu: %s", p.problem_mark.line + 1,
			p.problem ? p.problem : "syntax error");
		yaml_parser_delete(&p);
		return KVP_ERR_PROTO;
	}
	kvp_jw_init(&r.w);
	r.json = kvp_json_new();
	rc = r.json ? document(&r) : fail(&r, NULL, KVP_ERR_SYS, "out of memory", "");
	yaml_document_delete(&r.doc);
	if (!rc && yaml_parser_load(&p, &r.doc)) {
		if (yaml_document_get_root_node(&r.doc))
			rc = fail(&r, NULL, KVP_ERR_PROTO, "more than one document", "");
		yaml_document_delete(&r.doc);
	}
	yaml_parser_delete(&p);
	kvp_json_free(r.json);
	kvp_jw_free(&r.w);
	if (rc)
		kvp_workers_list_free(&r.list);
	else
		*out = r.list;
	return rc;
}

void kvp_workers_list_free(struct kvp_workers_list *l)
{
	for (uint32_t i = 0; i < l->cnt; i++)
		free((void *)(uintptr_t)l->want[i].json);
	free(l->want);
	*l = (struct kvp_workers_list){.cnt = 0};
}

/* ---- the file ---- */

static void look(const char *path, uint64_t out[5])
{
	struct stat st;
	memset(out, 0, 5 * sizeof(*out));
	if (stat(path, &st))
		return;
	out[0] = (uint64_t)st.st_dev;
	out[1] = (uint64_t)st.st_ino;
	out[2] = (uint64_t)st.st_size;
	out[3] = (uint64_t)st.st_mtim.tv_sec * 1000000000u + (uint64_t)st.st_mtim.tv_nsec;
	out[4] = 1;
}

int kvp_workers_watch_poll(struct kvp_workers_watch *w, uint64_t now_ns)
{
	uint64_t now[5];
	look(w->path, now);
	if (memcmp(now, w->seen, sizeof(now)) != 0 || !w->since_ns) {
		memcpy(w->seen, now, sizeof(now));
		w->since_ns = now_ns;
	}
	if (now_ns - w->since_ns < KVP_WORKERS_QUIET_NS ||
		(w->any && memcmp(now, w->taken, sizeof(now)) == 0))
		return 0;
	memcpy(w->taken, now, sizeof(now));
	w->any = 1;
	return 1;
}

static int read_all(int fd, char *buf, size_t len)
{
	for (size_t n = 0; n < len;) {
		ssize_t k = read(fd, buf + n, len - n);
		if (k < 0 && errno == EINTR)
			continue;
		if (k <= 0)
			return 0;
		n += (size_t)k;
	}
	return 1;
}

int kvp_workers_file_read(const char *path, struct kvp_workers_list *out, char *err, size_t err_cap)
{
	uint64_t before[5], after[5];
	look(path, before);
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
	if (fd < 0 || before[2] > KVP_WORKERS_BYTES_MAX) {
		snprintf(err, err_cap, "%s", fd < 0 ? strerror(errno) : "longer than 64 MiB");
		if (fd >= 0)
			close(fd);
		return fd < 0 ? KVP_ERR_SYS : KVP_ERR_LIMIT;
	}
	char *text = malloc(before[2] + 1);
	int is_read = text && read_all(fd, text, before[2]);
	close(fd);
	look(path, after);
	int rc = !text						    ? KVP_ERR_SYS
		 : !is_read || memcmp(before, after, sizeof(after)) ? KVP_ERR_AGAIN
								    : KVP_OK;
	if (rc)
		snprintf(err, err_cap, "%s", text ? "it changed while it was read" : "out of memory");
	else
		rc = kvp_workers_parse(text, before[2], out, err, err_cap);
	free(text);
	return rc;
}
