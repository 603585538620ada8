/* The bearer token: which header opens, which file is one, what a file that goes away or breaks does. */
#include "daemons/common/token.h"
#include "tests/tap.h"

#include <kvpick/err.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char path[] = "/tmp/kvp-token-XXXXXX";

static void write_file(const char *text, size_t len)
{
	FILE *f = fopen(path, "w");
	if (!f || fwrite(text, 1, len, f) != len || fclose(f))
		printf("Bail out! no file\n");
}

static int passes(const struct kvp_token *t, const char *header)
{
	return kvp_token_passes(t, header, (uint32_t)strlen(header));
}

static void test_header(void)
{
	static const char good[] = "Bearer the-Secret~1";
	struct kvp_token t = {.path = path};
	char h[64];
	write_file(" \tthe-Secret~1\r\n", 16);
	is_u64((uint64_t)kvp_token_refresh(&t), KVP_OK, "white space around it is not of the token");
	ok(passes(&t, good) && passes(&t, "bEARER the-Secret~1"), "it opens");
	uint32_t open_cnt = 0;
	for (size_t i = 0; i < sizeof(good) - 1; i++)
		for (int bit = 0; bit < 8; bit++) {
			memcpy(h, good, sizeof(good));
			h[i] = (char)(h[i] ^ 1 << bit);
			int case_only = bit == 5 && i < 6;
			open_cnt += !case_only && kvp_token_passes(&t, h, sizeof(good) - 1);
		}
	is_u64(open_cnt, 0, "with any bit of any byte turned it does not");
	open_cnt = 0;
	for (uint32_t n = 0; n < sizeof(good) - 1; n++)
		open_cnt += kvp_token_passes(&t, good, n);
	is_u64(open_cnt, 0, "no beginning of it does");
	ok(!passes(&t, "Bearer the-Secret~11") && !passes(&t, "Basic the-Secret~1") && !passes(&t, "") &&
			!kvp_token_passes(&t, NULL, 0),
		"nor anything longer, of another scheme, or nothing");
	struct kvp_token none = {.path = ""}, never = {.path = "/nonexistent"};
	ok(passes(&none, "") && kvp_token_refresh(&none) == KVP_OK, "without a file nothing is asked for");
	ok(kvp_token_refresh(&never) == KVP_ERR_SYS && !passes(&never, "Bearer "),
		"of a file that was never there nobody passes");
}

static void test_file(void)
{
	static char big[KVP_TOKEN_MAX + 1];
	struct kvp_token t = {.path = path};
	memset(big, 'x', sizeof(big));
	write_file(" \n", 2);
	ok(kvp_token_refresh(&t) == KVP_ERR_INVAL && !passes(&t, "Bearer "), "white space is no token");
	write_file(big, sizeof(big));
	ok(kvp_token_refresh(&t) == KVP_ERR_INVAL, "nor is one byte too many");
	write_file(big, KVP_TOKEN_MAX);
	ok(kvp_token_refresh(&t) == KVP_OK && t.len == KVP_TOKEN_MAX, "the longest one");
	write_file("a", 1);
	ok(kvp_token_refresh(&t) == KVP_OK && passes(&t, "Bearer a"), "a file that changed is read again");
	unlink(path);
	ok(kvp_token_refresh(&t) == KVP_ERR_SYS && passes(&t, "Bearer a"), "without it the last one stays");
}

int main(void)
{
	int fd = mkstemp(path);
	if (fd < 0)
		printf("Bail out! no file\n");
	close(fd);
	test_header();
	test_file();
	return done();
}
