#include "daemons/supervisor/sup.h"

#include "daemons/common/log.h"
#include "shm/region.h"
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

void sup_error(struct sup *s, int code, uint32_t line, const char *text)
{
	/* A full log counts what it could not take by itself. */
	(void)kvp_errlog_put(
		&s->node.region->errlog, s->node.owner, kvp_clock_real_ns(), code, "supervisor", line, text);
}

static void send(const struct sup_child *c, int sig)
{
	if (c->pid)
		syscall(SYS_pidfd_send_signal, c->pidfd, sig, NULL, 0);
}

void sup_signal_all(struct sup *s, int sig, int with_indexer)
{
	for (uint32_t i = 0; i < s->child_cnt; i++)
		if (with_indexer || s->child[i].role != KVP_ROLE_INDEXER)
			send(&s->child[i], sig);
	if (sig == SIGKILL)
		send(&s->sweeper, sig);
}

uint32_t sup_alive(const struct sup *s)
{
	uint32_t n = s->sweeper.pid != 0;
	for (uint32_t i = 0; i < s->child_cnt; i++)
		n += s->child[i].pid != 0;
	return n;
}

/* later answers the pause before the next start and doubles the one after that. */
static uint64_t later(struct sup *s, uint64_t *backoff_ms)
{
	uint64_t wait = *backoff_ms;
	*backoff_ms = wait ? wait * 2 : SUP_BACKOFF_MIN_MS;
	if (*backoff_ms > s->cfg->restart_backoff_max_ms)
		*backoff_ms = s->cfg->restart_backoff_max_ms;
	return wait;
}

static int spawn(struct sup *s, struct sup_child *c, const char *const *extra, uint64_t now)
{
	c->owner = kvp_slot_assign(s->node.slots, c->slot, c->role, c->instance);
	KVP_ASSERT(c->owner != 0);
	int rc = kvp_node_spawn(&s->node, c->slot, c->program, extra, &c->pid, &c->pidfd);
	if (rc) {
		int saved = errno;
		c->pid = 0;
		kvp_slot_release(s->node.slots, c->owner);
		KVP_LOG_W("child.start", "role=%s instance=%u error=%s", kvp_role_name(c->role), c->instance,
			strerror(saved));
		return rc;
	}
	c->start_ms = now;
	c->stuck = 0;
	return KVP_OK;
}

void sup_start_due(struct sup *s, uint64_t now)
{
	for (uint32_t i = 0; i < s->child_cnt && s->mode == SUP_RUN; i++) {
		struct sup_child *c = &s->child[i];
		if (c->state != SUP_DOWN || c->next_ms > now || (c->role != KVP_ROLE_INDEXER && !s->opened))
			continue;
		if (spawn(s, c, NULL, now)) {
			c->next_ms = now + SUP_BACKOFF_MIN_MS + later(s, &c->backoff_ms);
			continue;
		}
		c->state = SUP_STARTING;
		if (c->starts++)
			kvp_ctr_add(s->ctr, KVP_CTR_SUP_RESTARTED, 1);
		KVP_LOG_I("child.started", "role=%s instance=%u slot=%u pid=%d start=%u",
			kvp_role_name(c->role), c->instance, c->slot, (int)c->pid, c->starts);
	}
}

static void release(struct sup *s, struct sup_child *c)
{
	kvp_slot_release(s->node.slots, c->owner);
	c->owner = 0;
	c->state = SUP_DOWN;
}

static void say_exit(const struct sup_child *c, int st, uint64_t ran_ms)
{
	const char *how = WIFSIGNALED(st) ? "signal" : "exit";
	int n = WIFSIGNALED(st) ? WTERMSIG(st) : WEXITSTATUS(st);
	KVP_LOG_N("child.ended", "role=%s instance=%u pid=%d how=%s code=%d ran_ms=%llu",
		kvp_role_name(c->role), c->instance, (int)c->pid, how, n, (unsigned long long)ran_ms);
}

static void child_ended(struct sup *s, struct sup_child *c, int st, uint64_t now)
{
	uint64_t ran = now - c->start_ms;
	int code = WIFEXITED(st) ? WEXITSTATUS(st) : 256;
	int active = kvp_ld_acq_u32(&s->node.slots->slot[c->slot].state) == KVP_SLOT_ACTIVE;
	say_exit(c, st, ran);
	close(c->pidfd);
	c->pidfd = -1;
	c->pid = 0;
	if (s->mode != SUP_RUN) { /* the region goes away with the node: nothing to sweep */
		release(s, c);
		return;
	}
	if (code != 0)
		sup_error(s, KVP_ERR_CLOSED, __LINE__,
			code == 256 ? "a process was killed by a signal" : "a process ended with an error");
	if (ran >= SUP_HEALTHY_MS)
		c->backoff_ms = 0;
	c->next_ms = now + later(s, &c->backoff_ms);
	c->state = SUP_SWEEP_WAIT;
	if (!active)
		release(s, c); /* never joined: it owns nothing */
	if (code == KVP_EXIT_CONFIG) {
		KVP_LOG_E("child.refused", "role=%s instance=%u code=%d", kvp_role_name(c->role), c->instance,
			code);
		sup_stop(s, KVP_EXIT_CONFIG, now);
	} else if (code == KVP_EXIT_CORRUPT) {
		sup_corrupt(s, "a process found an invariant broken", now);
	}
}

/* A helper that was killed, or could not join, says nothing about the region: a sweep can be repeated from
 * any place. One that hangs does, and so does the third in a row. */
static int sweep_again(struct sup *s, kvp_owner lost, int st, uint64_t now)
{
	struct sup_child *h = &s->sweeper;
	int is_lost = WIFSIGNALED(st) || (WIFEXITED(st) && WEXITSTATUS(st) == KVP_EXIT_AGAIN);
	if (!is_lost || h->stuck || s->sweep_lost_cnt + 1 >= SUP_SWEEP_TRIES)
		return 0;
	s->sweep_lost[s->sweep_lost_cnt++] = lost;
	h->next_ms = now + later(s, &h->backoff_ms);
	s->child[s->sweep_target].state = SUP_SWEEP_WAIT;
	kvp_ctr_add(s->ctr, KVP_CTR_SUP_SWEPT_AGAIN, 1);
	return 1;
}

static void sweeper_ended(struct sup *s, int st, uint64_t now)
{
	struct sup_child *h = &s->sweeper, *c = &s->child[s->sweep_target];
	int is_bad = s->mode == SUP_RUN && (!WIFEXITED(st) || WEXITSTATUS(st) != 0);
	if (is_bad)
		say_exit(h, st, now - h->start_ms);
	close(h->pidfd);
	h->pidfd = -1;
	h->pid = 0;
	kvp_owner owner = h->owner;
	release(s, h);
	if (s->mode != SUP_RUN) {
		release(s, c);
		return;
	}
	if (is_bad) {
		if (sweep_again(s, owner, st, now))
			return;
		sup_corrupt(s, "the sweep of a dead process failed", now);
		return;
	}
	release(s, c);
	s->sweep_lost_cnt = 0;
	h->next_ms = h->backoff_ms = 0;
	kvp_ctr_add(s->ctr, KVP_CTR_SUP_SWEPT, 1);
	KVP_LOG_I("child.swept", "role=%s instance=%u slot=%u ms=%llu", kvp_role_name(c->role), c->instance,
		c->slot, (unsigned long long)(now - h->start_ms));
}

void sup_reap(struct sup *s, uint64_t now)
{
	int st;
	pid_t pid;
	/* Any child: as process 1 of a container it inherits strangers, too. */
	while ((pid = waitpid(-1, &st, WNOHANG)) > 0) {
		if (pid == s->sweeper.pid) {
			sweeper_ended(s, st, now);
			continue;
		}
		for (uint32_t i = 0; i < s->child_cnt; i++)
			if (s->child[i].pid == pid) {
				child_ended(s, &s->child[i], st, now);
				break;
			}
	}
}

void sup_sweep_next(struct sup *s, uint64_t now)
{
	struct sup_child *h = &s->sweeper;
	if (h->pid && now - h->start_ms > SUP_SWEEP_TIMEOUT_MS) {
		KVP_LOG_W("sweep.timeout", "slot=%u", s->child[s->sweep_target].slot);
		h->stuck = 1;
		send(h, SIGKILL); /* its end counts as a failed sweep */
	}
	if (h->pid || s->mode != SUP_RUN || h->next_ms > now)
		return;
	for (uint32_t i = 0; i < s->child_cnt; i++) {
		struct sup_child *c = &s->child[i];
		if (c->state != SUP_SWEEP_WAIT)
			continue;
		char slot[16], lost[SUP_SWEEP_TRIES][16];
		const char *extra[4 + 2 * SUP_SWEEP_TRIES] = {"sweep", "--slot", slot};
		snprintf(slot, sizeof(slot), "%u", c->slot);
		for (uint32_t k = 0; k < s->sweep_lost_cnt; k++) {
			snprintf(lost[k], sizeof(lost[k]), "%u", s->sweep_lost[k]);
			extra[3 + 2 * k] = "--lost";
			extra[4 + 2 * k] = lost[k];
		}
		if (spawn(s, h, extra, now))
			return; /* tried again in the next turn */
		c->state = SUP_SWEEPING;
		h->state = SUP_UP;
		s->sweep_target = i;
		return;
	}
}

static void watch_one(struct sup *s, struct sup_child *c, uint64_t now)
{
	struct kvp_slots *t = s->node.slots;
	enum kvp_ctl ctl = kvp_slot_control_get(t, c->slot);
	if (c->state == SUP_STARTING && ctl == KVP_CTL_RUN) {
		c->state = SUP_UP;
		KVP_LOG_I("child.running", "role=%s instance=%u pid=%d ms=%llu", kvp_role_name(c->role),
			c->instance, (int)c->pid, (unsigned long long)(now - c->start_ms));
		if (c->role == KVP_ROLE_INDEXER)
			s->opened = 1;
	}
	uint64_t beat = kvp_ld_rlx_u64(&t->slot[c->slot].beat_ms);
	uint64_t since = beat > c->start_ms ? beat : c->start_ms, age = now > since ? now - since : 0;
	uint64_t limit = c->state == SUP_STARTING ? SUP_BOOT_STUCK_MS : s->cfg->slot_stuck_ms;
	if (age <= limit) {
		c->stuck = 0;
		return;
	}
	if (!c->stuck) {
		c->stuck = 1;
		kvp_ctr_add(s->ctr, KVP_CTR_SUP_STUCK, 1);
		sup_error(s, KVP_ERR_TIMEOUT, __LINE__, "a process gave no heartbeat");
		KVP_LOG_W("child.stuck", "role=%s instance=%u pid=%d control=%s ms=%llu",
			kvp_role_name(c->role), c->instance, (int)c->pid, kvp_ctl_name(ctl),
			(unsigned long long)age);
	}
	if (age > limit * SUP_STUCK_KILL) {
		kvp_ctr_add(s->ctr, KVP_CTR_SUP_KILLED, 1);
		KVP_LOG_W("child.kill", "role=%s instance=%u pid=%d ms=%llu", kvp_role_name(c->role),
			c->instance, (int)c->pid, (unsigned long long)age);
		send(c, SIGKILL);
	}
}

void sup_watch(struct sup *s, uint64_t now)
{
	for (uint32_t i = 0; i < s->child_cnt && s->mode == SUP_RUN; i++)
		if (s->child[i].pid)
			watch_one(s, &s->child[i], now);
}
