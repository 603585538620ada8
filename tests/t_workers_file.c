/* The workers file: what is read of it, what is refused and where, and when it is looked at. */
#include "daemons/discovery/workers_file.h"
#include "tests/tap.h"

#include <stdlib.h>
#include <unistd.h>

#define MS 1000000ull

static void good(const char *text, uint32_t cnt, const char *first, const char *name)
{
	struct kvp_workers_list l;
	char err[512] = "";
	int rc = kvp_workers_parse(text, strlen(text), &l, err, sizeof(err));
	ok(rc == KVP_OK && l.cnt == cnt, "%s (%d %s)", name, rc, err);
	if (!rc && first) {
		char got[1024] = "";
		memcpy(got, l.want[0].json, l.want[0].len < 1023 ? l.want[0].len : 1023);
		is_str(got, first, "%s: as JSON", name);
	}
	if (!rc)
		kvp_workers_list_free(&l);
}

static void bad(const char *text, const char *says, const char *name)
{
	struct kvp_workers_list l;
	char err[512] = "";
	int rc = kvp_workers_parse(text, strlen(text), &l, err, sizeof(err));
	ok(rc != KVP_OK && strstr(err, says), "%s: %s", name, err);
	if (!rc)
		kvp_workers_list_free(&l);
}

static void forms(void)
{
	good("workers: []", 0, NULL, "an empty list");
	good("workers:\n", 0, NULL, "nothing behind the key");
	good("workers:\n- worker_id: 7\n  endpoint: http://10.0.0.1:8000\n  block_size: 16\n", 1,
		"{\"worker_id\":7,\"endpoint\":\"http://10.0.0.1:8000\",\"block_size\":16}", "one worker");
	good("{\"workers\": [{\"worker_id\": 18446744073709551615, \"is_eagle\": false, \"taints\": "
	     "[\"a\"]}]}",
		1, "{\"worker_id\":18446744073709551615,\"is_eagle\":false,\"taints\":[\"a\"]}",
		"JSON is YAML");
	good("workers:\n- worker_id: 1\n  kv_events_endpoints: {0: tcp://a:1, 1: tcp://a:2}\n"
	     "  model_name: '0123'\n  routing_group: ~x\n  stable_routing_id: null\n",
		1,
		"{\"worker_id\":1,\"kv_events_endpoints\":{\"0\":\"tcp://a:1\",\"1\":\"tcp://a:2\"},"
		"\"model_name\":\"0123\",\"routing_group\":\"~x\",\"stable_routing_id\":null}",
		"maps by rank, quoted numbers, words");
	good("workers:\n- &a\n  worker_id: 1\n  taints: &t [x, y]\n- worker_id: 2\n  taints: *t\n", 2, NULL,
		"anchors are written out");
	good("# comment\n---\nworkers:\n- worker_id: 1\n...\n", 1, NULL, "document marks and comments");
}

/* The role is told to the indexer beside the registration, not in it. */
static void roles(void)
{
	static const enum kvp_part_role want[] = {KVP_PART_PREFILL, KVP_PART_DECODE, KVP_PART_AGGREGATED};
	static const char text[] =
		"workers:\n- role: prefill\n  worker_id: 1\n- worker_id: 2\n  role: DECODE\n"
		"- worker_id: 3\n";
	struct kvp_workers_list l;
	char err[512] = "";
	good(text, 3, "{\"worker_id\":1}", "workers with roles");
	if (ok(kvp_workers_parse(text, strlen(text), &l, err, sizeof(err)) == KVP_OK && l.cnt == 3,
		    "are read")) {
		for (int i = 0; i < 3; i++)
			is_u64(l.want[i].role, want[i], "role of worker %d", i + 1);
		kvp_workers_list_free(&l);
	}
	bad("workers:\n- worker_id: 1\n  role: both\n", "line 3: role is not prefill or decode: both",
		"no role");
	bad("workers:\n- worker_id: 1\n  role: [prefill]\n", "role is not prefill or decode",
		"a list as role");
	bad("workers:\n- worker_id: 1\n  role: decode\n  role: decode\n", "member comes twice: role",
		"two roles");
}

static void refusals(void)
{
	bad("", "not a mapping", "an empty file");
	bad("- worker_id: 1\n", "not a mapping", "a list");
	bad("worker: []", "the one key is workers", "another key");
	bad("workers: []\nmore: 1\n", "the one key is workers", "a second key");
	bad("workers: 5", "workers is not a list", "no list");
	bad("workers:\n- 5\n", "line 2: a worker is not a mapping", "a number as worker");
	bad("workers:\n- worker_id: 1\n  endpont: http://a:1\n", "line 3: unknown member: endpont",
		"a misspelt member");
	bad("workers:\n- worker_id: 1\n  lifecycle: schedulable\n", "unknown member: lifecycle",
		"one that is only told");
	bad("workers:\n- worker_id: 1\n  worker_id: 2\n", "line 3: member comes twice: worker_id",
		"a repeated member");
	bad("workers:\n- endpoint: http://a:1\n", "line 2: not a worker: worker_id", "no id");
	bad("workers:\n- worker_id: '1'\n", "worker_id", "an id in quotes");
	bad("workers:\n- worker_id: 0x10\n", "worker_id", "a number that JSON does not know");
	bad("workers:\n- worker_id: 1\n  block_size: yes\n", "block_size", "a word for a number");
	bad("workers: [\n", "line", "broken YAML");
	bad("workers: []\n---\nworkers: []\n", "more than one document", "two documents");
	bad("workers:\n- worker_id: 1\n  taints: [[[[[[[[[[x]]]]]]]]]]\n", "nested too deep", "nesting");
	bad("workers:\n- worker_id: 1\n  ? [a]\n  : b\n", "a key is not a scalar", "a list as key");
}

/* A text of a few hundred bytes must not become gigabytes: each level of anchors is ten times the one
 * before. */
static void expansion(void)
{
	char text[4096];
	int n = snprintf(text, sizeof(text), "workers:\n- worker_id: 1\n  taints: &a0 [");
	for (int i = 0; i < 10; i++)
		n += snprintf(text + n, sizeof(text) - (size_t)n, "%sxxxxxxxxxxxxxxxxxxxx", i ? ", " : "");
	n += snprintf(text + n, sizeof(text) - (size_t)n, "]\n");
	for (int level = 1; level < 7; level++) {
		n += snprintf(text + n, sizeof(text) - (size_t)n, "- worker_id: %d\n  taints: &a%d [",
			level + 1, level);
		for (int i = 0; i < 10; i++)
			n += snprintf(text + n, sizeof(text) - (size_t)n, "%s*a%d", i ? ", " : "", level - 1);
		n += snprintf(text + n, sizeof(text) - (size_t)n, "]\n");
	}
	bad(text, "taints", "anchors in anchors are refused where they are of no use");
	bad("workers:\n- &w\n  worker_id: 1\n  taints: [*w]\n", "", "an anchor within itself");
}

static void put(const char *path, const char *text)
{
	FILE *f = fopen(path, "w");
	if (f) {
		fputs(text, f);
		fclose(f);
	}
}

static void watch(void)
{
	char path[] = "/tmp/kvpick-workers-XXXXXX", next[64], err[512];
	struct kvp_workers_list l;
	int fd = mkstemp(path);
	close(fd);
	snprintf(next, sizeof(next), "%s.next", path);
	struct kvp_workers_watch w = {.path = path};
	uint64_t t = 1000 * MS;
	put(path, "workers: []\n");
	ok(!kvp_workers_watch_poll(&w, t), "the first look only remembers");
	ok(!kvp_workers_watch_poll(&w, t + 100 * MS), "not at rest for long enough");
	put(path, "workers: [ ]\n");
	ok(!kvp_workers_watch_poll(&w, t + 250 * MS), "it changes while it is looked at: from the beginning");
	ok(kvp_workers_watch_poll(&w, t + 500 * MS), "at rest: it is to be read");
	ok(!kvp_workers_watch_poll(&w, t + 900 * MS), "once");
	put(next, "workers: []\n");
	ok(rename(next, path) == 0, "replaced by a file of the same length");
	ok(!kvp_workers_watch_poll(&w, t + 1000 * MS) && kvp_workers_watch_poll(&w, t + 1300 * MS),
		"is seen");
	is_u64(kvp_workers_file_read(path, &l, err, sizeof(err)), KVP_OK, "and read");
	kvp_workers_list_free(&l);
	unlink(path);
	ok(!kvp_workers_watch_poll(&w, t + 2000 * MS) && kvp_workers_watch_poll(&w, t + 2300 * MS),
		"that it is gone is seen, too");
	ok(kvp_workers_file_read(path, &l, err, sizeof(err)) == KVP_ERR_SYS && err[0], "and told: %s", err);
}

int main(void)
{
	forms();
	roles();
	refusals();
	expansion();
	watch();
	return done();
}
