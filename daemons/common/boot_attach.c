#include "daemons/common/boot_priv.h"

#include <kvpick/clock.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define RETRY_MS 20

static uint64_t mono_ms(void)
{
	return kvp_clock_mono_ns() / 1000000;
}

/* receive takes the one message and the descriptor in it. */
static int receive(int sock, struct kvp_attach *out)
{
	struct kvp_boot_hello h;
	union {
		struct cmsghdr hdr;
		char space[CMSG_SPACE(sizeof(int))];
	} ctl;
	struct iovec iov = {&h, sizeof(h)};
	struct msghdr m = {.msg_iov = &iov,
		.msg_iovlen = 1,
		.msg_control = ctl.space,
		.msg_controllen = sizeof(ctl.space)};
	ssize_t n = recvmsg(sock, &m, MSG_CMSG_CLOEXEC);
	if (n <= 0)
		return KVP_ERR_AGAIN; /* denied, or the supervisor went away */
	int fd = -1;
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);
	if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS &&
		c->cmsg_len == CMSG_LEN(sizeof(int)))
		memcpy(&fd, CMSG_DATA(c), sizeof(fd));
	if (n != (ssize_t)sizeof(h) || h.magic != KVP_HELLO_MAGIC || h.size != sizeof(h) || fd < 0) {
		if (fd >= 0)
			close(fd);
		return KVP_ERR_PROTO;
	}
	out->region_fd = fd;
	out->region_gen = h.region_gen;
	out->supervisor = h.supervisor;
	return KVP_OK;
}

static int ask(int dir, const char *instance, int timeout_ms, struct kvp_attach *out)
{
	struct sockaddr_un a = {.sun_family = AF_UNIX};
	/* By way of the directory's descriptor: run directories may be longer than a socket address. */
	snprintf(a.sun_path, sizeof(a.sun_path), "/proc/self/fd/%d/%s.sock", dir, instance);
	int sock = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (sock < 0)
		return KVP_ERR_SYS;
	struct ucred peer;
	socklen_t len = sizeof(peer);
	struct pollfd p = {.fd = sock, .events = POLLIN};
	int rc = KVP_ERR_AGAIN;
	if (connect(sock, (struct sockaddr *)&a, sizeof(a)) != 0)
		rc = KVP_ERR_AGAIN;
	else if (getsockopt(sock, SOL_SOCKET, SO_PEERCRED, &peer, &len) != 0)
		rc = KVP_ERR_SYS;
	else if (peer.uid != geteuid())
		rc = KVP_ERR_INVAL;
	else if (poll(&p, 1, timeout_ms) == 1)
		rc = receive(sock, out);
	close(sock);
	return rc;
}

int kvp_boot_attach(const char *run_dir, const char *instance, uint32_t timeout_ms, struct kvp_attach *out)
{
	if (strlen(instance) > 32)
		return KVP_ERR_INVAL;
	uint64_t end = mono_ms() + timeout_ms;
	struct kvp_attach a = {.region_fd = -1, .lock_fd = -1};
	int rc = KVP_ERR_AGAIN;
	for (;;) {
		uint64_t now = mono_ms();
		int left = now < end ? (int)(end - now) : 0;
		struct stat st;
		int dir = open(run_dir, O_PATH | O_DIRECTORY | O_CLOEXEC);
		if (dir >= 0 && fstat(dir, &st) == 0) {
			rc = st.st_uid != geteuid() ? KVP_ERR_INVAL : ask(dir, instance, left, &a);
			if (rc == KVP_OK) {
				char lock[64];
				snprintf(lock, sizeof(lock), "%s.lock", instance);
				a.lock_fd = openat(dir, lock, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
			}
		}
		if (dir >= 0)
			close(dir);
		if (rc != KVP_ERR_AGAIN || left == 0)
			break;
		poll(NULL, 0, left < RETRY_MS ? left : RETRY_MS);
	}
	if (rc == KVP_OK)
		*out = a;
	return rc == KVP_ERR_AGAIN ? KVP_ERR_TIMEOUT : rc;
}

void kvp_boot_detach(struct kvp_attach *a)
{
	if (a->region_fd >= 0)
		close(a->region_fd);
	if (a->lock_fd >= 0)
		close(a->lock_fd);
	a->region_fd = a->lock_fd = -1;
}
