/* tests/fuzz/replay.h - the main of a fuzzer that is not built with libFuzzer: replay, mutate, TAP.
 *
 * Use        #define KVP_FUZZ_NAME "http" before including it in exactly one file that defines
 *            LLVMFuzzerTestOneInput. In a BUILD=fuzz program it adds nothing.
 * Does       every file of tests/fuzz/corpus/NAME once (also cut at both halves), then KVP_FUZZ_RUNS (4000)
 *            seeded mutations of them: bit flips, inserted and removed ranges, copied pieces, magic numbers.
 *            Any finding is a crash, an assertion or a sanitizer report; the seed is printed, KVP_SEED
 *            replays. With file arguments it runs those files instead.
 */
#ifndef KVP_FUZZ_REPLAY_H
#define KVP_FUZZ_REPLAY_H
#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);

#ifndef KVP_FUZZ
#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include "tests/tap.h"

#define FUZZ_MAX_BYTES (1u << 17)
#define FUZZ_FILES_MAX 512
struct fuzz_input {
	uint8_t *data;
	size_t len;
};
static struct fuzz_input fuzz_in[FUZZ_FILES_MAX];
static uint32_t fuzz_cnt;
static uint64_t fuzz_state;

static uint64_t fuzz_next(void)
{
	fuzz_state += 0x9e3779b97f4a7c15u;
	uint64_t z = fuzz_state;
	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
	return z ^ (z >> 31);
}

/* Each run gets its own exact allocation, so that a read past the end is seen by the sanitizer. */
static void fuzz_one(const uint8_t *data, size_t len)
{
	uint8_t *copy = malloc(len ? len : 1);
	if (!copy)
		abort();
	if (len)
		memcpy(copy, data, len);
	LLVMFuzzerTestOneInput(copy, len);
	free(copy);
}

static int fuzz_load(const char *path)
{
	FILE *f = fopen(path, "rb");
	uint8_t *buf = malloc(FUZZ_MAX_BYTES);
	if (!f || !buf || fuzz_cnt == FUZZ_FILES_MAX) {
		free(buf);
		if (f)
			fclose(f);
		return -1;
	}
	fuzz_in[fuzz_cnt].len = fread(buf, 1, FUZZ_MAX_BYTES, f);
	fuzz_in[fuzz_cnt++].data = buf;
	fclose(f);
	return 0;
}

static int fuzz_name_cmp(const void *a, const void *b)
{
	return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Sorted, so that a seed means the same run on every file system. */
static void fuzz_load_dir(const char *dir)
{
	char *name[FUZZ_FILES_MAX];
	uint32_t cnt = 0;
	DIR *d = opendir(dir);
	for (struct dirent *e; d && (e = readdir(d)) && cnt < FUZZ_FILES_MAX;)
		if (e->d_name[0] != '.')
			name[cnt++] = strdup(e->d_name);
	if (d)
		closedir(d);
	qsort(name, cnt, sizeof(name[0]), fuzz_name_cmp);
	for (uint32_t i = 0; i < cnt; i++) {
		char path[512];
		snprintf(path, sizeof(path), "%s/%s", dir, name[i]);
		fuzz_load(path);
		free(name[i]);
	}
}

static size_t fuzz_mutate_once(uint8_t *buf, size_t len)
{
	static const uint8_t magic[] = {
		0, 1, 0x7f, 0x80, 0xff, '\r', '\n', ' ', '0', '"', '{', ':', 0xdc, 0xcf};
	size_t at = len ? fuzz_next() % len : 0, n = 1 + fuzz_next() % 8;
	switch (fuzz_next() % 6) {
	case 0:
		if (len)
			buf[at] ^= (uint8_t)(1u << (fuzz_next() % 8));
		return len;
	case 1:
		if (len)
			buf[at] = magic[fuzz_next() % sizeof(magic)];
		return len;
	case 2: /* insert */
		if (len + n > FUZZ_MAX_BYTES)
			return len;
		memmove(buf + at + n, buf + at, len - at);
		for (size_t i = 0; i < n; i++)
			buf[at + i] =
				fuzz_next() % 2 ? (uint8_t)fuzz_next() : magic[fuzz_next() % sizeof(magic)];
		return len + n;
	case 3: /* remove */
		n = n < len - at ? n : len - at;
		memmove(buf + at, buf + at + n, len - at - n);
		return len - n;
	case 4: { /* piece of another input */
		const struct fuzz_input *o = &fuzz_in[fuzz_next() % fuzz_cnt];
		size_t from = o->len ? fuzz_next() % o->len : 0, k = o->len - from;
		k = k ? fuzz_next() % (k + 1) : 0;
		k = k < FUZZ_MAX_BYTES - at ? k : FUZZ_MAX_BYTES - at;
		if (k)
			memcpy(buf + at, o->data + from, k);
		return at + k > len ? at + k : len;
	}
	default:
		return len ? fuzz_next() % (len + 1) : 0;
	}
}

static uint64_t fuzz_env(const char *name, uint64_t otherwise)
{
	const char *v = getenv(name);
	return v && *v ? strtoull(v, NULL, 0) : otherwise;
}

int main(int argc, char **argv)
{
	static uint8_t buf[FUZZ_MAX_BYTES + 16];
	uint64_t seed = fuzz_env("KVP_SEED", 1), runs = fuzz_env("KVP_FUZZ_RUNS", 4000);
	for (int i = 1; i < argc; i++)
		ok(fuzz_load(argv[i]) == 0, "input %s can be read", argv[i]);
	if (argc < 2)
		fuzz_load_dir("tests/fuzz/corpus/" KVP_FUZZ_NAME);
	ok(fuzz_cnt > 0, "there is a corpus for " KVP_FUZZ_NAME);
	for (uint32_t i = 0; i < fuzz_cnt; i++) {
		fuzz_one(fuzz_in[i].data, fuzz_in[i].len);
		fuzz_one(fuzz_in[i].data, fuzz_in[i].len / 2);
		fuzz_one(fuzz_in[i].data + fuzz_in[i].len / 2, fuzz_in[i].len - fuzz_in[i].len / 2);
	}
	ok(1, "%u inputs replayed", fuzz_cnt);
	printf("# KVP_SEED=%" PRIu64 " KVP_FUZZ_RUNS=%" PRIu64 "\n", seed, runs);
	fuzz_state = seed;
	for (uint64_t i = 0; argc < 2 && fuzz_cnt && i < runs; i++) {
		const struct fuzz_input *in = &fuzz_in[fuzz_next() % fuzz_cnt];
		size_t len = in->len;
		memcpy(buf, in->data, len);
		for (uint64_t k = 1 + fuzz_next() % 6; k; k--)
			len = fuzz_mutate_once(buf, len);
		fuzz_one(buf, len);
	}
	ok(1, "mutations ran to their end");
	for (uint32_t i = 0; i < fuzz_cnt; i++)
		free(fuzz_in[i].data);
	return done();
}
#endif
#endif
