/* The vectors of disagg.json that concern the sidecar's judgement: header_validation, llmd_header_selection,
 * handoff_validation, sampling_gate, body_derivation, sglang_stream_validation (cut at every byte), snowflake
 * ids. Exchanges run over sockets in tests/s_sidecar_vectors.t. */
#include <kvpick/err.h>
#include <stdlib.h>

#include "daemons/sidecar/sidecar.h"
#include "tests/vec.h"

static struct kvp_json *scratch;

/* Whether two values mean the same: members in any order. */
static int same(struct kvp_json_val a, struct kvp_json_val b)
{
	const char *s, *t;
	size_t n, m;
	double x, y;
	uint64_t u, v;
	if (kvp_json_type(a) != kvp_json_type(b) || kvp_json_len(a) != kvp_json_len(b))
		return 0;
	switch (kvp_json_type(a)) {
	case KVP_JSON_NULL:
		return 1;
	case KVP_JSON_BOOL: {
		int p, q;
		return !kvp_json_bool(a, &p) && !kvp_json_bool(b, &q) && p == q;
	}
	case KVP_JSON_INT:
		return !kvp_json_u64(a, &u) && !kvp_json_u64(b, &v) && u == v;
	case KVP_JSON_DOUBLE:
		return !kvp_json_double(a, &x) && !kvp_json_double(b, &y) && !(x < y) && !(x > y);
	case KVP_JSON_STR:
		return !kvp_json_str(a, &s, &n) && !kvp_json_str(b, &t, &m) && n == m && !memcmp(s, t, n);
	case KVP_JSON_ARR:
	case KVP_JSON_OBJ:
		break;
	}
	struct kvp_json_iter i = kvp_json_each(a), k = kvp_json_each(b);
	while (kvp_json_next(&i)) {
		struct kvp_json_val other;
		if (!i.key) {
			if (!kvp_json_next(&k) || !same(i.val, k.val))
				return 0;
		} else if (kvp_json_getn(b, i.key, i.key_len, &other) || !same(i.val, other)) {
			return 0;
		}
	}
	return 1;
}

/* Vectors hold values; the functions take texts. */
static void put(struct kvp_http_buf *b, const char *t)
{
	kvp_http_buf_put(b, t, strlen(t));
}

static void write_value(struct kvp_http_buf *b, struct kvp_json_val v)
{
	char num[64];
	const char *s, *sep = "";
	size_t n;
	uint64_t u;
	int64_t i64;
	double d;
	int on;
	struct kvp_json_iter it = kvp_json_each(v);
	switch (kvp_json_type(v)) {
	case KVP_JSON_NULL:
		put(b, "null");
		return;
	case KVP_JSON_BOOL:
		kvp_json_bool(v, &on);
		put(b, on ? "true" : "false");
		return;
	case KVP_JSON_INT:
		if (kvp_json_u64(v, &u) == KVP_OK)
			snprintf(num, sizeof(num), "%" PRIu64, u);
		else if (kvp_json_i64(v, &i64) == KVP_OK)
			snprintf(num, sizeof(num), "%" PRId64, i64);
		put(b, num);
		return;
	case KVP_JSON_DOUBLE:
		kvp_json_double(v, &d);
		snprintf(num, sizeof(num), "%.17g", d);
		put(b, num);
		if (!strpbrk(num, ".e"))
			put(b, ".0");
		return;
	case KVP_JSON_STR:
		kvp_json_str(v, &s, &n);
		put(b, "\"");
		kvp_http_buf_put(b, s, n); /* no vector needs an escape here */
		put(b, "\"");
		return;
	case KVP_JSON_ARR:
	case KVP_JSON_OBJ:
		break;
	}
	int is_obj = kvp_json_type(v) == KVP_JSON_OBJ;
	put(b, is_obj ? "{" : "[");
	while (kvp_json_next(&it)) {
		put(b, sep);
		sep = ",";
		if (is_obj) {
			put(b, "\"");
			kvp_http_buf_put(b, it.key, it.key_len);
			put(b, "\":");
		}
		write_value(b, it.val);
	}
	put(b, is_obj ? "}" : "]");
}

static void headers(struct kvp_json_val all)
{
	struct kvp_json_iter it = kvp_json_each(vec_get(all, "cases"));
	while (kvp_json_next(&it)) {
		struct kvp_target t;
		const char *v;
		size_t n;
		int want = 0;
		kvp_json_bool(vec_get(it.val, "valid"), &want);
		kvp_json_str(vec_get(it.val, "value"), &v, &n);
		int got = kvp_target_parse(v, n, &t) == KVP_OK;
		ok(got == want, "header '%s' is %s", v, want ? "a target" : "none");
		/* Leading zeros of the port are not kept. */
		if (got && want && !strstr(v, ":0"))
			is_str(t.authority, v, "its text is kept");
		else if (got && want)
			ok(strncmp(t.authority, v, strlen(t.host)) == 0, "its host is kept");
	}
}

static void selections(struct kvp_json_val all)
{
	struct kvp_json_iter it = kvp_json_each(all);
	while (kvp_json_next(&it)) {
		struct kvp_target_text line[8], out[8];
		size_t n = 0;
		int sampling = 0;
		struct kvp_json_iter l = kvp_json_each(vec_get(it.val, "field_lines"));
		while (kvp_json_next(&l) && n < 8) {
			kvp_json_str(l.val, &line[n].ptr, &line[n].len);
			n++;
		}
		kvp_json_bool(vec_get(it.val, "sampling"), &sampling);
		struct kvp_json_val want = vec_get(it.val, "result");
		size_t got = kvp_target_pick(line, n, out, sampling ? 8 : 1);
		if (!is_u64(got, kvp_json_type(want) == KVP_JSON_STR ? 0 : kvp_json_len(want),
			    "%zu lines, %s: number of targets", n, sampling ? "one at random" : "the first"))
			continue;
		struct kvp_json_iter w = kvp_json_each(want);
		for (size_t i = 0; kvp_json_next(&w); i++) {
			const char *s;
			size_t len;
			kvp_json_str(w.val, &s, &len);
			ok(out[i].len == len && !memcmp(out[i].ptr, s, len), "target %zu is %s", i, s);
		}
	}
}

static void handoffs(struct kvp_json_val all)
{
	struct kvp_json_iter it = kvp_json_each(all);
	while (kvp_json_next(&it)) {
		struct kvp_http_buf b = {0};
		struct kvp_span p;
		struct kvp_json_val root, want_params, got_params;
		int want = 0;
		kvp_json_bool(vec_get(it.val, "valid"), &want);
		write_value(&b, vec_get(it.val, "prefill_response"));
		int got = kvp_vllm_handoff(b.p, b.len, &p) == KVP_OK;
		ok(got == want, "handoff %s is %s", vec_str(it.val, "name"), want ? "valid" : "refused");
		if (got && want) {
			kvp_json_get(vec_get(it.val, "prefill_response"), "kv_transfer_params", &want_params);
			got = kvp_json_parse(scratch, b.p + p.at, p.len, 128, &root, NULL);
			got_params = root;
			ok(got == KVP_OK && same(got_params, want_params), "and is passed on whole");
		}
		kvp_http_buf_free(&b);
	}
}

static void gate(struct kvp_json_val all, const char *backend)
{
	struct kvp_json_iter it = kvp_json_each(vec_get(all, backend));
	while (kvp_json_next(&it)) {
		struct kvp_http_buf b = {0};
		struct kvp_json_val n = vec_get(it.val, "n");
		struct kvp_member m = {.key = "n"};
		int want = 0;
		kvp_json_bool(vec_get(it.val, "ok"), &want);
		if (kvp_json_str_is(n, "<absent>"))
			put(&b, "{}");
		else
			write_value(&b, it.val);
		ok(kvp_pd_valid(b.p, b.len) == KVP_OK &&
				kvp_span_members(b.p, kvp_span_all(b.len), &m, 1) == KVP_OK &&
				kvp_pd_one(b.p, &m) == want,
			"%s: n in %.*s is %s", backend, (int)b.len, b.p, want ? "accepted" : "refused");
		kvp_http_buf_free(&b);
	}
}

static void streams(struct kvp_json_val all)
{
	unsigned cnt = 0;
	struct kvp_json_iter it = kvp_json_each(all);
	while (kvp_json_next(&it)) {
		const char *body;
		size_t len, wrong = 0;
		int streaming = 0, want = 0;
		kvp_json_str(vec_get(it.val, "body"), &body, &len);
		kvp_json_bool(vec_get(it.val, "streaming"), &streaming);
		kvp_json_bool(vec_get(it.val, "complete"), &want);
		for (size_t cut = 0; cut <= len; cut++) {
			struct kvp_sgl_check c;
			kvp_sgl_open(&c, streaming ? KVP_SGL_EVENTS : KVP_SGL_JSON);
			int rc = kvp_sgl_feed(&c, body, cut);
			rc = rc ? rc : kvp_sgl_feed(&c, body + cut, len - cut);
			wrong += (rc == KVP_OK && kvp_sgl_end(&c) == KVP_OK) != want;
			kvp_sgl_close(&c);
		}
		ok(wrong == 0, "answer %u of %s is %s, cut anywhere", ++cnt, streaming ? "events" : "JSON",
			want ? "complete" : "incomplete");
	}
}

/* The body of a leg as an adapter makes it, against the value that it must mean. */
static void derive(
	const struct kvp_adapter *a, struct kvp_json_val original, struct kvp_json_val want, const char *what)
{
	struct kvp_req r = {.path = KVP_PATH_CHAT};
	struct kvp_http_buf out = {0};
	struct kvp_json_val got;
	write_value(&r.body, original);
	ok(a->prefill_body(&r, &out) == KVP_OK &&
			kvp_json_parse(scratch, out.p, out.len, 128, &got, NULL) == KVP_OK && same(got, want),
		"%s of %.*s", what, (int)r.body.len, r.body.p);
	kvp_http_buf_free(&out);
	kvp_http_buf_free(&r.body);
}

static void bodies(struct kvp_json_val all)
{
	static const char handoff[] =
		"{\"x\":1,\"kv_transfer_params\":{\"do_remote_prefill\":true,\"do_remote_decode\":false,"
		"\"remote_block_ids\":[],\"remote_engine_id\":\"e\",\"remote_request_id\":\"r\","
		"\"remote_host\":\"h\",\"remote_port\":1}}";
	struct kvp_json_iter it = kvp_json_each(all);
	while (kvp_json_next(&it)) {
		struct kvp_json_val original = vec_get(it.val, "original"), got, v;
		derive(&kvp_adapter_vllm, original, vec_get(it.val, "vllm_prefill"), "vLLM prefill body");
		derive(&kvp_adapter_llmd, original, vec_get(it.val, "llmd_prefill"), "other profile's body");
		struct kvp_req r = {.path = KVP_PATH_CHAT};
		struct kvp_http_buf out = {0}, less = {0};
		struct kvp_fail f;
		const struct kvp_edit drop = {.key = "kv_transfer_params"};
		write_value(&r.body, original);
		int rc = kvp_adapter_vllm.prefill_answer(&r, handoff, sizeof(handoff) - 1, &out, &f);
		int full = rc == KVP_ANSWER_DECODE &&
			   !kvp_json_parse(scratch, out.p, out.len, 128, &got, NULL) &&
			   !kvp_json_get(got, "kv_transfer_params", &v) && kvp_json_len(v) == 7;
		ok(full && !kvp_span_edit(out.p, kvp_span_all(out.len), &drop, 1, &less) &&
				!kvp_json_parse(scratch, less.p, less.len, 128, &got, NULL) &&
				same(got, vec_get(it.val, "vllm_decode_minus_handoff")),
			"vLLM decode body is the client's, and the handoff");
		kvp_http_buf_free(&out);
		kvp_http_buf_free(&less);
		kvp_http_buf_free(&r.body);
	}
}

static void ids(struct kvp_json_val all)
{
	struct kvp_json_iter it = kvp_json_each(all);
	while (kvp_json_next(&it)) {
		uint64_t ms = vec_num(vec_get(it.val, "timestamp_ms"));
		is_u64(kvp_trt_id(ms, (unsigned)vec_num(vec_get(it.val, "node_id")),
			       (unsigned)vec_num(vec_get(it.val, "process_id")),
			       (unsigned)vec_num(vec_get(it.val, "counter"))),
			vec_num(vec_get(it.val, "id")), "id of %" PRIu64 " ms", ms);
	}
	int good = 1;
	for (int i = 0; i < 1000; i++) {
		uint64_t id = kvp_trt_random_id();
		good &= id >= UINT64_C(1) << 40 && id < UINT64_C(1) << 63;
	}
	ok(good && kvp_trt_random_id() != kvp_trt_random_id(), "random ids are in 2^40 .. 2^63");
	ok(kvp_trt_id(0, 0, 0, 0) >= UINT64_C(1) << 40, "an early clock gives a global id, too");
}

int main(void)
{
	struct kvp_json *vec = kvp_json_new();
	scratch = kvp_json_new();
	struct kvp_json_val root = vec_load(vec, "disagg.json");
	headers(vec_get(root, "header_validation"));
	selections(vec_get(root, "llmd_header_selection"));
	handoffs(vec_get(root, "handoff_validation"));
	gate(vec_get(root, "sampling_gate"), "vllm_nixl");
	gate(vec_get(root, "sampling_gate"), "sglang");
	bodies(vec_get(root, "body_derivation"));
	streams(vec_get(root, "sglang_stream_validation"));
	ids(vec_get(root, "snowflake_ids"));
	kvp_json_free(scratch);
	kvp_json_free(vec);
	return done();
}
