/* tests/vec.h — read a file of tests/vectors; the tests run in the top folder of the tree. */
#ifndef KVP_TEST_VEC_H
#define KVP_TEST_VEC_H
#include "ipc/json_in.h"
#include "tests/tap.h"

#include <stdlib.h>

/* vec_load parses tests/vectors/<name>; a test without its vectors fails at once. */
__attribute__((unused)) static struct kvp_json_val vec_load(struct kvp_json *parser, const char *name)
{
	struct kvp_json_val root = {0};
	struct kvp_json_err err;
	char path[256];
	snprintf(path, sizeof(path), "tests/vectors/%s", name);
	FILE *f = fopen(path, "re");
	char *text = malloc(1 << 22);
	size_t n = f && text ? fread(text, 1, 1 << 22, f) : 0;
	if (f)
		fclose(f);
	int rc = n ? kvp_json_parse(parser, text, n, KVP_JSON_DEPTH_MAX, &root, &err) : KVP_ERR_NOTFOUND;
	free(text);
	if (!ok(rc == KVP_OK, "%s is read", path))
		exit(done());
	return root;
}

/* Members that must be there: a vector without one is a broken vector. */
__attribute__((unused)) static struct kvp_json_val vec_get(struct kvp_json_val v, const char *key)
{
	struct kvp_json_val out = {0};
	if (kvp_json_get(v, key, &out) != KVP_OK) {
		ok(0, "vector has member %s", key);
		exit(done());
	}
	return out;
}
__attribute__((unused)) static int vec_has(struct kvp_json_val v, const char *key, struct kvp_json_val *out)
{
	return kvp_json_get(v, key, out) == KVP_OK && kvp_json_type(*out) != KVP_JSON_NULL;
}
__attribute__((unused)) static const char *vec_text(struct kvp_json_val v)
{
	const char *s = "";
	size_t n;
	kvp_json_str(v, &s, &n);
	return s;
}
__attribute__((unused)) static const char *vec_str(struct kvp_json_val v, const char *key)
{
	return vec_text(vec_get(v, key));
}
/* 64-bit values stand as decimal strings, or as integers. */
__attribute__((unused)) static uint64_t vec_num(struct kvp_json_val v)
{
	uint64_t u = 0;
	int64_t i;
	if (kvp_json_type(v) == KVP_JSON_STR)
		return strtoull(vec_text(v), NULL, 10);
	if (kvp_json_u64(v, &u) == KVP_OK)
		return u;
	return kvp_json_i64(v, &i) == KVP_OK ? (uint64_t)i : 0;
}
__attribute__((unused)) static uint64_t vec_u64(struct kvp_json_val v, const char *key)
{
	return vec_num(vec_get(v, key));
}
__attribute__((unused)) static double vec_real(struct kvp_json_val v)
{
	double d = 0;
	if (kvp_json_double(v, &d) != KVP_OK) {
		ok(0, "vector value is a number");
		exit(done());
	}
	return d;
}

/* vec_unhex: bytes of a text of hexadecimal digits; how many. */
__attribute__((unused)) static size_t vec_unhex(const char *hex, uint8_t *out)
{
	size_t n = 0;
	for (; hex[0] && hex[1]; hex += 2) {
		char two[3] = {hex[0], hex[1], 0};
		out[n++] = (uint8_t)strtoul(two, NULL, 16);
	}
	return n;
}
#endif
