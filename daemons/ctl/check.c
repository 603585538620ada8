#include "daemons/ctl/ctl.h"

#include <kvpick/clock.h>
#include <poll.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define QUIET_NS 1000000000ULL /* how long a check may be repeated because the node is at work */
#define TRIES_MIN 10 /* in any case */
#define PAUSE_MS 5

static uint64_t check_slots(struct kvp_region *r)
{
	return kvp_slot_check(&r->slots);
}
static uint64_t check_counters(struct kvp_region *r)
{
	return kvp_counter_check(&r->counters);
}
static uint64_t check_errlog(struct kvp_region *r)
{
	return kvp_errlog_check(&r->errlog);
}
static uint64_t check_commands(struct kvp_region *r)
{
	return kvp_cmdring_check(&r->cmd);
}
static uint64_t check_booking(struct kvp_region *r)
{
	return kvp_book_check(&r->book);
}
static uint64_t check_catalogue(struct kvp_region *r)
{
	return kvp_catalogue_check(&r->cat);
}
static uint64_t check_radix(struct kvp_region *r)
{
	return kvp_radix_check(&r->radix);
}
static uint64_t check_predicted(struct kvp_region *r)
{
	return r->predicted.shm ? kvp_radix_check(&r->predicted) : 0;
}
static uint64_t check_pending(struct kvp_region *r)
{
	return kvp_pending_check(&r->pending);
}
static uint64_t check_queue(struct kvp_region *r)
{
	return kvp_queue_check(&r->queue);
}

static uint64_t check_quota(struct kvp_region *r)
{
	return kvp_quota_check(&r->quota);
}

static uint64_t check_affinity(struct kvp_region *r)
{
	return kvp_affinity_check(&r->affinity);
}

static uint64_t check_peers(struct kvp_region *r)
{
	return kvp_peers_check(&r->peers);
}

static uint64_t check_sources(struct kvp_region *r)
{
	return kvp_peers_check(&r->sources);
}

static uint64_t check_gates(struct kvp_region *r)
{
	return kvp_gates_check(&r->gates);
}

static uint64_t check_recovery(struct kvp_region *r)
{
	return kvp_recov_check(&r->recov);
}

static uint64_t check_lifecycle(struct kvp_region *r)
{
	return kvp_lifecycle_check(&r->lifecycle);
}

static const struct {
	const char *name;
	uint64_t (*check)(struct kvp_region *r);
} object[] = {
	{"slots", check_slots},
	{"counters", check_counters},
	{"errlog", check_errlog},
	{"commands", check_commands},
	{"booking", check_booking},
	{"catalogue", check_catalogue},
	{"radix", check_radix},
	{"pending", check_pending},
	{"queue", check_queue},
	{"affinity", check_affinity},
	{"peers", check_peers},
	{"predicted", check_predicted},
	{"quota", check_quota},
	{"sources", check_sources},
	{"gates", check_gates},
	{"recovery", check_recovery},
	{"lifecycle", check_lifecycle},
};

/* Only the words of the last try are worth reading: stderr goes to a memory file meanwhile. */
static uint64_t try_quietly(uint64_t (*check)(struct kvp_region *), struct kvp_region *r, int words)
{
	fflush(stderr);
	int saved = words >= 0 ? dup(STDERR_FILENO) : -1;
	if (saved >= 0 && (ftruncate(words, 0) != 0 || lseek(words, 0, SEEK_SET) != 0 ||
				  dup2(words, STDERR_FILENO) < 0)) {
		close(saved);
		saved = -1;
	}
	uint64_t faults = check(r);
	fflush(stderr);
	if (saved >= 0) {
		dup2(saved, STDERR_FILENO);
		close(saved);
	}
	return faults;
}

static void say_words(int words)
{
	char buf[4096];
	off_t at = 0;
	ssize_t n;
	while (words >= 0 && (n = pread(words, buf, sizeof(buf), at)) > 0) {
		fwrite(buf, 1, (size_t)n, stderr);
		at += n;
	}
}

int ctl_check(struct ctl *c)
{
	static const char *const col[] = {"object", "faults", "tries", "ms"};
	struct ctl_tab t;
	int words = memfd_create("kvpickctl-check", MFD_CLOEXEC), bad = 0;
	ctl_tab_begin(&t, c, "check", sizeof(col) / sizeof(col[0]), col);
	for (size_t i = 0; i < sizeof(object) / sizeof(object[0]); i++) {
		uint64_t start = kvp_clock_mono_ns(), tries = 0, faults;
		/* A check that meets a change half-way counts it as a fault; a real fault stays. On a busy
		 * machine one try may last longer than all of the time. */
		while ((faults = try_quietly(object[i].check, c->region, words)) && ++tries &&
			(tries < TRIES_MIN || kvp_clock_mono_ns() - start < QUIET_NS))
			poll(NULL, 0, PAUSE_MS);
		if (faults)
			say_words(words);
		bad |= faults != 0;
		ctl_tab_str(&t, object[i].name);
		ctl_tab_u64(&t, faults);
		ctl_tab_u64(&t, tries + (faults == 0));
		ctl_tab_u64(&t, (kvp_clock_mono_ns() - start) / 1000000);
	}
	if (words >= 0)
		close(words);
	int code = ctl_tab_end(&t);
	return code ? code : bad;
}
