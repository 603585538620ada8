#include "daemons/ctl/ctl.h"

#include <inttypes.h>
#include <kvpick/clock.h>
#include <string.h>

static const char *state_name(uint32_t s)
{
	static const char *const name[] = {"free", "assigned", "active"};
	return s < 3 ? name[s] : "?";
}

int ctl_slots(struct ctl *c)
{
	static const char *const col[] = {"slot", "role", "instance", "generation", "state", "control", "pid",
		"alive", "beat_age_ms", "uptime_ms", "started"};
	struct ctl_tab t;
	const struct kvp_slots *s = &c->region->slots;
	uint64_t now = kvp_clock_mono_ns() / 1000000;
	ctl_tab_begin(&t, c, "slots", sizeof(col) / sizeof(col[0]), col);
	for (uint32_t i = 0, n = 0; i < s->slot_max && n < c->limit; i++, n++) {
		const struct kvp_slot_shm *p = &s->slot[i];
		int active = kvp_ld_acq_u32(&p->state) == KVP_SLOT_ACTIVE;
		uint64_t beat = kvp_ld_rlx_u64(&p->beat_ms), start = kvp_ld_rlx_u64(&p->start_ms);
		ctl_tab_u64(&t, i);
		ctl_tab_str(&t, kvp_role_name((enum kvp_role)kvp_ld_rlx_u32(&p->role)));
		ctl_tab_u64(&t, kvp_ld_rlx_u32(&p->instance));
		ctl_tab_u64(&t, KVP_OWNER_GEN(kvp_slot_owner(s, i)));
		ctl_tab_str(&t, state_name(kvp_ld_rlx_u32(&p->state)));
		ctl_tab_str(&t, kvp_ctl_name(kvp_slot_control_get(s, i)));
		ctl_tab_u64(&t, active ? kvp_ld_rlx_u32(&p->pid) : 0);
		/* The supervisor holds the byte of the node, not one of its slot. */
		int alive = i ? kvp_slot_alive(c->at.lock_fd, i)
			      : kvp_lock_held(c->at.lock_fd, KVP_LOCK_BYTE_NODE);
		if (alive < 0)
			ctl_tab_none(&t);
		else
			ctl_tab_str(&t, alive ? "yes" : "no");
		ctl_tab_u64(&t, active && now > beat ? now - beat : 0);
		ctl_tab_u64(&t, active && now > start ? now - start : 0);
		ctl_tab_u64(&t, kvp_ld_rlx_u64(&c->region->counters.column[i].val[KVP_CTR_PROC_STARTED]));
	}
	return ctl_tab_end(&t);
}

int ctl_errors(struct ctl *c)
{
	static const char *const col[] = {"count", "first", "last", "slot", "code", "error", "place", "text"};
	struct ctl_tab t;
	struct kvp_errlog_entry e;
	uint64_t n = 0;
	ctl_tab_begin(&t, c, "errors", sizeof(col) / sizeof(col[0]), col);
	for (uint32_t i = 0; i < KVP_ERRLOG_MAX && n < c->limit; i++) {
		char first[32], last[32], place[64];
		if (kvp_errlog_get(&c->region->errlog, i, &e) != KVP_OK)
			continue;
		n++;
		ctl_time(e.first_ns, first);
		ctl_time(e.last_ns, last);
		snprintf(place, sizeof(place), "%s:%u", e.module, e.line);
		ctl_tab_u64(&t, e.cnt);
		ctl_tab_str(&t, first);
		ctl_tab_str(&t, last);
		ctl_tab_u64(&t, e.slot);
		char code[16];
		snprintf(code, sizeof(code), "%d", e.code);
		ctl_tab_str(&t, code);
		ctl_tab_str(&t, kvp_strerror(e.code));
		ctl_tab_str(&t, place);
		ctl_tab_str(&t, e.text);
	}
	uint64_t lost = kvp_errlog_lost(&c->region->errlog);
	if (lost)
		fprintf(stderr, "kvpickctl: the log is full, %" PRIu64 " occurrences had no room\n", lost);
	return ctl_tab_end(&t);
}

static void peer_row(void *ctx, const char *text, uint32_t len)
{
	ctl_tab_strn(ctx, text, len);
}

int ctl_peers(struct ctl *c)
{
	static const char *const col[] = {"endpoint"};
	struct ctl_tab t;
	ctl_tab_begin(&t, c, "peers", 1, col);
	if (kvp_peers_list(&c->region->peers, peer_row, &t))
		t.failed = 1;
	return ctl_tab_end(&t);
}

int ctl_gen(struct ctl *c)
{
	static const char *const col[] = {"object", "offset", "bytes", "layout", "layout_hash", "complete"};
	const struct kvp_super_shm *s = c->region->super;
	char created[32], gen[24], id[KVP_BUILD_ID_BYTES + 1] = "", boot[41] = "";
	ctl_time(s->created_real_ns, created);
	snprintf(gen, sizeof(gen), "%016" PRIx64, s->geom.region_gen);
	memcpy(id, s->build_id, sizeof(s->build_id));
	memcpy(boot, s->boot_id, sizeof(s->boot_id));
	if (c->form == CTL_JSON) {
		kvp_jw_kstr(&c->doc, "generation", gen);
		kvp_jw_kstr(&c->doc, "build_id", id);
		kvp_jw_kstr(&c->doc, "created", created);
		kvp_jw_kstr(&c->doc, "boot_id", boot);
		kvp_jw_ku64(&c->doc, "bytes", s->total_bytes);
		kvp_jw_ku64(&c->doc, "supervisor", (uint64_t)c->at.supervisor);
	} else {
		printf("generation %s\nbuild      %s\ncreated    %s\nboot       %s\nbytes      %" PRIu64
		       "\nsupervisor %d\n",
			gen, id, created, boot, s->total_bytes, (int)c->at.supervisor);
	}
	struct ctl_tab t;
	ctl_tab_begin(&t, c, "objects", sizeof(col) / sizeof(col[0]), col);
	for (uint32_t i = 0; i < s->dir_cnt && i < KVP_REGION_DIR_MAX; i++) {
		const struct kvp_dirent_shm *d = &s->dir[i];
		const struct kvp_objhdr *h = (const void *)(c->region->base + d->off);
		char hash[16];
		snprintf(hash, sizeof(hash), "%08x", h->layout_hash);
		ctl_tab_strn(&t, d->name, strnlen(d->name, sizeof(d->name)));
		ctl_tab_u64(&t, d->off);
		ctl_tab_u64(&t, d->footprint);
		ctl_tab_u64(&t, h->layout);
		ctl_tab_str(&t, hash);
		ctl_tab_str(&t, kvp_ld_acq_u64(&h->magic) ? "yes" : "no");
	}
	return ctl_tab_end(&t);
}

int ctl_radix(struct ctl *c)
{
	static const char *const col[] = {"name", "value"};
	struct ctl_tab t;
	struct kvp_radix_stats s;
	kvp_radix_stats(&c->region->radix, &s);
	ctl_tab_begin(&t, c, "radix", 2, col);
#define X(field)                                                                                             \
	ctl_tab_str(&t, #field);                                                                             \
	ctl_tab_u64(&t, s.field);
	KVP_RADIX_STAT_LIST(X)
	X(generation)
	X(block_max)
	X(run_max)
	X(ready)
	X(slot_max)
#undef X
	for (uint32_t i = 0; i < c->region->super->dir_cnt && i < KVP_REGION_DIR_MAX; i++)
		if (strncmp(c->region->super->dir[i].name, "radix", 6) == 0) {
			ctl_tab_str(&t, "bytes_reserved");
			ctl_tab_u64(&t, c->region->super->dir[i].footprint);
		}
	return ctl_tab_end(&t);
}
