/* A process of any role for tests of the supervisor: joins, says RUN, beats, ends on SIGTERM. Its role is
 * that of the program name under which it is started. A file in the run directory, <role>.<instance>.do,
 * holds a word that tells it how to misbehave. */
#include "daemons/common/boot.h"
#include "shm/region.h"
#include <fcntl.h>
#include <kvpick/clock.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static volatile sig_atomic_t asked;

static void on_term(int sig)
{
	(void)sig;
	asked = 1;
}

static enum kvp_role role_of(const char *program)
{
	for (int r = KVP_ROLE_NONE + 1; r < KVP_ROLE_CNT; r++) {
		char name[32];
		snprintf(name, sizeof(name), "kvpick-%s", kvp_role_name((enum kvp_role)r));
		const char *slash = strrchr(program, '/');
		if (strcmp(slash ? slash + 1 : program, name) == 0)
			return (enum kvp_role)r;
	}
	return KVP_ROLE_NONE;
}

/* order reads the word of this process, "" if there is none. */
static void order(const struct kvp_boot *b, char word[32])
{
	char path[KVP_BOOT_PATH_MAX + 64];
	snprintf(path, sizeof(path), "%s/%s.%u.do", b->run_dir, kvp_role_name(b->role), b->instance);
	word[0] = 0;
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n = fd >= 0 ? read(fd, word, 31) : 0;
	word[n > 0 ? n : 0] = 0;
	word[strcspn(word, "\n")] = 0;
	if (fd >= 0)
		close(fd);
}

/* once answers 1 for the first process that asks; the file is the memory. */
static int once(const struct kvp_boot *b)
{
	char path[KVP_BOOT_PATH_MAX + 64];
	snprintf(path, sizeof(path), "%s/%s.%u.do", b->run_dir, kvp_role_name(b->role), b->instance);
	return unlink(path) == 0;
}

int main(int argc, char **argv)
{
	static struct kvp_boot b;
	struct sigaction sa = {.sa_handler = on_term};
	sigaction(SIGTERM, &sa, NULL);
	int rc = kvp_boot_child(argc, argv, role_of(argv[0]), &b);
	if (rc)
		return kvp_boot_exit(rc);
	char word[32];
	order(&b, word);
	if (strcmp(word, "exit2") == 0)
		return KVP_EXIT_CONFIG;
	if (strcmp(word, "corrupt") == 0 && once(&b)) {
		kvp_boot_error(&b, KVP_ERR_CORRUPT, "boot_child", __LINE__, "told to find corruption");
		return KVP_EXIT_CORRUPT;
	}
	if (strcmp(word, "claim") == 0) { /* leaves a claimed command behind for the sweep */
		struct kvp_cmd_cell *c;
		void *p;
		if (once(&b) && kvp_cmd_begin(&b.region->cmd, b.owner, &c, &p) != KVP_OK)
			return 1;
	}
	kvp_boot_control(&b, KVP_CTL_RUN);
	while (!asked || strcmp(word, "deaf") == 0) {
		kvp_slot_beat(
			b.slots, b.slot, strcmp(word, "still") == 0 ? 1 : kvp_clock_mono_ns() / 1000000);
		kvp_slot_sleep(b.slots);
		struct pollfd p = {.fd = b.wake_fd, .events = POLLIN};
		poll(&p, 1, KVP_SLEEP_MAX_MS);
		kvp_slot_awake(b.slots);
	}
	kvp_boot_control(&b, KVP_CTL_DRAIN);
	fprintf(stderr, "boot_child: %s drained\n", b.name);
	return 0;
}
