/* The wanted workers: what is sent to the indexer, in which order, again, and by a successor. The indexer is
 * played. */
#include "daemons/discovery/catalog.h"
#include "tests/procs.h"
#include "tests/tap.h"

#include <stdlib.h>
#include <unistd.h>

#define ME KVP_OWNER(3, 1)
#define INDEXER KVP_OWNER(1, 1)
#define SEC 1000000000ull

static struct kvp_geom geom = {.slot_max = 8, .region_gen = 77};
static struct kvp_cmdring ring;
static char path[] = "/tmp/kvpick-ids-XXXXXX", seen[65536];
static uint64_t now = 1000 * SEC;
static int answer_with;	 /* status of posts; 0 = as it should be */
static uint64_t refuses; /* this worker is refused */
static const char *life = "schedulable";
static uint32_t refused_cnt;
static enum kvp_catalog_order order;
static char roles[64]; /* of the posts */

static struct kvp_catalog *open_one(void)
{
	struct kvp_catalog *c = NULL;
	struct kvp_catalog_cfg cfg = {
		.ring = &ring, .owner = ME, .ids_path = path, .region_gen = geom.region_gen, .order = order};
	ok(kvp_catalog_open(&c, &cfg) == KVP_OK, "open");
	return c;
}

/* indexer answers up to max commands and writes down what they were; the number of them. */
static uint32_t indexer(uint32_t max)
{
	struct kvp_cmd_cell *t;
	uint32_t n = 0;
	while (n < max && kvp_cmd_next(&ring, &t) == KVP_OK) {
		char *buf = kvp_cmd_buffer(&ring, t);
		int post = t->type == KVP_CMD_WORKER_POST, status = post ? 201 : 200;
		if (post && answer_with)
			status = answer_with;
		if (post && refuses && strtoull(buf, NULL, 10) == 0 && strstr(buf, "\"bad\""))
			status = 422;
		size_t at = strlen(seen), r = strlen(roles);
		if (post && r + 1 < sizeof(roles))
			roles[r] = (char)('0' + t->arg[0]);
		snprintf(seen + at, sizeof(seen) - at, "%s%c%.*s%.0llu", at ? " " : "", post ? '+' : '-',
			(int)t->len, buf, (unsigned long long)t->worker_id * !post);
		int len = snprintf(buf, 256, "{\"lifecycle\":\"%s\"}", life);
		kvp_cmd_reply(&ring, t, status, (uint32_t)len);
		n++;
	}
	return n;
}

static void on_refused(void *ctx, uint64_t worker_id, int status, const char *text, size_t len)
{
	(void)ctx, (void)worker_id, (void)status, (void)text, (void)len;
	refused_cnt++;
}

static void settle(struct kvp_catalog *c)
{
	for (int i = 0; i < 2000 && !kvp_catalog_is_settled(c); i++) {
		kvp_catalog_tend(c, now, on_refused, NULL);
		indexer(1000);
		kvp_catalog_tend(c, now, on_refused, NULL);
	}
}

static void said(struct kvp_catalog *c, const char *want, const char *name)
{
	settle(c);
	is_str(seen, want, "%s", name);
	seen[0] = 0;
}

static int set(struct kvp_catalog *c, const char *texts[], uint32_t cnt)
{
	struct kvp_catalog_want w[16];
	uint64_t twice = 0;
	for (uint32_t i = 0; i < cnt; i++) /* a body is {"N":...: its first number is the id */
		w[i] = (struct kvp_catalog_want){.worker_id = strtoull(texts[i] + 2, NULL, 10),
			.json = texts[i],
			.len = (uint32_t)strlen(texts[i])};
	return kvp_catalog_set(c, w, cnt, &twice);
}
#define SET(c, ...)                                                                                          \
	set(c, (const char *[]){__VA_ARGS__}, sizeof((const char *[]){__VA_ARGS__}) / sizeof(char *))

static void steps(void)
{
	struct kvp_catalog *c = open_one();
	struct kvp_catalog_stat st;
	ok(!kvp_catalog_is_settled(c) && !kvp_catalog_has_ids(c), "nothing is known at first");
	kvp_catalog_tend(c, now, on_refused, NULL);
	is_u64(indexer(9), 0, "and nothing is sent");
	ok(SET(c, "{\"2\":1}", "{\"1\":1}") == KVP_OK, "two workers are wanted");
	said(c, "+{\"1\":1} +{\"2\":1}", "both are registered, by id");
	SET(c, "{\"2\":1}", "{\"1\":2}", "{\"3\":1}");
	said(c, "+{\"1\":2} +{\"3\":1}",
		"what has changed and what is new; what is as it should be is left alone");
	SET(c, "{\"3\":1}");
	said(c, "-1 -2", "what has left the picture is deleted");
	ok(SET(c, "{\"4\":1}", "{\"4\":2}") == KVP_ERR_EXISTS, "an id that comes twice");
	said(c, "", "changes nothing");
	life = "incomplete";
	SET(c, "{\"3\":1}", "{\"4\":1}");
	said(c, "+{\"4\":1}", "one that is not schedulable yet");
	SET(c, "{\"3\":1}", "{\"4\":1}");
	said(c, "+{\"4\":1}", "is told again with the next picture");
	kvp_catalog_stat(c, &st);
	ok(st.wanted == 2 && st.schedulable == 1 && st.refused == 0, "counted");
	life = "schedulable";
	kvp_catalog_close(c);
}

static void failures(void)
{
	struct kvp_catalog *c = open_one();
	struct kvp_catalog_stat st;
	uint32_t cnt[KVP_CMD_STATES];
	ok(kvp_catalog_has_ids(c), "a successor knows which ones are ours");
	SET(c, "{\"5\":1}", "{\"6\":\"bad\"}");
	refuses = 1;
	kvp_catalog_tend(c, now, on_refused, NULL);
	kvp_cmd_count(&ring, cnt);
	is_u64(cnt[2], 2, "nothing is deleted before the registrations are answered");
	said(c, "+{\"5\":1} +{\"6\":\"bad\"} -3 -4",
		"a refused one does not keep the others; those before are deleted");
	is_u64(refused_cnt, 1, "it is told");
	now += 4 * SEC;
	kvp_catalog_tend(c, now, on_refused, NULL);
	is_u64(indexer(9), 0, "a failed pass waits five seconds");
	now += 2 * SEC;
	refuses = 0;
	kvp_catalog_tend(c, now, on_refused, NULL);
	said(c, "+{\"6\":\"bad\"}", "then the refused one is told again");
	kvp_catalog_stat(c, &st);
	ok(st.failed == 1 && st.schedulable == 2, "and is taken");
	/* An answer that says that the indexer has died, or none at all. */
	answer_with = KVP_ERR_AGAIN;
	SET(c, "{\"5\":2}", "{\"6\":\"bad\"}");
	said(c, "+{\"5\":2}", "an indexer that died meanwhile");
	answer_with = 0;
	now += 6 * SEC;
	kvp_catalog_tend(c, now, on_refused, NULL);
	indexer(9);
	kvp_catalog_tend(c, now, on_refused, NULL);
	kvp_catalog_stat(c, &st);
	is_u64(st.schedulable, 2, "is told again");
	SET(c, "{\"5\":3}", "{\"6\":\"bad\"}");
	kvp_catalog_tend(c, now, on_refused, NULL);
	now += 31 * SEC;
	kvp_catalog_tend(c, now, on_refused, NULL);
	seen[0] = 0;
	is_u64(indexer(9), 0, "a command without an answer is withdrawn");
	ok(kvp_catalog_is_settled(c), "and its pass is over");
	now += 6 * SEC;
	kvp_catalog_tend(c, now, on_refused, NULL);
	indexer(9);
	is_str(seen, "+{\"5\":3}", "until the next one");
	seen[0] = 0;
	kvp_catalog_tend(c, now, on_refused, NULL);
	kvp_catalog_close(c);
}

/* The picture changes while commands are under way. */
static void changes(void)
{
	struct kvp_catalog *c = open_one();
	SET(c, "{\"5\":1}", "{\"6\":1}");
	kvp_catalog_tend(c, now, on_refused, NULL);
	SET(c, "{\"5\":2}");
	kvp_catalog_tend(c, now, on_refused, NULL);
	is_u64(indexer(9), 2, "the ones of the old picture are under way");
	said(c, "+{\"5\":1} +{\"6\":1} +{\"5\":2} -6",
		"then the new text, and the end of what is no longer wanted");
	SET(c, "{\"6\":1}");
	kvp_catalog_tend(c, now, on_refused, NULL);
	indexer(9); /* 6 again; 5 goes next */
	kvp_catalog_tend(c, now, on_refused, NULL);
	SET(c, "{\"5\":2}", "{\"6\":1}");
	indexer(9);
	said(c, "+{\"6\":1} -5 +{\"5\":2}",
		"a worker that is wanted again while it is being deleted comes back");
	kvp_catalog_close(c);
	geom.region_gen++;
	c = open_one();
	ok(!kvp_catalog_has_ids(c), "ids of another region are none of ours");
	kvp_catalog_close(c);
}

static int put(struct kvp_catalog *c, const char *text, enum kvp_part_role role)
{
	struct kvp_catalog_want w = {.worker_id = strtoull(text + 2, NULL, 10),
		.json = text,
		.len = (uint32_t)strlen(text),
		.role = role};
	return kvp_catalog_put(c, &w);
}

/* Workers of which one comes or goes; deletions overtake. */
static void single_ones(void)
{
	struct kvp_catalog_stat st;
	struct kvp_catalog_want big = {.worker_id = 1, .json = seen, .len = KVP_CMD_PAYLOAD_MAX + 1};
	order = KVP_CATALOG_DELETE_FIRST;
	struct kvp_catalog *c = open_one();
	SET(c, "{\"1\":1}", "{\"2\":1}", "{\"3\":1}");
	said(c, "+{\"1\":1} +{\"2\":1} +{\"3\":1}", "three");
	put(c, "{\"4\":1}", KVP_PART_AGGREGATED);
	put(c, "{\"5\":1}", KVP_PART_AGGREGATED);
	kvp_catalog_drop(c, 2, 0);
	kvp_catalog_drop(c, 99, 0);
	said(c, "-2 +{\"4\":1} +{\"5\":1}", "who leaves is deleted before others come");
	put(c, "{\"4\":1}", KVP_PART_AGGREGATED);
	said(c, "", "what is so already is not told again");
	kvp_catalog_drop(c, 4, 0);
	put(c, "{\"4\":1}", KVP_PART_AGGREGATED);
	said(c, "+{\"4\":1}", "dropped and put before anything was sent: told again, not deleted");
	put(c, "{\"6\":1}", KVP_PART_AGGREGATED);
	kvp_catalog_drop(c, 6, 0);
	said(c, "", "put and dropped before anything was sent: nothing");
	put(c, "{\"6\":1}", KVP_PART_AGGREGATED);
	kvp_catalog_tend(c, now, on_refused, NULL);
	kvp_catalog_drop(c, 6, 0);
	put(c, "{\"6\":2}", KVP_PART_AGGREGATED);
	kvp_catalog_drop(c, 6, 0);
	said(c, "+{\"6\":1} -6", "dropped while it is under way");
	roles[0] = 0;
	memset(roles, 0, sizeof(roles));
	put(c, "{\"5\":1}", KVP_PART_DECODE);
	said(c, "+{\"5\":1}", "another role is a change");
	is_str(roles, "2", "and told");
	ok(kvp_catalog_put(c, &big) == KVP_ERR_LIMIT, "a body that no command holds");
	const struct kvp_catalog_want other = {5, "{\"5\":9}", 7, KVP_PART_DECODE, 77};
	ok(kvp_catalog_put(c, &other) == KVP_ERR_EXISTS, "somebody else's worker is not replaced");
	kvp_catalog_drop(c, 5, 77);
	said(c, "", "nor dropped");
	is_u64(kvp_catalog_compare(c), 0, "without a catalogue there is nothing to compare");
	life = "incomplete";
	put(c, "{\"8\":1}", KVP_PART_AGGREGATED);
	said(c, "+{\"8\":1}", "one that is not schedulable");
	for (int i = 1; i < KVP_CATALOG_INCOMPLETE_TURN; i++)
		kvp_catalog_compare(c);
	said(c, "", "is left alone for some comparisons");
	life = "schedulable";
	kvp_catalog_compare(c);
	said(c, "+{\"8\":1}", "and then told again");
	kvp_catalog_drop(c, 8, 0);
	said(c, "-8", "dropped");
	kvp_catalog_stat(c, &st);
	ok(st.wanted == 4 && st.schedulable == 4, "%u wanted, %u schedulable", st.wanted, st.schedulable);
	kvp_catalog_close(c);
	/* What the file says after all that. */
	c = open_one();
	ok(kvp_catalog_has_ids(c), "a successor");
	put(c, "{\"7\":1}", KVP_PART_AGGREGATED);
	kvp_catalog_tend(c, now, on_refused, NULL);
	is_u64(indexer(9), 0, "sends nothing before it has a picture");
	SET(c, "{\"7\":1}");
	said(c, "-1 -3 -4 -5 +{\"7\":1}", "then it deletes what its predecessor had left, and nothing else");
	SET(c, "{\"7\":1}");
	kvp_catalog_close(c);
	order = KVP_CATALOG_POST_FIRST;
}

/* The file of ids stays short however much comes and goes. */
static void long_life(void)
{
	struct kvp_catalog *c = open_one();
	char text[32];
	SET(c, "{\"7\":1}");
	settle(c);
	for (int i = 0; i < 4000; i++) {
		snprintf(text, sizeof(text), "{\"%d\":1}", 100 + i % 3);
		put(c, text, KVP_PART_AGGREGATED);
		settle(c);
		kvp_catalog_drop(c, 100 + (uint64_t)i % 3, 0);
		settle(c);
		seen[0] = 0;
	}
	kvp_catalog_close(c);
	FILE *f = fopen(path, "r");
	uint32_t lines = 0;
	for (int ch; (ch = fgetc(f)) != EOF;)
		lines += ch == '\n';
	fclose(f);
	ok(lines < 5000, "8000 changes are %u lines", lines);
	c = open_one();
	SET(c, "{\"8\":1}");
	said(c, "+{\"8\":1} -7", "and say who is left");
	kvp_catalog_close(c);
}

/* Ten thousand: never more than a window under way. */
static void crowd(void)
{
	static char text[10000][24];
	static struct kvp_catalog_want w[10000];
	struct kvp_catalog *c = open_one();
	uint32_t cnt[KVP_CMD_STATES], most = 0, n = 0;
	uint64_t twice;
	for (uint32_t i = 0; i < 10000; i++) {
		uint32_t id = 10000 - i;
		snprintf(text[i], sizeof(text[i]), "{\"%u\":1}", id);
		w[i] = (struct kvp_catalog_want){
			.worker_id = id, .json = text[i], .len = (uint32_t)strlen(text[i])};
	}
	ok(kvp_catalog_set(c, w, 10000, &twice) == KVP_OK, "ten thousand workers");
	for (int i = 0; i < 10000 && !kvp_catalog_is_settled(c); i++) {
		kvp_catalog_tend(c, now, on_refused, NULL);
		kvp_cmd_count(&ring, cnt);
		most = cnt[2] > most ? cnt[2] : most;
		seen[0] = 0;
		n += indexer(1000);
	}
	ok(n == 10000 && most == KVP_CATALOG_WINDOW, "%u commands, at most %u at once", n, most);
	seen[0] = 0;
	kvp_catalog_close(c);
}

int main(void)
{
	void *mem = shared(kvp_cmdring_footprint(&geom));
	close(mkstemp(path));
	ok(kvp_cmdring_new(mem, &geom) == KVP_OK && kvp_cmdring_join(mem, &geom, &ring) == KVP_OK, "a ring");
	kvp_cmd_attach(&ring, INDEXER);
	steps();
	failures();
	changes();
	geom.region_gen++;
	single_ones();
	long_life();
	crowd();
	is_u64(kvp_cmdring_check(&ring), 0, "the ring has no faults");
	unlink(path);
	return done();
}
