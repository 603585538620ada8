#include "daemons/supervisor/sup.h"

#include "shm/affinity.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define AFFINITY_PARTS 16	/* partitions that may have all sessions that a partition may have */
#define TTL_MAX_S 4000000000.0 /* a longer time to live is longer than anything runs */

static const char *const program[KVP_ROLE_CNT] = {
	[KVP_ROLE_INDEXER] = "kvpick-indexer",
	[KVP_ROLE_HTTPD] = "kvpick-httpd",
	[KVP_ROLE_EXTPROC] = "kvpick-extproc",
	[KVP_ROLE_PEER] = "kvpick-peer",
	[KVP_ROLE_DISCOVERY] = "kvpick-discovery",
	[KVP_ROLE_CTL] = "kvpickctl",
};

static int find_dir(struct sup *s)
{
	ssize_t n = readlink("/proc/self/exe", s->dir, sizeof(s->dir) - 1);
	if (n <= 0)
		return KVP_EXIT_DEPEND;
	s->dir[n] = 0;
	char *slash = strrchr(s->dir, '/');
	if (!slash)
		return KVP_EXIT_DEPEND;
	*slash = 0;
	return 0;
}

static int find_program(struct sup *s, enum kvp_role role)
{
	snprintf(s->path[role], sizeof(s->path[role]), "%s/%s", s->dir, program[role]);
	if (access(s->path[role], X_OK) == 0)
		return 0;
	fprintf(stderr, "kvpick: %s is missing beside kvpick: the %s role needs it\n", s->path[role],
		kvp_role_name(role));
	return KVP_EXIT_DEPEND;
}

static int add(struct sup *s, enum kvp_role role, uint64_t cnt)
{
	int code = cnt ? find_program(s, role) : 0;
	if (code)
		return code;
	for (uint64_t i = 0; i < cnt; i++) {
		/* Slot 0 is the supervisor, the last one the sweep helper. */
		if (s->child_cnt + 2 >= KVP_SLOT_MAX) {
			fprintf(stderr,
				"kvpick: KVPICK_HTTPD_PROCESSES, KVPICK_EXTPROC_PROCESSES: more than %u\n",
				KVP_SLOT_MAX - 2);
			return KVP_EXIT_CONFIG;
		}
		struct sup_child *c = &s->child[s->child_cnt++];
		c->role = role;
		c->instance = (uint32_t)i;
		c->slot = s->child_cnt;
		c->program = s->path[role];
		c->pidfd = -1;
	}
	return 0;
}

int sup_plan(struct sup *s)
{
	const struct kvp_config *c = s->cfg;
	if (find_dir(s)) {
		fputs("kvpick: cannot tell where its own program file is (/proc/self/exe)\n", stderr);
		return KVP_EXIT_DEPEND;
	}
	int code = add(s, KVP_ROLE_INDEXER, 1);
	code = code ? code : add(s, KVP_ROLE_HTTPD, c->eff.selection_on ? c->httpd_processes : 1);
	code = code ? code : add(s, KVP_ROLE_EXTPROC, c->eff.epp_on ? c->extproc_processes : 0);
	code = code ? code : add(s, KVP_ROLE_PEER, c->eff.peer_on ? 1 : 0);
	code = code ? code : add(s, KVP_ROLE_DISCOVERY, c->eff.discovery_on ? 1 : 0);
	code = code ? code : find_program(s, KVP_ROLE_CTL);
	if (code)
		return code;
	s->sweeper.role = KVP_ROLE_CTL;
	s->sweeper.slot = s->child_cnt + 1;
	s->sweeper.program = s->path[KVP_ROLE_CTL];
	s->sweeper.pidfd = -1;
	s->geom.slot_max = s->child_cnt + 2;
	s->geom.rank_max = (uint32_t)c->max_ranks;
	s->geom.index_rank_max = (uint32_t)c->index_ranks;
	s->geom.resv_max = (uint32_t)c->max_reservations;
	s->geom.block_max = c->max_blocks;
	s->geom.predicted_max = kvp_config_has(c->predicted_ttl_secs) ? c->max_blocks : 0;
	s->geom.active_block_max = c->max_active_blocks;
	s->geom.queued_max = (uint32_t)c->max_queued;
	s->geom.part_max = KVP_PART_MAX;
	s->geom.pending_max = (uint32_t)c->selection_cache_max_entries;
	s->geom.lifecycle_max = c->eff.sync_port ? (uint32_t)c->replica_queue : 0;
	s->geom.pending_bytes = c->selection_cache_max_bytes;
	s->geom.pending_ttl_ns = c->selection_cache_ttl_secs < TTL_MAX_S
					 ? (uint64_t)(c->selection_cache_ttl_secs * 1e9)
					 : (uint64_t)TTL_MAX_S * 1000000000u;
	if (c->session_affinity_ttl_secs != KVP_CONFIG_UNSET) {
		/* A booking ends by age within twice the limit, at the latest. */
		uint64_t hold_s = 2 * c->active_request_expiry_secs + 60;
		s->geom.affinity_max = AFFINITY_PARTS * KVP_AFFINITY_PART_MAX;
		s->geom.affinity_ttl_ns = c->session_affinity_ttl_secs * 1000000000u;
		s->geom.affinity_hold_ns = hold_s < TTL_MAX_S ? hold_s * 1000000000u : UINT64_MAX / 4;
	}
	return 0;
}
