#include "daemons/supervisor/sup.h"

#include "daemons/common/log.h"
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <unistd.h>

void sup_stop(struct sup *s, int exit_code, uint64_t now)
{
	if (s->mode != SUP_RUN && s->mode != SUP_REBUILD)
		return;
	int rebuilding = s->mode == SUP_REBUILD; /* everybody is being killed already */
	s->exit_code = exit_code;
	s->deadline_ms = now + s->cfg->drain_timeout_ms;
	s->mode = rebuilding || s->cfg->drain_timeout_ms == 0 ? SUP_KILL : SUP_DRAIN;
	if (s->node.slots)
		kvp_slot_control(s->node.slots, 0, KVP_CTL_DRAIN);
	sup_signal_all(s, s->mode == SUP_DRAIN ? SIGTERM : SIGKILL, s->mode != SUP_DRAIN);
	KVP_LOG_N("node.stopping", "code=%d timeout_ms=%llu", exit_code,
		(unsigned long long)s->cfg->drain_timeout_ms);
}

void sup_corrupt(struct sup *s, const char *why, uint64_t now)
{
	if (s->mode != SUP_RUN)
		return;
	sup_error(s, KVP_ERR_CORRUPT, __LINE__, why);
	KVP_LOG_W("node.corrupt", "why=%s generation=%llx", why, (unsigned long long)s->node.geom.region_gen);
	s->mode = SUP_REBUILD;
	if (now - s->rebuild_ms > SUP_HEALTHY_MS * 6)
		s->rebuild_backoff_ms = 0;
	s->rebuild_ms = now;
	kvp_slot_control(s->node.slots, 0, KVP_CTL_FAIL);
	sup_signal_all(s, SIGKILL, 1);
}

/* rebuild makes a new region when the last process of the old one is gone. */
static void rebuild(struct sup *s, uint64_t now)
{
	sup_archive(s);
	s->rebuilds++;
	s->mode = SUP_RUN;
	s->opened = 0;
	for (uint32_t i = 0; i < s->child_cnt; i++) {
		s->child[i].state = SUP_DOWN;
		s->child[i].next_ms = now + s->rebuild_backoff_ms;
	}
	s->sweeper.state = SUP_DOWN;
	s->sweeper.next_ms = s->sweeper.backoff_ms = 0;
	s->sweep_lost_cnt = 0;
	uint64_t next = s->rebuild_backoff_ms ? s->rebuild_backoff_ms * 2 : SUP_BACKOFF_MIN_MS;
	uint64_t max = s->cfg->restart_backoff_max_ms;
	s->rebuild_backoff_ms = next < max ? next : max;
	int code = sup_region(s);
	if (code) {
		s->exit_code = code;
		s->mode = SUP_KILL;
	}
}

/* progress moves a stop forward. Answers 1 when the node has stopped. */
static int progress(struct sup *s, uint64_t now)
{
	uint32_t alive = sup_alive(s), indexers = 0;
	for (uint32_t i = 0; i < s->child_cnt; i++)
		indexers += s->child[i].role == KVP_ROLE_INDEXER && s->child[i].pid != 0;
	switch (s->mode) {
	case SUP_RUN:
		return 0;
	case SUP_REBUILD:
		if (alive == 0)
			rebuild(s, now);
		return s->mode == SUP_KILL; /* there is no region any more */
	case SUP_KILL:
		return alive == 0;
	case SUP_DRAIN:
	case SUP_DRAIN_2:
		break;
	}
	if (alive == 0)
		return 1;
	if (s->mode == SUP_DRAIN && alive == indexers) {
		s->mode = SUP_DRAIN_2;
		sup_signal_all(s, SIGTERM, 1);
	}
	if (now >= s->deadline_ms) {
		KVP_LOG_W("node.drain_timeout", "alive=%u", alive);
		s->mode = SUP_KILL;
		sup_signal_all(s, SIGKILL, 1);
	}
	return 0;
}

static void on_signals(struct sup *s, uint64_t now)
{
	struct signalfd_siginfo si;
	while (read(s->sig_fd, &si, sizeof(si)) == (ssize_t)sizeof(si)) {
		if (si.ssi_signo == SIGHUP) {
			KVP_LOG_N("node.sighup", "action=ignored");
		} else if (si.ssi_signo == SIGTERM || si.ssi_signo == SIGINT) {
			if (s->mode == SUP_DRAIN || s->mode == SUP_DRAIN_2)
				s->deadline_ms = now; /* asked twice: no more patience */
			else
				sup_stop(s, KVP_EXIT_OK, now);
		}
	}
}

static int open_signals(struct sup *s)
{
	sigset_t set;
	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGINT);
	sigaddset(&set, SIGHUP);
	sigaddset(&set, SIGCHLD);
	signal(SIGPIPE, SIG_IGN);
	sigprocmask(SIG_BLOCK, &set, NULL);
	s->sig_fd = signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC);
	return s->sig_fd >= 0 ? 0 : KVP_EXIT_DEPEND;
}

static int timeout_ms(const struct sup *s, uint64_t now)
{
	uint64_t t = s->cfg->slot_beat_ms;
	for (uint32_t i = 0; i < s->child_cnt && s->mode == SUP_RUN; i++)
		if (s->child[i].state == SUP_DOWN && s->child[i].next_ms > now &&
			s->child[i].next_ms - now < t)
			t = s->child[i].next_ms - now;
	if ((s->mode == SUP_DRAIN || s->mode == SUP_DRAIN_2) && s->deadline_ms < now + t)
		t = s->deadline_ms > now ? s->deadline_ms - now : 0;
	return (int)t;
}

static void wait_events(struct sup *s, uint64_t now)
{
	struct pollfd p[SUP_CHILD_MAX + 4];
	nfds_t n = 0;
	p[n++] = (struct pollfd){.fd = s->sig_fd, .events = POLLIN};
	p[n++] = (struct pollfd){.fd = s->node.sock_fd, .events = POLLIN};
	p[n++] = (struct pollfd){.fd = s->node.wake_fds[0], .events = POLLIN};
	p[n++] = (struct pollfd){.fd = s->sweeper.pidfd, .events = POLLIN};
	for (uint32_t i = 0; i < s->child_cnt; i++)
		if (s->child[i].pid)
			p[n++] = (struct pollfd){.fd = s->child[i].pidfd, .events = POLLIN};
	poll(p, n, timeout_ms(s, now));
}

static void serve(struct sup *s)
{
	uint32_t denied = 0;
	int answered = kvp_node_serve(&s->node, &denied);
	if (s->ctr && s->node.region) {
		kvp_ctr_add(s->ctr, KVP_CTR_SUP_ATTACHED, (uint64_t)answered);
		kvp_ctr_add(s->ctr, KVP_CTR_SUP_DENIED, denied);
	}
}

static int loop(struct sup *s)
{
	for (;;) {
		uint64_t now = sup_now_ms();
		kvp_slot_beat(s->node.slots, 0, now);
		kvp_slot_sleep(
			s->node.slots); /* then look at everything, then wait; pairs with: kvp_boot_control */
		on_signals(s, now);
		sup_reap(s, now);
		sup_watch(s, now);
		sup_sweep_next(s, now);
		sup_start_due(s, now);
		serve(s);
		if (progress(s, now))
			return s->exit_code;
		wait_events(s, sup_now_ms());
		kvp_slot_awake(s->node.slots);
	}
}

int sup_run(struct sup *s)
{
	struct kvp_node_err e = {""};
	int code = open_signals(s);
	if (code)
		return code;
	int rc = kvp_node_open(&s->node, s->cfg, s->cfg->run_dir, s->cfg->instance, &e);
	if (rc) {
		KVP_LOG_E("node.refused", "reason=%s", e.text);
		close(s->sig_fd);
		return rc == KVP_ERR_EXISTS  ? KVP_EXIT_AGAIN
		       : rc == KVP_ERR_INVAL ? KVP_EXIT_CONFIG
					     : KVP_EXIT_DEPEND;
	}
	/* Whatever a child might leave behind comes to this process and is reaped. */
	prctl(PR_SET_CHILD_SUBREAPER, 1);
	kvp_config_log(s->cfg);
	code = sup_region(s);
	if (code == 0)
		code = loop(s);
	KVP_LOG_I("node.stopped", "code=%d", code);
	kvp_node_close(&s->node);
	close(s->sig_fd);
	return code;
}
