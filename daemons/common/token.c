#include "daemons/common/token.h"
#include <kvpick/err.h>

#include <ctype.h>
#include <fcntl.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

static int same_file(const struct stat *a, const struct stat *b)
{
	return a->st_ino == b->st_ino && a->st_size == b->st_size && a->st_mtim.tv_sec == b->st_mtim.tv_sec &&
	       a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

int kvp_token_refresh(struct kvp_token *t)
{
	char buf[KVP_TOKEN_MAX + 2];
	struct stat st;
	if (!*t->path)
		return KVP_OK;
	if (stat(t->path, &st) != 0)
		return KVP_ERR_SYS;
	if (t->len && same_file(&st, &t->seen))
		return KVP_OK;
	int fd = open(t->path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return KVP_ERR_SYS;
	ssize_t n = read(fd, buf, sizeof(buf));
	close(fd);
	if (n < 0)
		return KVP_ERR_SYS;
	char *from = buf, *end = buf + n;
	while (from < end && isspace((unsigned char)*from))
		from++;
	while (end > from && isspace((unsigned char)end[-1]))
		end--;
	if (end == from || end - from > KVP_TOKEN_MAX)
		return KVP_ERR_INVAL;
	t->len = (size_t)(end - from);
	memcpy(t->text, from, t->len);
	t->seen = st;
	return KVP_OK;
}

int kvp_token_passes(const struct kvp_token *t, const char *authorization, uint32_t len)
{
	static const char scheme[] = "Bearer ";
	unsigned differ = 0;
	if (!*t->path)
		return 1;
	if (!authorization || !t->len || len != sizeof(scheme) - 1 + t->len ||
		strncasecmp(authorization, scheme, sizeof(scheme) - 1) != 0)
		return 0;
	for (size_t i = 0; i < t->len; i++)
		differ |= (unsigned char)(authorization[sizeof(scheme) - 1 + i] ^ t->text[i]);
	return differ == 0;
}
