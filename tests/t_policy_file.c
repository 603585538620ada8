/* The policy file: every rule of its schema has a file that breaks it, and the error names the member. */
#include "daemons/common/policy_file.h"
#include <kvpick/err.h>
#include "tests/tap.h"

#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#define BUCKET "uncached_isl_buckets: [{min_tokens: 0, bucket: all}]\n"
#define TWO(min, name)                                                                                       \
	"uncached_isl_buckets: [{min_tokens: 0, bucket: all}, {min_tokens: " min ", bucket: " name "}]\n"
#define FAMILY "default_policy_family: f\n"
#define CLASS(more) "policy_classes: [{name: c, quantum: 1, policy_family: f, cache_bucket: all" more "}]\n"
#define GOOD FAMILY BUCKET CLASS("")

static const struct {
	const char *text, *says; /* says NULL: valid */
} file[] = {
	{GOOD, NULL},
	{"", "empty"},
	{"just words", "mapping"},
	{"[1, 2]", "mapping"},
	{GOOD "surprise: 1\n", "unknown key \"surprise\""},
	{GOOD FAMILY, "twice"},
	{FAMILY, "go together"},
	{FAMILY BUCKET, "go together"},
	{"models: {}\n", NULL},
	{"models: []\n", "must be a mapping"},
	{"models: {m: {}}\n", "no classes"},
	{"models: {'': {}}\n", "must not be empty"},
	{"models:\n  m:\n    default_policy_family: f\n", "go together"},
	{"worker_selection: {aggregated: default}\n", NULL},
	{"worker_selection: {}\n", "must not be empty"},
	{"worker_selection: {decode: mine}\n", "there is no instance mine"},
	{"worker_selection: {decode: mine, instances: [{name: mine, type: reference}]}\n", NULL},
	{"worker_selection: {instances: [{name: mine, type: lottery}]}\n", "not compiled in"},
	{"worker_selection: {instances: [{name: default, type: reference}]}\n", "named default"},
	{"worker_selection: {instances: [{name: a, type: reference}, {name: a, type: reference}]}\n",
		"twice"},
	{"worker_selection: {instances: [{name: a, type: reference, parameters: 3}]}\n", "mapping"},
	{"worker_selection: {instances: [{name: a, type: reference, parameters: {x: 1}}]}\n", NULL},
	{"worker_selection: {instances: [{name: a}]}\n", "name and type are required"},
	{"worker_selection: {router: a}\n", "unknown key"},
	{FAMILY "uncached_isl_buckets: []\n" CLASS(""), "1 to 64 entries"},
	{FAMILY "uncached_isl_buckets: 3\n" CLASS(""), "must be a list"},
	{FAMILY "uncached_isl_buckets: [{bucket: all}]\n" CLASS(""), "required"},
	{FAMILY "uncached_isl_buckets: [{min_tokens: 0}]\n" CLASS(""), "required"},
	{FAMILY "uncached_isl_buckets: [{min_tokens: 1, bucket: all}]\n" CLASS(""), "must be 0"},
	{FAMILY "uncached_isl_buckets: [{min_tokens: -1, bucket: all}]\n" CLASS(""), "whole number"},
	{FAMILY "uncached_isl_buckets: [{min_tokens: 1.5, bucket: all}]\n" CLASS(""), "whole number"},
	{FAMILY "uncached_isl_buckets: [{min_tokens: 0, bucket: all, x: 1}]\n" CLASS(""), "unknown key"},
	{FAMILY TWO("0", "b") CLASS(""), "increasing"},
	{FAMILY TWO("9", "all") CLASS(""), "twice"},
	{FAMILY TWO("9", "b") CLASS(""), "no class for bucket b"},
	{FAMILY "uncached_isl_buckets: [{min_tokens: 0, bucket: 'a b'}]\n" CLASS(""), "letters"},
	{FAMILY BUCKET "policy_classes: []\n", "1 to 64 entries"},
	{FAMILY BUCKET CLASS(", extra: 1"), "unknown key"},
	{FAMILY BUCKET CLASS(", queue_policy: wspt"), NULL},
	{FAMILY BUCKET CLASS(", queue_policy: lcfs"), "fcfs or wspt"},
	{FAMILY BUCKET CLASS(", queue_policy: best"), "fcfs or wspt"},
	{FAMILY BUCKET CLASS(", prefill_busy_threshold: 0"), NULL},
	{FAMILY BUCKET CLASS(", prefill_busy_threshold: -1"), "whole number"},
	{FAMILY BUCKET CLASS(", prefill_busy_threshold_frac: 0.5"), NULL},
	{FAMILY BUCKET CLASS(", prefill_busy_threshold_frac: -0.5"), ">= 0"},
	{FAMILY BUCKET CLASS(", prefill_busy_threshold_frac: .inf"), "finite"},
	{FAMILY BUCKET CLASS(", prefill_busy_threshold_frac: nan"), "finite"},
	{FAMILY BUCKET CLASS(", busy_worker_ratio: 0.5"), "needs a prefill busy threshold"},
	{FAMILY BUCKET CLASS(", prefill_busy_threshold: 1, busy_worker_ratio: 0.5"), NULL},
	{FAMILY BUCKET CLASS(", prefill_busy_threshold: 1, busy_worker_ratio: 0"), "> 0 and <= 1"},
	{FAMILY BUCKET CLASS(", prefill_busy_threshold: 1, busy_worker_ratio: 1.01"), "> 0 and <= 1"},
	{FAMILY BUCKET CLASS(", request_queue_limit_per_worker: 0"), NULL},
	{FAMILY BUCKET CLASS(", request_queue_limit_per_worker: x"), "whole number"},
	{FAMILY BUCKET CLASS(", raw_isl_token_queue_limit_per_worker: 99999999999999999999"),
		"whole number"},
	{FAMILY BUCKET CLASS(", cached_token_queue_limit_per_worker: []"), "whole number"},
	{FAMILY BUCKET "policy_classes: [{name: c, quantum: 0, policy_family: f, cache_bucket: all}]\n",
		">= 1"},
	{FAMILY BUCKET "policy_classes: [{name: c, policy_family: f, cache_bucket: all}]\n", "required"},
	{FAMILY BUCKET "policy_classes: [{quantum: 1, policy_family: f, cache_bucket: all}]\n", "required"},
	{FAMILY BUCKET "policy_classes: [{name: c, quantum: 1, policy_family: f}]\n", "go together"},
	{FAMILY BUCKET "policy_classes: [{name: c, quantum: 1, cache_bucket: all}]\n", "go together"},
	{FAMILY BUCKET "policy_classes: [{name: c, quantum: 1, policy_family: f, cache_bucket: none}]\n",
		"no bucket none"},
	{FAMILY BUCKET "policy_classes: [{name: c, quantum: 1}]\n", "no class belongs to family f"},
	{"default_policy_family: g\n" BUCKET CLASS(""), "no class belongs to family g"},
	{FAMILY BUCKET "policy_classes: [{name: c, quantum: 1, policy_family: f, cache_bucket: all},"
		       "{name: c, quantum: 1}]\n",
		"twice"},
	{FAMILY BUCKET "policy_classes: [{name: c, quantum: 1, policy_family: f, cache_bucket: all},"
		       "{name: d, quantum: 1, policy_family: f, cache_bucket: all}]\n",
		"two classes"},
	{FAMILY BUCKET "policy_classes: [{name: c, quantum: 1, policy_family: f, cache_bucket: all},"
		       "{name: f, quantum: 1}]\n",
		"name of a family"},
	{GOOD "---\n" GOOD, "more than one document"},
	{"a: [", "line"},
	{"a: &x [*x]\n", "unknown key"},
};

static void schema(void)
{
	struct kvp_policy_profile single;
	kvp_policy_single(&single, KVP_ORDER_LCFS, 2.0);
	for (size_t i = 0; i < sizeof(file) / sizeof(file[0]); i++) {
		struct kvp_policy p;
		struct kvp_policy_err err = {""};
		int rc = kvp_policy_parse(file[i].text, strlen(file[i].text), &single, &p, &err);
		ok(rc == (file[i].says ? KVP_ERR_INVAL : KVP_OK) &&
				(!file[i].says || strstr(err.text, file[i].says)),
			"file %zu: %s", i, rc ? err.text : "valid");
		kvp_policy_drop(&p);
	}
}

static const char two[] =
	"default_policy_family: slow\n"
	"uncached_isl_buckets: [{min_tokens: 0, bucket: s}, {min_tokens: 1000, bucket: l}]\n"
	"policy_classes:\n"
	"- {name: a, quantum: 10, policy_family: fast, cache_bucket: s, prefill_busy_threshold: 7}\n"
	"- {name: b, quantum: 20, policy_family: fast, cache_bucket: l, queue_policy: wspt}\n"
	"- {name: c, quantum: 30, policy_family: slow, cache_bucket: s}\n"
	"- {name: d, quantum: 40, policy_family: slow, cache_bucket: l}\n"
	"- {name: vip, quantum: 50, request_queue_limit_per_worker: 3}\n"
	"models:\n"
	"  llama:\n"
	"    default_policy_family: only\n"
	"    uncached_isl_buckets: [{min_tokens: 0, bucket: x}]\n"
	"    policy_classes: [{name: o, quantum: 1, policy_family: only, cache_bucket: x}]\n";

static const char *class_of(
	const struct kvp_policy *p, const char *model, const char *name, uint64_t isl, uint64_t cached)
{
	const struct kvp_policy_profile *f = kvp_policy_of(p, (struct kvp_str){model, strlen(model)});
	struct kvp_str n = {name, name ? strlen(name) : 0};
	return f->class[kvp_policy_classify(f, n, isl, cached)].name;
}

static void classes(void)
{
	struct kvp_policy_profile single;
	struct kvp_policy p;
	struct kvp_policy_err err;
	kvp_policy_single(&single, KVP_ORDER_LCFS, 2.0);
	ok(kvp_policy_parse(two, sizeof(two) - 1, &single, &p, &err) == KVP_OK, "two profiles");
	is_str(class_of(&p, "m", NULL, 999, 0), "c", "default family, short prompt");
	is_str(class_of(&p, "m", NULL, 1000, 0), "d", "a bucket begins at its min_tokens");
	is_str(class_of(&p, "m", NULL, 1500, 501), "c", "cached tokens don't count");
	is_str(class_of(&p, "m", NULL, 10, 5000), "c", "more cached than there is");
	is_str(class_of(&p, "m", "fast", 5000, 0), "b", "a family by name");
	is_str(class_of(&p, "m", "vip", 5000, 0), "vip", "an explicit class by name");
	is_str(class_of(&p, "m", "a", 5000, 0), "d", "a matrix class can't be named");
	is_str(class_of(&p, "llama", "vip", 5000, 0), "o", "the model's own profile stands alone");
	is_str(class_of(&p, "llama2", "fast", 5, 0), "a", "model names are compared whole");
	const struct kvp_policy_profile *f = &p.profile[0];
	ok(f->class[0].busy_tok == 7 && isnan(f->class[0].busy_frac) && kvp_policy_queues(&f->class[0]),
		"threshold of one class");
	ok(f->class[1].order == KVP_ORDER_WSPT && !kvp_policy_queues(&f->class[1]), "order of another");
	ok(f->class[4].limit_requests == 3 && f->class[4].limit_isl_tok == KVP_POLICY_NONE, "limits");
	kvp_policy_drop(&p);
	ok(kvp_policy_load("", &single, &p, &err) == KVP_OK && p.profile[0].class[0].busy_frac == 2.0 &&
			p.profile[0].class[0].order == KVP_ORDER_LCFS,
		"no file: the single class");
	kvp_policy_drop(&p);
	ok(kvp_policy_load("/nonexistent/p.yaml", &single, &p, &err) == KVP_ERR_SYS, "a file that is not");
}

static void long_file(void)
{
	char path[] = "/tmp/kvp-policy-XXXXXX", *text = malloc(KVP_POLICY_FILE_MAX + 16);
	struct kvp_policy_profile single;
	struct kvp_policy p;
	struct kvp_policy_err err = {""};
	int fd = mkstemp(path);
	memset(text, '#', KVP_POLICY_FILE_MAX + 16);
	ok(fd >= 0 && write(fd, text, KVP_POLICY_FILE_MAX + 16) == KVP_POLICY_FILE_MAX + 16, "a long file");
	kvp_policy_single(&single, KVP_ORDER_FCFS, NAN);
	ok(kvp_policy_load(path, &single, &p, &err) == KVP_ERR_INVAL && strstr(err.text, "longer"),
		"is refused: %s", err.text);
	close(fd);
	unlink(path);
	free(text);
}

int main(void)
{
	schema();
	classes();
	long_file();
	return done();
}
