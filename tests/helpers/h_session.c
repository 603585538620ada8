/* h_session PID SESSION — initialises SESSION in partition 0 of the node that process PID belongs to, as
 * another process of the node would in the middle of a booking, and gives it up when its input ends. Prints
 * "held". */
#include "shm/region.h"

#include <fcntl.h>
#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static int region_fd(const char *pid)
{
	char dir[64], path[512], target[256];
	snprintf(dir, sizeof(dir), "/proc/%s/fd", pid);
	DIR *d = opendir(dir);
	int fd = -1;
	for (struct dirent *e; d && fd < 0 && (e = readdir(d));) {
		snprintf(path, sizeof(path), "%s/%s", dir, e->d_name);
		ssize_t n = readlink(path, target, sizeof(target) - 1);
		if (n <= 0)
			continue;
		target[n] = 0;
		if (strstr(target, "memfd:kvpick-region"))
			fd = open(path, O_RDWR | O_CLOEXEC);
	}
	if (d)
		closedir(d);
	return fd;
}

int main(int argc, char **argv)
{
	static struct kvp_region r;
	struct kvp_affinity_hold h;
	struct timespec ts;
	char line[16];
	if (argc != 3 || kvp_region_join(region_fd(argv[1]), KVP_REGION_BOOKER, &r))
		return 2;
	clock_gettime(CLOCK_MONOTONIC, &ts);
	struct kvp_affinity_key k = kvp_affinity_key(&r.affinity, 0, argv[2], strlen(argv[2]));
	kvp_affinity_attach(&r.affinity, KVP_OWNER(191, 1), NULL);
	if (kvp_affinity_hold(&r.affinity, k, (uint64_t)ts.tv_sec * 1000000000u, NULL, &h) ||
		h.kind != KVP_AFFINITY_INIT)
		return 3;
	puts("held");
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin))
		;
	kvp_affinity_cancel(&r.affinity, k, &h);
	kvp_region_leave(&r);
	return 0;
}
