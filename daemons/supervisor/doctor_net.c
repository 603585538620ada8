#include "daemons/supervisor/doctor.h"

#include "ipc/loop.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <yaml.h>

/* -- listeners -- */

#define INODE_MAX 128

/* listening collects the sockets that listen on a TCP port, by their inode. */
static unsigned listening(const char *table, unsigned port, unsigned long *inode, unsigned cnt)
{
	char line[512];
	FILE *f = fopen(table, "re");
	while (f && cnt < INODE_MAX && fgets(line, sizeof(line), f)) {
		unsigned local, state;
		unsigned long ino;
		if (sscanf(line, " %*d: %*[0-9A-Fa-f]:%x %*[0-9A-Fa-f]:%*x %x %*s %*s %*s %*s %*s %lu",
			    &local, &state, &ino) == 3 &&
			local == port && state == 10)
			inode[cnt++] = ino;
	}
	if (f)
		fclose(f);
	return cnt;
}

static int is_ours(const struct doctor *d, pid_t pid)
{
	for (uint32_t i = 0; d->region->base && i < d->region->slots.slot_max; i++)
		if (kvp_ld_rlx_u32(&d->region->slots.slot[i].pid) == (uint32_t)pid)
			return 1;
	return 0;
}

static int holds(const char *pid, const unsigned long *inode, unsigned cnt)
{
	char path[320], link[64];
	unsigned long ino;
	int found = 0;
	snprintf(path, sizeof(path), "/proc/%.20s/fd", pid);
	DIR *dir = opendir(path);
	for (struct dirent *e; dir && !found && (e = readdir(dir)) != NULL;) {
		snprintf(path, sizeof(path), "/proc/%.20s/fd/%.20s", pid, e->d_name);
		ssize_t n = readlink(path, link, sizeof(link) - 1);
		link[n > 0 ? n : 0] = 0;
		if (sscanf(link, "socket:[%lu]", &ino) != 1)
			continue;
		for (unsigned i = 0; i < cnt; i++)
			found |= inode[i] == ino;
	}
	if (dir)
		closedir(dir);
	return found;
}

/* holder names who listens on a port. 1 = a process of the running node, 0 = somebody else. */
static int holder(const struct doctor *d, unsigned port, char *name, size_t cap)
{
	unsigned long inode[INODE_MAX];
	unsigned cnt = listening("/proc/net/tcp", port, inode, 0);
	cnt = listening("/proc/net/tcp6", port, inode, cnt);
	snprintf(name, cap, "a process of another user or container");
	int ours = 0;
	DIR *proc = cnt ? opendir("/proc") : NULL;
	for (struct dirent *e; proc && !ours && (e = readdir(proc)) != NULL;) {
		char path[320], comm[32] = "?";
		if (e->d_name[strspn(e->d_name, "0123456789")] || !holds(e->d_name, inode, cnt))
			continue;
		snprintf(path, sizeof(path), "/proc/%.20s/comm", e->d_name);
		FILE *f = fopen(path, "re");
		if (f && fgets(comm, sizeof(comm), f))
			comm[strcspn(comm, "\n")] = 0;
		if (f)
			fclose(f);
		snprintf(name, cap, "%s, pid %.20s", comm, e->d_name);
		ours = is_ours(d, (pid_t)strtol(e->d_name, NULL, 10));
	}
	if (proc)
		closedir(proc);
	return ours;
}

/* try_bind: 0 when the address is free, else errno. */
static int try_bind(const char *ip, unsigned port)
{
	struct kvp_addr a;
	int one = 1;
	if (kvp_addr_ip(&a, ip, (uint16_t)port) != KVP_OK)
		return EINVAL;
	int fd = socket(a.ss.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return errno;
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	int err = bind(fd, (struct sockaddr *)&a.ss, a.len) == 0 && listen(fd, 1) == 0 ? 0 : errno;
	close(fd);
	return err;
}

static void tcp_listener(struct doctor *d, const char *name, const char *ip, unsigned port)
{
	char who[80];
	int err = port ? try_bind(ip, port) : 0;
	if (!port)
		return;
	if (!err && d->region->base)
		doc_say(d, DOC_WARN, "ports",
			"give doctor the node's own settings (flags, variables, file), or wait until it has "
			"started",
			"%s: port %u is free although the node runs", name, port);
	else if (!err)
		doc_say(d, DOC_OK, "ports", NULL, "%s: port %u on %s is free", name, port, ip);
	else if (err == EADDRINUSE && holder(d, port, who, sizeof(who)))
		doc_say(d, DOC_OK, "ports", NULL, "%s: port %u is held by the node (%s)", name, port, who);
	else if (err == EADDRINUSE)
		doc_say(d, DOC_FAIL, "ports", "stop it, or choose another port", "%s: port %u is held by %s",
			name, port, who);
	else if (err == EACCES)
		doc_say(d, DOC_FAIL, "ports",
			"choose a port from 1024 on, or give the capability CAP_NET_BIND_SERVICE",
			"%s: port %u: %s", name, port, strerror(err));
	else
		doc_say(d, DOC_FAIL, "ports", "give an address of this machine", "%s: %s port %u: %s", name,
			ip, port, strerror(err));
}

static void unix_listener(struct doctor *d, const char *path)
{
	char dir[1024];
	snprintf(dir, sizeof(dir), "%s", path);
	*strrchr(dir, '/') = 0;
	if (access(dir[0] ? dir : "/", W_OK | X_OK) != 0)
		doc_say(d, DOC_FAIL, "ports",
			"make the directory, writable for the user of the node; Envoy must be the same user "
			"(mode 0600)",
			"KVPICK_EPP_LISTEN: %s: %s", dir, strerror(errno));
	else
		doc_say(d, DOC_OK, "ports", NULL, "KVPICK_EPP_LISTEN: a socket can be made in %s", dir);
}

static void epp_listeners(struct doctor *d)
{
	const struct kvp_config *c = d->cfg;
	char member[1024];
	size_t pos = 0;
	if (!c->epp_listen[0])
		tcp_listener(d, "KVPICK_EPP_PORT", "0.0.0.0", (unsigned)c->epp_port);
	while (kvp_config_list_next(c->epp_listen, &pos, member, sizeof(member))) {
		if (strncmp(member, "unix:", 5) == 0) {
			unix_listener(d, member + 5);
			continue;
		}
		char *colon = strrchr(member, ':');
		*colon = 0;
		tcp_listener(d, "KVPICK_EPP_LISTEN", member, (unsigned)strtoul(colon + 1, NULL, 10));
	}
	tcp_listener(d, "KVPICK_EPP_HEALTH_PORT", "0.0.0.0", (unsigned)c->epp_health_port);
}

void doc_listeners(struct doctor *d)
{
	const struct kvp_config *c = d->cfg;
	tcp_listener(d, "KVPICK_PORT", c->bind, c->eff.api_port);
	tcp_listener(d, "DYN_EPP_METRICS_PORT", c->bind, c->eff.metrics_port);
	if (c->eff.epp_on)
		epp_listeners(d);
	if (c->eff.peer_on) {
		tcp_listener(d, "replica sync", "0.0.0.0", c->eff.sync_port);
		tcp_listener(d, "DYN_EPP_SELECTION_HTTP_PORT", "0.0.0.0", c->eff.dump_port);
	}
}

/* -- event sockets of engines -- */

#define ADDRESS_MAX 4096
#define SAID_MAX 8

struct addresses {
	char **text;
	uint32_t cnt, left_out;
};

static void add_address(struct addresses *a, const char *text, size_t len)
{
	for (uint32_t i = 0; i < a->cnt; i++)
		if (strlen(a->text[i]) == len && memcmp(a->text[i], text, len) == 0)
			return;
	char *copy = a->cnt < ADDRESS_MAX ? strndup(text, len) : NULL;
	if (copy)
		a->text[a->cnt++] = copy;
	else
		a->left_out++;
}

static int from_file(struct doctor *d, struct addresses *a)
{
	const char *path = d->cfg->workers_file;
	yaml_parser_t p;
	yaml_event_t e = {.type = YAML_NO_EVENT};
	FILE *f = fopen(path, "re");
	if (!f || !yaml_parser_initialize(&p)) {
		doc_say(d, DOC_FAIL, "workers file", "make it readable for the user of the node", "%s: %s",
			path, strerror(errno));
		if (f)
			fclose(f);
		return KVP_ERR_SYS;
	}
	int ok;
	yaml_parser_set_input_file(&p, f);
	do {
		yaml_event_delete(&e);
		ok = yaml_parser_parse(&p, &e);
		const char *v = ok && e.type == YAML_SCALAR_EVENT ? (const char *)e.data.scalar.value : "";
		if (strncmp(v, "tcp://", 6) == 0)
			add_address(a, v, strlen(v));
	} while (ok && e.type != YAML_STREAM_END_EVENT);
	if (ok)
		doc_say(d, DOC_OK, "workers file", NULL, "%s: %u event addresses", path, a->cnt);
	else
		doc_say(d, DOC_FAIL, "workers file", "correct it: a mapping with the list `workers:`",
			"%s: line %zu: %s", path, p.problem_mark.line + 1,
			p.problem ? p.problem : "syntax error");
	yaml_event_delete(&e);
	yaml_parser_delete(&p);
	fclose(f);
	return ok ? KVP_OK : KVP_ERR_INVAL;
}

static void from_node(struct doctor *d, struct addresses *a)
{
	const struct kvp_cat *cat = &d->region->cat;
	char *json = malloc(KVP_CAT_RECORD_MAX + 1);
	for (uint32_t i = 0; json && i < kvp_cat_worker_max(cat); i++) {
		uint32_t len = 0;
		if (kvp_cat_worker_json(cat, i, json, KVP_CAT_RECORD_MAX, &len) != KVP_OK)
			continue;
		json[len] = 0;
		for (const char *p = json; (p = strstr(p, "\"tcp://")) != NULL; p++)
			add_address(a, p + 1, strcspn(p + 1, "\"\\"));
	}
	free(json);
}

/* greets: 1 when ZeroMQ answers there. The signature of its protocol comes without being asked for. */
static int greets(const char *text, char *error, size_t cap)
{
	char host[256];
	unsigned char sign[10];
	size_t got = 0;
	const char *colon = strrchr(text, ':'), *from = text + 6;
	size_t len = colon > from ? (size_t)(colon - from) : 0;
	int bracket = len > 2 && from[0] == '[';
	snprintf(host, sizeof(host), "%.*s", (int)len - 2 * bracket, from + bracket);
	if (strcmp(host, "*") == 0 || strcmp(host, "0.0.0.0") == 0 || strcmp(host, "::") == 0) {
		snprintf(error, cap, "an address to listen on, not one to connect to");
		return 0;
	}
	int fd = doc_connect(host, (uint16_t)strtoul(colon + 1, NULL, 10), DOC_CONNECT_MS, error, cap);
	if (fd < 0)
		return 0;
	struct pollfd p = {.fd = fd, .events = POLLIN};
	while (got < sizeof(sign) && poll(&p, 1, 1000) == 1) {
		ssize_t n = recv(fd, sign + got, sizeof(sign) - got, 0);
		if (n <= 0)
			break;
		got += (size_t)n;
	}
	close(fd);
	snprintf(error, cap, "something answers that is not ZeroMQ");
	return got == sizeof(sign) && sign[0] == 0xff && sign[9] == 0x7f;
}

static void try_all(struct doctor *d, struct addresses *a)
{
	uint64_t end = sup_now_ms() + DOC_EVENTS_MS;
	uint32_t good = 0, bad = 0, i = 0;
	char error[320];
	for (; i < a->cnt && sup_now_ms() < end; i++) {
		if (greets(a->text[i], error, sizeof(error)))
			good++;
		else if (++bad <= SAID_MAX)
			doc_say(d, DOC_FAIL, "event ports",
				"start the engine with KV events over ZMQ (--kv-events-config), let the "
				"network pass that "
				"port, or correct the worker's registration",
				"%s: %s", a->text[i], error);
	}
	uint32_t rest = a->cnt - i + a->left_out;
	if (bad > SAID_MAX)
		doc_say(d, DOC_FAIL, "event ports", "as above", "%u further addresses do not answer",
			bad - SAID_MAX);
	if (rest)
		doc_say(d, DOC_WARN, "event ports", "mend the others first",
			"%u addresses were not looked at: out of time", rest);
	if (good)
		doc_say(d, DOC_OK, "event ports", NULL, "%u of %u addresses answer as ZeroMQ does", good,
			a->cnt);
}

void doc_events(struct doctor *d)
{
	struct addresses a = {.text = calloc(ADDRESS_MAX, sizeof(*a.text))};
	int rc = KVP_OK;
	if (!a.text)
		return;
	if (d->cfg->workers_file[0])
		rc = from_file(d, &a);
	if (d->region->base)
		from_node(d, &a);
	if (d->cfg->use_kv_events && rc == KVP_OK)
		try_all(d, &a);
	for (uint32_t i = 0; i < a.cnt; i++)
		free(a.text[i]);
	free(a.text);
}

/* A peer that is away is no failure: it may start later. */
void doc_peers(struct doctor *d)
{
	static const char *const todo =
		"start it, or correct the list; the port must be its replica sync port";
	char member[1024], error[320];
	unsigned good = 0, all = 0;
	size_t pos = 0;
	uint64_t end = sup_now_ms() + DOC_EVENTS_MS;
	while (kvp_config_list_next(d->cfg->replica_sync_peers, &pos, member, sizeof(member))) {
		all++;
		if (strncmp(member, "tcp://", 6) != 0 || sup_now_ms() > end)
			continue;
		if (greets(member, error, sizeof(error)))
			good++;
		else
			doc_say(d, DOC_WARN, "replicas", todo, "%.200s: %s", member, error);
	}
	if (good)
		doc_say(d, DOC_OK, "replicas", NULL, "%u of %u peers answer", good, all);
}
