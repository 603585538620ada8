#include "daemons/common/config_priv.h"

#include <kvpick/err.h>

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAGIC 0x31474643504b56ULL /* "VKPCFG1" */
#define SEALS (F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE)

/* Every field's place: a child of another build must not read this structure. */
static uint64_t layout(void)
{
	uint64_t h = 14695981039346656037ULL;
	for (int n = 0; n < KVP_CFG_CNT; n++) {
		uint64_t w[] = {kvp_cfg_row[n].off, kvp_cfg_row[n].cap, (uint64_t)kvp_cfg_row[n].type};
		for (size_t i = 0; i < sizeof(w) / sizeof(w[0]); i++)
			h = (h ^ w[i]) * 1099511628211ULL;
		for (const char *p = kvp_cfg_row[n].name; *p; p++)
			h = (h ^ (unsigned char)*p) * 1099511628211ULL;
	}
	return h ^ sizeof(struct kvp_config_derived);
}

void kvp_cfg_seal(struct kvp_config *c)
{
	c->magic = MAGIC;
	c->layout = layout();
	c->size = sizeof(*c);
}

static int write_all(int fd, const void *buf, size_t len)
{
	for (size_t done = 0; done < len;) {
		ssize_t n = write(fd, (const char *)buf + done, len - done);
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return KVP_ERR_SYS;
		done += (size_t)n;
	}
	return KVP_OK;
}

int kvp_config_to_memfd(const struct kvp_config *c)
{
	int fd = memfd_create("kvpick-config", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0)
		return KVP_ERR_SYS;
	if (write_all(fd, c, sizeof(*c)) != KVP_OK || fcntl(fd, F_ADD_SEALS, SEALS) != 0) {
		close(fd);
		return KVP_ERR_SYS;
	}
	return fd;
}

int kvp_config_from_fd(int fd, struct kvp_config *out)
{
	struct stat st;
	uint64_t head[3];
	int seals = fcntl(fd, F_GET_SEALS);
	if (fstat(fd, &st) != 0)
		return KVP_ERR_SYS;
	if (seals < 0 || (seals & SEALS) != SEALS || st.st_size != (off_t)sizeof(*out))
		return KVP_ERR_LAYOUT;
	if (pread(fd, head, sizeof(head), 0) != (ssize_t)sizeof(head))
		return KVP_ERR_SYS;
	if (head[0] != MAGIC || head[1] != layout() || head[2] != sizeof(*out))
		return KVP_ERR_LAYOUT;
	for (size_t done = 0; done < sizeof(*out);) {
		ssize_t n = pread(fd, (char *)out + done, sizeof(*out) - done, (off_t)done);
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return KVP_ERR_SYS;
		done += (size_t)n;
	}
	return KVP_OK;
}

static int usable_dir(const char *path)
{
	struct stat st;
	return stat(path, &st) == 0 && S_ISDIR(st.st_mode) && access(path, W_OK | X_OK) == 0;
}

void kvp_config_run_dir(const char *parent, const char *xdg, uid_t uid, char *buf, size_t cap)
{
	struct stat st;
	int n = snprintf(buf, cap, "%s/kvpick", parent);
	if (n > 0 && (size_t)n < cap && (usable_dir(buf) || (stat(buf, &st) != 0 && usable_dir(parent))))
		return;
	if (xdg && xdg[0] && usable_dir(xdg)) {
		n = snprintf(buf, cap, "%s/kvpick", xdg);
		if (n > 0 && (size_t)n < cap)
			return;
	}
	snprintf(buf, cap, "/tmp/kvpick-%u", (unsigned)uid);
}
