/* The wanted workers: what is sent to the indexer, in which order, again, and by a successor. The indexer is
 * played. */
#include "daemons/discovery/catalog.h"
#include "tests/tap.h"

#include <stdlib.h>
#include <sys/mman.h>
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

static struct kvp_catalog *open_one(void)
{
	struct kvp_catalog *c = NULL;
	struct kvp_catalog_cfg cfg = {
		.ring = &ring, .owner = ME, .ids_path = path, .region_gen = geom.region_gen};
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
		size_t at = strlen(seen);
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
		w[i] = (struct kvp_catalog_want){
			strtoull(texts[i] + 2, NULL, 10), texts[i], (uint32_t)strlen(texts[i])};
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
		w[i] = (struct kvp_catalog_want){id, text[i], (uint32_t)strlen(text[i])};
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
	void *mem = mmap(NULL, kvp_cmdring_footprint(&geom), PROT_READ | PROT_WRITE,
		MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	close(mkstemp(path));
	ok(kvp_cmdring_new(mem, &geom) == KVP_OK && kvp_cmdring_join(mem, &geom, &ring) == KVP_OK, "a ring");
	kvp_cmd_attach(&ring, INDEXER);
	steps();
	failures();
	changes();
	crowd();
	is_u64(kvp_cmdring_check(&ring), 0, "the ring has no faults");
	unlink(path);
	return done();
}
