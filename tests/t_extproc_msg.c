/* Every message of ext_proc.json both ways: bytes to the struct that the description names, the struct to
 * these bytes; then what no vector has: metadata of every shape, pieces, limits, hostile bytes. */
#include "ipc/extproc_msg.h"
#include "ipc/grpc_health.h"
#include "tests/vec.h"

#include <kvpick/err.h>

#include <openssl/sha.h>

#define S KVP_EXTPROC_STR
#define CNT(a) (uint32_t)(sizeof(a) / sizeof((a)[0]))
#define BODY "{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}"
#define CHUNK "data: {\"choices\":[{\"delta\":{\"content\":\"h\"}}]}\n\n"
#define LAST                                                                                                 \
	"data: {\"choices\":[],\"usage\":{\"prompt_tokens\":8,\"completion_tokens\":2,\"total_tokens\":10,"  \
	"\"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\ndata: [DONE]\n\n"

static struct kvp_extproc_dec *dec;

/* A literal of another width than KVP_EXTPROC_STR allows in a static initialiser. */
#define T(lit)                                                                                               \
	{                                                                                                    \
		(lit), sizeof(lit) - 1                                                                       \
	}
static const struct kvp_extproc_header h_post[] = {{T(":method"), T("POST")},
	{T(":path"), T("/v1/chat/completions")}, {T("content-type"), T("application/json")},
	{T("x-request-id"), T("r1")}};
static const struct kvp_extproc_header h_mixed[] = {{T("X-Request-Id"), T("r1")}};
static const struct kvp_extproc_header h_r1[] = {{T("x-request-id"), T("r1")}};
static const struct kvp_extproc_header h_r3[] = {{T("x-request-id"), T("r3")}};
static const struct kvp_extproc_header h_r4[] = {{T("x-request-id"), T("r4")}};
static const struct kvp_extproc_header h_get[] = {
	{T(":method"), T("GET")}, {T(":path"), T("/v1/models")}, {T("x-request-id"), T("r2")}};
static const struct kvp_extproc_header h_sse[] = {
	{T(":status"), T("200")}, {T("content-type"), T("text/event-stream; charset=utf-8")}};
static const struct kvp_extproc_header h_200[] = {{T(":status"), T("200")}};
static const struct kvp_extproc_str sub_list[] = {T("10.0.0.7:8000"), T("10.0.0.9")};
static const struct kvp_extproc_str sub_string[] = {T("10.0.0.7:8000"), T("[fd00::9]:8000")};

/* DECODE: the message has a form that we read but never write. */
enum way { BOTH, DECODE };
struct in_row {
	const char *name;
	enum way way;
	struct kvp_extproc_req want;
};
#define HEADERS(h) .kind = KVP_EXTPROC_REQUEST_HEADERS, .header = (h), .header_cnt = CNT(h)
#define CONFIG(q, s, f)                                                                                      \
	.has_config = 1, .request_body_mode = (q), .response_body_mode = (s), .send_body_without_waiting = (f)
static const struct in_row in_rows[] = {
	{"req_headers_post_full_duplex", BOTH, {HEADERS(h_post), CONFIG(4, 4, 1)}},
	{"req_headers_value_field", DECODE, {HEADERS(h_mixed)}},
	{"req_headers_subset_list", BOTH,
		{HEADERS(h_r1), .subset_hint = KVP_EXTPROC_HINT_PRESENT, .subset = sub_list,
			.subset_cnt = 2}},
	{"req_headers_subset_string", DECODE,
		{HEADERS(h_r1), .subset_hint = KVP_EXTPROC_HINT_PRESENT, .subset = sub_string,
			.subset_cnt = 2}},
	{"req_headers_subset_empty_list", BOTH, {HEADERS(h_r1), .subset_hint = KVP_EXTPROC_HINT_PRESENT}},
	{"req_cfg_response_none", BOTH, {HEADERS(h_r1), CONFIG(4, 0, 1)}},
	{"req_cfg_request_streamed", BOTH, {HEADERS(h_r1), CONFIG(1, 4, 1)}},
	{"req_cfg_response_buffered", BOTH, {HEADERS(h_r1), CONFIG(4, 2, 1)}},
	{"req_cfg_flag_false", BOTH, {HEADERS(h_r1), CONFIG(4, 4, 0)}},
	{"req_body_single_eos", BOTH,
		{.kind = KVP_EXTPROC_REQUEST_BODY, .body = T(BODY), .end_of_stream = 1}},
	{"req_body_chunk1", BOTH, {.kind = KVP_EXTPROC_REQUEST_BODY, .body = {BODY, 20}}},
	{"req_body_chunk2_eos", BOTH,
		{.kind = KVP_EXTPROC_REQUEST_BODY,
			.body = {&BODY[20], sizeof(BODY) - 21},
			.end_of_stream = 1}},
	{"req_body_empty_eos", BOTH, {.kind = KVP_EXTPROC_REQUEST_BODY, .end_of_stream = 1}},
	{"req_request_trailers_empty", BOTH, {.kind = KVP_EXTPROC_REQUEST_TRAILERS}},
	{"req_response_headers_served", BOTH,
		{.kind = KVP_EXTPROC_RESPONSE_HEADERS,
			.header = h_sse,
			.header_cnt = CNT(h_sse),
			.served = T("10.0.0.7:8000")}},
	{"req_response_headers_served_list", DECODE,
		{.kind = KVP_EXTPROC_RESPONSE_HEADERS,
			.header = h_200,
			.header_cnt = 1,
			.served = T("10.0.0.9:8000")}},
	{"req_response_body_chunk", BOTH, {.kind = KVP_EXTPROC_RESPONSE_BODY, .body = T(CHUNK)}},
	{"req_response_body_last", BOTH,
		{.kind = KVP_EXTPROC_RESPONSE_BODY, .body = T(LAST), .end_of_stream = 1}},
	{"req_response_trailers", BOTH, {.kind = KVP_EXTPROC_RESPONSE_TRAILERS}},
	{"req_headers_get_models", BOTH, {HEADERS(h_get), .end_of_stream = 1}},
	{"req_headers_observability", BOTH, {HEADERS(h_r3), .observability_mode = 1}},
	{"req_unknown_fields", DECODE,
		{.kind = KVP_EXTPROC_REQUEST_BODY, .body = T(BODY), .end_of_stream = 1}},
	{"req_empty_message", BOTH, {.kind = KVP_EXTPROC_NONE}},
	{"req_headers_attributes", DECODE, {HEADERS(h_r4)}},
};

#define DEST "x-gateway-destination-endpoint"
static const struct kvp_extproc_str removed[] = {T("x-gateway-inference-fairness-id"),
	T("x-gateway-inference-objective"), T("x-gateway-model-name-rewrite"),
	T("x-gateway-destination-endpoint-subset"), T("x-gateway-destination-endpoint-served"),
	T("x-prefiller-host-port")};
#define OVER KVP_EXTPROC_OVERWRITE_OR_ADD
static const struct kvp_extproc_set_header set_v4[] = {{T(DEST), T("10.0.0.7:8000"), OVER}};
static const struct kvp_extproc_set_header set_v6[] = {{T(DEST), T("[fd00::7]:8000"), OVER}};
static const struct kvp_extproc_set_header set_list[] = {{T(DEST), T("10.0.0.7:8000,10.0.0.9:8000"), OVER}};
static const struct kvp_extproc_set_header set_pd[] = {
	{T(DEST), T("10.0.0.7:8000"), OVER}, {T("x-prefiller-host-port"), T("10.0.0.21:8000"), OVER}};
static const struct kvp_extproc_set_header set_retry[] = {{T("retry-after"), T("1"), OVER}};

struct out_row {
	const char *name;
	struct kvp_extproc_reply reply;
};
#define PICK(s, dest, n)                                                                                     \
	.kind = KVP_EXTPROC_ANSWER_REQUEST_HEADERS, .clear_route_cache = 1, .set = (s), .set_cnt = CNT(s),   \
	.remove = removed, .remove_cnt = (n), .destination = T(dest)
#define PIECE(k, text, end)                                                                                  \
	.kind = (k), .mutation = KVP_EXTPROC_BODY_STREAMED_PIECE, .body = T(text), .end_of_stream = (end)
#define IMMEDIATE(code, text) .kind = KVP_EXTPROC_ANSWER_IMMEDIATE, .http_status = (code), .body = T(text)
static const struct out_row out_rows[] = {
	{"resp_req_headers_aggregated", {PICK(set_v4, "10.0.0.7:8000", 6)}},
	{"resp_req_headers_ipv6", {PICK(set_v6, "[fd00::7]:8000", 6)}},
	{"resp_req_headers_fallbacks", {PICK(set_list, "10.0.0.7:8000,10.0.0.9:8000", 6)}},
	{"resp_req_headers_disaggregated", {PICK(set_pd, "10.0.0.7:8000", 5)}},
	{"resp_req_body_single", {PIECE(KVP_EXTPROC_ANSWER_REQUEST_BODY, BODY, 1)}},
	{"resp_req_body_empty", {PIECE(KVP_EXTPROC_ANSWER_REQUEST_BODY, "", 1)}},
	{"resp_response_headers", {.kind = KVP_EXTPROC_ANSWER_RESPONSE_HEADERS}},
	{"resp_response_body_chunk", {PIECE(KVP_EXTPROC_ANSWER_RESPONSE_BODY, CHUNK, 0)}},
	{"resp_response_body_last", {PIECE(KVP_EXTPROC_ANSWER_RESPONSE_BODY, LAST, 1)}},
	{"resp_response_trailers", {.kind = KVP_EXTPROC_ANSWER_RESPONSE_TRAILERS}},
	{"imm_503_no_endpoints", {IMMEDIATE(503, "no endpoints available")}},
	{"imm_503_overloaded", {IMMEDIATE(503, "endpoint picker overloaded")}},
	{"imm_503_cache_not_ready", {IMMEDIATE(503, "pod reflector cache not ready")}},
	{"imm_503_tokenizer_unavailable", {IMMEDIATE(503, "tokenization service unavailable")}},
	{"imm_504_tokenizer_timeout", {IMMEDIATE(504, "tokenization service timed out")}},
	{"imm_502_tokenizer_error", {IMMEDIATE(502, "tokenization service error")}},
	{"imm_400_tokenizer_rejected", {IMMEDIATE(400, "request rejected by tokenization service")}},
	{"imm_431_metadata", {IMMEDIATE(431, "metadata headers exceed the limit of 64 entries")}},
	{"imm_429_evicted", {IMMEDIATE(429, "request evicted by flow control")}},
	{"imm_429_shed_retry_after_1",
		{IMMEDIATE(429, "all eligible workers are overloaded"), .set = set_retry, .set_cnt = 1}},
	{"imm_429_queue_rejected_no_hint", {IMMEDIATE(429, "router queue limit reached")}},
	{"imm_409_conflict", {IMMEDIATE(409, "reservation conflict")}},
	{"imm_500_internal", {IMMEDIATE(500, "internal routing error")}},
	{"resp_req_body_continue", {.kind = KVP_EXTPROC_ANSWER_REQUEST_BODY}},
	{"resp_req_body_replace_buffered", {.kind = KVP_EXTPROC_ANSWER_REQUEST_BODY,
						   .mutation = KVP_EXTPROC_BODY_REPLACE,
						   .body = T(BODY)}},
	{"resp_req_body_clear",
		{.kind = KVP_EXTPROC_ANSWER_REQUEST_BODY, .mutation = KVP_EXTPROC_BODY_CLEAR}},
};

static int same(struct kvp_extproc_str a, struct kvp_extproc_str b)
{
	return a.len == b.len && (!a.len || memcmp(a.p, b.p, a.len) == 0);
}

static int same_req(const struct kvp_extproc_req *a, const struct kvp_extproc_req *b)
{
	int eq = a->kind == b->kind && a->header_cnt == b->header_cnt &&
		 a->end_of_stream == b->end_of_stream && a->observability_mode == b->observability_mode &&
		 a->has_config == b->has_config &&
		 a->send_body_without_waiting == b->send_body_without_waiting &&
		 a->request_body_mode == b->request_body_mode &&
		 a->response_body_mode == b->response_body_mode && same(a->body, b->body) &&
		 a->subset_hint == b->subset_hint && a->subset_cnt == b->subset_cnt &&
		 same(a->served, b->served);
	for (uint32_t i = 0; eq && i < a->header_cnt; i++)
		eq = same(a->header[i].key, b->header[i].key) && same(a->header[i].value, b->header[i].value);
	for (uint32_t i = 0; eq && i < a->subset_cnt; i++)
		eq = same(a->subset[i], b->subset[i]);
	return eq;
}

static int same_reply(const struct kvp_extproc_reply *a, const struct kvp_extproc_reply *b)
{
	int eq = a->kind == b->kind && a->clear_route_cache == b->clear_route_cache &&
		 a->end_of_stream == b->end_of_stream && a->mutation == b->mutation &&
		 same(a->body, b->body) && a->set_cnt == b->set_cnt && a->remove_cnt == b->remove_cnt &&
		 a->http_status == b->http_status && same(a->destination, b->destination);
	for (uint32_t i = 0; eq && i < a->set_cnt; i++)
		eq = same(a->set[i].key, b->set[i].key) && same(a->set[i].value, b->set[i].value) &&
		     a->set[i].append == b->set[i].append;
	for (uint32_t i = 0; eq && i < a->remove_cnt; i++)
		eq = same(a->remove[i], b->remove[i]);
	return eq;
}

/* The message cut in three at every place, each part an allocation of its own. */
static int same_in_parts(const uint8_t *wire, size_t len, const struct kvp_extproc_req *want)
{
	for (size_t a = 0; a <= len; a++) {
		size_t b = a + (len - a) / 2, cut[4] = {0, a, b, len}, n = 0;
		struct iovec part[3];
		struct kvp_extproc_req got;
		for (int i = 0; i < 3; i++) {
			size_t k = cut[i + 1] - cut[i];
			part[n] = (struct iovec){malloc(k + 1), k};
			if (k)
				memcpy(part[n].iov_base, wire + cut[i], k);
			else
				free(part[n].iov_base);
			n += k != 0;
		}
		int good = kvp_extproc_req_decode_parts(dec, part, (uint32_t)n, &got) == KVP_OK;
		good = good && (!got.body_more_cnt || got.kind == KVP_EXTPROC_REQUEST_BODY);
		struct kvp_extproc_str whole = {malloc(len + 1), 0};
		for (uint32_t i = 0; good && i <= got.body_more_cnt; i++) {
			struct kvp_extproc_str s = i ? got.body_more[i - 1] : got.body;
			if (s.len)
				memcpy((char *)(uintptr_t)whole.p + whole.len, s.p, s.len);
			whole.len += s.len;
		}
		if (good)
			got.body = whole;
		good = good && same_req(&got, want);
		free((void *)(uintptr_t)whole.p);
		while (n)
			free(part[--n].iov_base);
		if (!good)
			return 0;
	}
	return 1;
}

static void check_in(const struct in_row *r, const uint8_t *wire, size_t len)
{
	struct kvp_extproc_req got;
	ok(kvp_extproc_req_decode(dec, wire, len, &got) == KVP_OK && same_req(&got, &r->want),
		"%s is read as described", r->name);
	ok(same_in_parts(wire, len, &r->want), "%s in parts", r->name);
	size_t n = 0;
	uint8_t *out = kvp_extproc_req_new(&r->want, &n);
	if (r->way == BOTH)
		ok(out && n == len && (!n || memcmp(out, wire, n) == 0), "%s is written byte for byte",
			r->name);
	else
		ok(out && kvp_extproc_req_decode(dec, out, n, &got) == KVP_OK && same_req(&got, &r->want),
			"%s in our own form means the same", r->name);
	free(out);
}

static void check_out(const struct out_row *r, const uint8_t *wire, size_t len)
{
	struct kvp_extproc_reply got;
	size_t n = 0;
	uint8_t *out = kvp_extproc_reply_new(&r->reply, &n);
	ok(out && n == len && memcmp(out, wire, n) == 0, "%s is written byte for byte", r->name);
	ok(kvp_extproc_reply_decode(dec, wire, len, &got) == KVP_OK && same_reply(&got, &r->reply),
		"%s is read back", r->name);
	free(out);
}

/* The three pieces of a body of 130,000 bytes, of which the vectors have digests. */
static void check_piece(struct kvp_json_val v, uint32_t want_idx)
{
	static char body[130000];
	struct kvp_extproc_pieces cut = {.body = {body, sizeof(body)}, .end_of_stream = 1};
	struct kvp_extproc_reply r = {
		.kind = KVP_EXTPROC_ANSWER_REQUEST_BODY, .mutation = KVP_EXTPROC_BODY_STREAMED_PIECE};
	for (uint32_t i = 0; i < sizeof(body); i++)
		body[i] = (char)(7 * i + 3);
	for (uint32_t i = 0; kvp_extproc_piece_next(&cut, &r.body, &r.end_of_stream); i++) {
		uint8_t sum[32];
		char hex[65] = "";
		size_t n = 0;
		uint8_t *out = i == want_idx ? kvp_extproc_reply_new(&r, &n) : NULL;
		if (!out)
			continue;
		struct kvp_extproc_frame f;
		ok(kvp_extproc_reply_frame(&r, &f) && f.head_len + r.body.len + f.tail_len == n &&
				memcmp(out, f.head, f.head_len) == 0 &&
				memcmp(out + f.head_len, r.body.p, r.body.len) == 0 &&
				memcmp(out + n - f.tail_len, f.tail, f.tail_len) == 0,
			"piece %u: the frame around the body", i + 1);
		SHA256(out, n, sum);
		for (uint32_t k = 0; k < 32; k++)
			snprintf(hex + 2 * k, 3, "%02x", sum[k]);
		is_u64(n, vec_u64(v, "size"), "piece %u: length", i + 1);
		is_str(hex, vec_str(v, "sha256"), "piece %u: digest", i + 1);
		free(out);
	}
}

static void check_health(const char *name, const uint8_t *wire, size_t len)
{
	static const char *const service[][2] = {{"health_check_inference_extension", "inference-extension"},
		{"health_check_liveness", "liveness"}, {"health_check_readiness", "readiness"},
		{"health_check_extproc", "envoy.service.ext_proc.v3.ExternalProcessor"},
		{"health_check_overall", ""}};
	static const char *const status[] = {
		"health_unknown", "health_serving", "health_not_serving", "health_service_unknown"};
	uint8_t out[256];
	for (uint32_t i = 0; i < CNT(service); i++)
		if (strcmp(name, service[i][0]) == 0) {
			size_t n = kvp_grpc_health_request(service[i][1], out, sizeof(out));
			ok(n == len && (!n || memcmp(out, wire, n) == 0), "%s is written byte for byte",
				name);
			return;
		}
	for (uint32_t i = 0; i < CNT(status); i++)
		if (strcmp(name, status[i]) == 0) {
			size_t n = kvp_grpc_health_reply((enum kvp_grpc_serving)i, out, sizeof(out));
			ok(n == len && (!n || memcmp(out, wire, n) == 0), "%s is written byte for byte",
				name);
			ok(kvp_grpc_health_reply_parse(wire, len) == (int)i, "%s is read back", name);
			return;
		}
	ok(0, "vector %s has a row in this test", name);
}

/* Two answers that we never send are only read: the oneof member, or none, is what we see of them. */
static int check_foreign(const char *name, const uint8_t *wire, size_t len)
{
	struct kvp_extproc_reply got;
	int override = strcmp(name, "resp_mode_override") == 0;
	if (!override && strcmp(name, "resp_override_message_timeout") != 0)
		return 0;
	ok(kvp_extproc_reply_decode(dec, wire, len, &got) == KVP_OK &&
			got.kind == (override ? KVP_EXTPROC_ANSWER_REQUEST_HEADERS : KVP_EXTPROC_ANSWER_NONE),
		"%s: members that we never send are skipped", name);
	return 1;
}

static void check_vector(struct kvp_json_val v)
{
	static uint8_t wire[4096];
	const char *name = vec_str(v, "name");
	struct kvp_json_val hex;
	if (strncmp(name, "resp_req_body_chunk_", 20) == 0) {
		check_piece(v, (uint32_t)(name[20] - '1'));
		return;
	}
	size_t len = vec_has(v, "hex", &hex) ? vec_unhex(vec_text(hex), wire) : 0;
	is_u64(len, vec_u64(v, "size"), "%s: size", name);
	for (uint32_t i = 0; i < CNT(in_rows); i++)
		if (strcmp(name, in_rows[i].name) == 0) {
			check_in(&in_rows[i], wire, len);
			return;
		}
	for (uint32_t i = 0; i < CNT(out_rows); i++)
		if (strcmp(name, out_rows[i].name) == 0) {
			check_out(&out_rows[i], wire, len);
			return;
		}
	if (!check_foreign(name, wire, len))
		check_health(name, wire, len);
}

/* Metadata by hand: namespace, key and value as length-prefixed pieces, lengths below 128. */
static size_t put(uint8_t *out, uint8_t tag, const void *data, size_t len)
{
	out[0] = tag;
	out[1] = (uint8_t)len;
	memmove(out + 2, data, len);
	return len + 2;
}

static size_t metadata(uint8_t *out, const char *space, const char *key, const uint8_t *value, size_t len)
{
	uint8_t entry[256], fields[256];
	size_t n = put(entry, 0x0a, key, strlen(key));
	n += put(entry + n, 0x12, value, len); /* StructEntry */
	n = put(fields, 0x0a, entry, n);       /* Struct */
	size_t k = put(entry, 0x0a, space, strlen(space));
	k += put(entry + k, 0x12, fields, n); /* MetadataEntry */
	n = put(fields, 0x0a, entry, k);      /* Metadata */
	return put(out, 0x42, fields, n);
}

static void check_hint(const char *what, const uint8_t *value, size_t len, const char *want)
{
	uint8_t wire[512];
	char got[256] = "";
	struct kvp_extproc_req r;
	size_t n =
		metadata(wire, "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset", value, len);
	int rc = kvp_extproc_req_decode(dec, wire, n, &r);
	for (uint32_t i = 0; rc == KVP_OK && i < r.subset_cnt; i++) {
		size_t at = strlen(got);
		snprintf(got + at, sizeof(got) - at, "[%.*s]", (int)r.subset[i].len, r.subset[i].p);
	}
	ok(rc == KVP_OK && r.subset_hint == KVP_EXTPROC_HINT_PRESENT, "%s: the hint is present", what);
	is_str(got, want, "%s: its entries", what);
}

static void check_served(const char *what, const uint8_t *value, size_t len, const char *want)
{
	uint8_t wire[512];
	char got[128] = "";
	struct kvp_extproc_req r = {0};
	size_t n = metadata(wire, "envoy.lb", "x-gateway-destination-endpoint-served", value, len);
	ok(kvp_extproc_req_decode(dec, wire, n, &r) == KVP_OK && r.subset_hint == KVP_EXTPROC_HINT_ABSENT,
		"%s: read, and no hint", what);
	snprintf(got, sizeof(got), "%.*s", (int)r.served.len, r.served.len ? r.served.p : "");
	is_str(got, want, "%s: served", what);
}

static void metadata_shapes(void)
{
	uint8_t v[128], list[128], item[128];
	char name[32];
	static const struct {
		const char *text, *entries, *served;
	} row[] = {{"", "", ""}, {"   ", "", ""}, {" , ", "", ""}, {",,,", "", ""},
		{"10.0.0.7:8000", "[10.0.0.7:8000]", "10.0.0.7:8000"}, {" a ,\tb,, c\n", "[a][b][c]", "c"},
		{"10.0.0.7:8000,10.0.0.9:8000", "[10.0.0.7:8000][10.0.0.9:8000]", "10.0.0.9:8000"},
		{"[2001:db8::10]:8000", "[[2001:db8::10]:8000]", "[2001:db8::10]:8000"}};
	for (uint32_t i = 0; i < CNT(row); i++) {
		size_t n = put(v, 0x1a, row[i].text, strlen(row[i].text));
		snprintf(name, sizeof(name), "string %u", i);
		check_hint(name, v, n, row[i].entries);
		check_served(name, v, n, row[i].served);
	}
	static const uint8_t number[] = {0x11, 0, 0, 0, 0, 0, 0, 0xf0, 0x3f}, flag[] = {0x20, 1},
			     null[] = {0x08, 0}, nested[] = {0x2a, 0};
	check_hint("a number", number, sizeof(number), "");
	check_hint("a boolean", flag, sizeof(flag), "");
	check_hint("null", null, sizeof(null), "");
	check_hint("a struct", nested, sizeof(nested), "");
	check_hint("no kind at all", number, 0, "");
	check_served("a number", number, sizeof(number), "");
	check_served("a boolean", flag, sizeof(flag), "");
	check_served("a struct", nested, sizeof(nested), "");
	size_t k = put(item, 0x1a, "a , b", 5), n = put(list, 0x0a, item, k);
	n += put(list + n, 0x0a, number, sizeof(number));
	k = put(item, 0x1a, "c", 1);
	n += put(list + n, 0x0a, item, k);
	k = put(item, 0x1a, "  ", 2);
	n += put(list + n, 0x0a, item, k);
	n = put(v, 0x32, list, n);
	check_hint("a mixed list", v, n, "[a][b][c]");
	check_served("a mixed list", v, n, "c");
	n = put(list, 0x0a, flag, sizeof(flag));
	n = put(v, 0x32, list, n);
	check_hint("a list without strings", v, n, "");
	struct kvp_extproc_req r;
	n = metadata(item, "envoy.lb.subset_hint", "other", flag, 2);
	ok(kvp_extproc_req_decode(dec, item, n, &r) == KVP_OK && r.subset_hint == KVP_EXTPROC_HINT_ABSENT,
		"the namespace without the key is no hint");
}

static void pieces(void)
{
	static const uint32_t row[][3] = {{0, 1, 0}, {1, 1, 1}, {61999, 1, 61999}, {62000, 1, 62000},
		{62001, 2, 1}, {124000, 2, 62000}, {130000, 3, 6000}};
	static char body[130000];
	for (uint32_t i = 0; i < CNT(row); i++)
		for (uint8_t end = 0; end < 2; end++) {
			struct kvp_extproc_pieces p = {.body = {body, row[i][0]}, .end_of_stream = end};
			struct kvp_extproc_str s = {0};
			uint32_t cnt = 0, ends = 0, sum = 0;
			uint8_t eos = 0;
			while (kvp_extproc_piece_next(&p, &s, &eos)) {
				cnt++;
				ends += eos;
				sum += s.len;
			}
			ok(cnt == row[i][1] && s.len == row[i][2] && sum == row[i][0] && ends == end &&
					eos == end,
				"%u bytes: %u pieces, the last of %u, end flag %u only there", row[i][0],
				row[i][1], row[i][2], end);
		}
}

/* Every prefix of every vector: read or refused, nothing else; an own allocation so that a read past its end
 * is seen by the sanitizer. */
static void truncated(struct kvp_json_val root)
{
	uint32_t runs = 0, refused = 0;
	struct kvp_json_iter it = kvp_json_each(vec_get(root, "vectors"));
	while (kvp_json_next(&it)) {
		struct kvp_json_val hex;
		static uint8_t wire[4096];
		size_t len = vec_has(it.val, "hex", &hex) ? vec_unhex(vec_text(hex), wire) : 0;
		for (size_t n = 0; n < len; n++, runs++) {
			struct kvp_extproc_req q;
			struct kvp_extproc_reply r;
			uint8_t *cut = malloc(n ? n : 1);
			memcpy(cut, wire, n);
			int a = kvp_extproc_req_decode(dec, cut, n, &q);
			int b = kvp_extproc_reply_decode(dec, cut, n, &r);
			refused += a != KVP_OK || b != KVP_OK;
			if ((a != KVP_OK && a != KVP_ERR_PROTO) || (b != KVP_OK && b != KVP_ERR_PROTO))
				ok(0, "%s cut at %zu: %d %d", vec_str(it.val, "name"), n, a, b);
			free(cut);
		}
	}
	ok(runs > 1000 && refused > 900, "%u truncated messages: read or refused (%u)", runs, refused);
}

/* What the short way of a body in parts must leave to the long one. */
static void odd_bodies(void)
{
	static const char *const row[] = {
		"220822022a2a0a026161", /* garbage: nested lengths do not fit */
		"22080a0261610a026262", /* two bodies */
		"22060a0261610a00",	/* the second one empty */
		"22040a02616122040a026262", /* the member twice */
		"22040a0261612a040a026262", /* another member behind it */
		"22040a02616132020a00", /* trailers behind it */
		"22040a0261615001", /* observability behind it */
		"22040a02616150", "22060a0261611001", "22060a0261611080", "22050a02616110",
		"22080a026161180118015001", /* unknown fields */
		"22840000000a026161", "220a0a86000061616161616110", "22060a83006161615801",
		"220610010a026161"};
	for (size_t i = 0; i < sizeof(row) / sizeof(row[0]); i++) {
		uint8_t wire[64];
		size_t len = vec_unhex(row[i], wire);
		struct kvp_extproc_req want, got;
		struct iovec one = {wire, len};
		struct kvp_extproc_dec *other = kvp_extproc_dec_new();
		int rc = kvp_extproc_req_decode(other, wire, len, &want);
		int as = kvp_extproc_req_decode_parts(dec, &one, 1, &got);
		ok(rc == as && (rc || (same_req(&got, &want) && same_in_parts(wire, len, &want))),
			"%s means the same in parts", row[i]);
		kvp_extproc_dec_delete(other);
	}
}

static void hostile(void)
{
	struct kvp_extproc_req r = {.kind = KVP_EXTPROC_RESPONSE_BODY};
	static const uint8_t wrong_wire_type[] = {0x22, 0x02, 0x08, 0x01},
			     overlong[] = {0x22, 0xff, 0xff, 0xff, 0xff, 0x0f},
			     varint11[] = {0x50, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
				     1},
			     field0[] = {0x02, 0x00}, group[] = {0x0b, 0x0c};
	ok(kvp_extproc_req_decode(dec, overlong, sizeof(overlong), &r) == KVP_ERR_PROTO,
		"a length beyond the message is refused");
	ok(r.kind == KVP_EXTPROC_RESPONSE_BODY, "and the result is untouched");
	kvp_extproc_req_decode(dec, wrong_wire_type, sizeof(wrong_wire_type), &r);
	ok(kvp_extproc_req_decode(dec, varint11, sizeof(varint11), &r) == KVP_ERR_PROTO,
		"a number of eleven bytes is refused");
	ok(kvp_extproc_req_decode(dec, field0, sizeof(field0), &r) == KVP_ERR_PROTO, "field 0 is refused");
	ok(kvp_extproc_req_decode(dec, group, sizeof(group), &r) == KVP_ERR_PROTO, "a group is refused");

	/* A map of empty headers is the cheapest way to ask for memory: 2 bytes each. */
	size_t cnt = 1000000, len = 2 * cnt + 10;
	uint8_t *wire = calloc(1, len), *p = wire;
	*p++ = 0x12; /* request_headers, then headers: lengths of three to four bytes */
	size_t outer = 2 * cnt + 5;
	for (int i = 0; i < 4; i++)
		*p++ = (uint8_t)(i < 3 ? 0x80 | (outer >> 7 * i & 0x7f) : outer >> 21);
	*p++ = 0x0a;
	for (int i = 0; i < 4; i++)
		*p++ = (uint8_t)(i < 3 ? 0x80 | (2 * cnt >> 7 * i & 0x7f) : 2 * cnt >> 21);
	for (size_t i = 0; i < cnt; i++, p += 2)
		p[0] = 0x0a;
	is_u64((uint64_t)(int64_t)kvp_extproc_req_decode(dec, wire, len, &r), (uint64_t)KVP_ERR_LIMIT,
		"a million empty headers are over the memory bound");
	free(wire);

	/* Struct inside struct, deeper than any stack: what we don't look at is not descended into. */
	uint32_t depth = 200000;
	uint8_t *deep = malloc((size_t)depth * 12), *end = deep + (size_t)depth * 12, *at = end;
	for (uint32_t i = 0; i < depth; i++) { /* list_value { values { list_value ... */
		for (int k = 0; k < 2; k++) {
			size_t n = (size_t)(end - at);
			for (int b = 3; b >= 0; b--)
				*--at = (uint8_t)(b < 3 ? 0x80 | (n >> 7 * b & 0x7f) : n >> 21);
			*--at = k ? 0x32 : 0x0a;
		}
		if ((size_t)(at - deep) < 12)
			break;
	}
	size_t n = (size_t)(end - at);
	ok(n > 1000000, "%zu bytes of nested lists", n);
	int rc = kvp_extproc_req_decode(dec, at, n, &r);
	ok(rc == KVP_OK || rc == KVP_ERR_PROTO, "nesting costs no stack at the top");
	uint8_t *meta = malloc(n + 64);
	size_t head = 0;
	static const char space[] = "\x0a\x08"
				    "envoy.lb",
			  key[] = "\x0a\x25x-gateway-destination-endpoint-served";
	size_t inner[4] = {n, 0, 0, 0};		     /* value */
	inner[1] = sizeof(key) - 1 + 5 + n;	     /* StructEntry */
	inner[2] = 5 + inner[1];		     /* Struct */
	inner[3] = sizeof(space) - 1 + 5 + inner[2]; /* MetadataEntry */
	size_t level[5] = {5 + inner[3], inner[3], inner[2], inner[1], inner[0]};
	static const uint8_t tag[5] = {0x42, 0x0a, 0x12, 0x0a, 0x12};
	for (int i = 0; i < 5; i++) {
		if (i == 2) {
			memcpy(meta + head, space, sizeof(space) - 1);
			head += sizeof(space) - 1;
		}
		if (i == 4) {
			memcpy(meta + head, key, sizeof(key) - 1);
			head += sizeof(key) - 1;
		}
		meta[head++] = tag[i];
		for (int b = 0; b < 4; b++)
			meta[head++] = (uint8_t)(b < 3 ? 0x80 | (level[i] >> 7 * b & 0x7f) : level[i] >> 21);
	}
	KVP_ASSERT(head <= 64 + 64);
	meta = realloc(meta, head + n);
	memcpy(meta + head, at, n);
	rc = kvp_extproc_req_decode(dec, meta, head + n, &r);
	ok(rc == KVP_OK && r.served.len == 0, "nesting in the metadata that we read costs no stack either");
	free(meta);
	free(deep);
}

int main(void)
{
	struct kvp_json *parser = kvp_json_new();
	dec = kvp_extproc_dec_new();
	struct kvp_json_val root = vec_load(parser, "ext_proc.json");
	is_str(vec_str(root, "grpc_method"), KVP_EXTPROC_METHOD, "the method's name");
	is_str(vec_str(root, "health_method"), KVP_GRPC_HEALTH_CHECK, "the health method's name");
	struct kvp_json_iter it = kvp_json_each(vec_get(root, "vectors"));
	while (kvp_json_next(&it))
		check_vector(it.val);
	metadata_shapes();
	pieces();
	truncated(root);
	odd_bodies();
	hostile();
	kvp_extproc_dec_delete(dec);
	kvp_json_free(parser);
	return done();
}
