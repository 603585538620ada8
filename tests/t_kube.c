/* Parts of the Kubernetes client that need no server: where it is and who we are, the table of objects
 * against a model, the pauses between tries. */
#include "ipc/kube_priv.h"

#include "tests/tap.h"
#include <stdlib.h>
#include <unistd.h>

static char dir[64] = "/tmp/kvpick-kube-XXXXXX";

static const char *file(const char *name, const char *text)
{
	static char path[256];
	snprintf(path, sizeof(path), "%s/%s", dir, name);
	FILE *f = fopen(path, "w");
	fputs(text, f);
	fclose(f);
	return path;
}

#define CLUSTER "clusters: [{name: k, cluster: {server: 'https://[fd00::1]:6443/'}}]\n"
#define CONTEXT "current-context: c\ncontexts: [{name: c, context: {cluster: k, user: u, namespace: team}}]\n"

static void kubeconfig_good(void)
{
	struct kvp_kube_access a;
	char why[512] = "";
	const char *p = file("good", CONTEXT CLUSTER "users: [{name: u, user: {token: secret}}]\n");
	ok(kvp_kube_access_file(p, &a, why, sizeof(why)) == KVP_OK, "kubeconfig: %s", why);
	is_str(a.base, "https://[fd00::1]:6443", "server, without a final slash");
	is_str(a.namespace_, "team", "namespace");
	is_str(a.token, "secret", "token");
	ok(!a.insecure && !a.ca_pem && !a.cert_pem && !a.token_file[0], "nothing else");
	kvp_kube_access_free(&a);
	file("ca", "PEM of a file");
	p = file("data",
		CONTEXT "clusters: [{name: x, cluster: {server: 'http://no'}}, {name: k, cluster: {server: "
			"'http://a:1',\n insecure-skip-tls-verify: true, certificate-authority: ca}}]\n"
			"users: [{name: u, user: {client-certificate-data: Y2VydA==, client-key-data: a2V5,\n"
			" tokenFile: tok}}]\n");
	ok(kvp_kube_access_file(p, &a, why, sizeof(why)) == KVP_OK, "another: %s", why);
	is_str(a.base, "http://a:1", "the cluster that the context names");
	is_str(a.ca_pem, "PEM of a file", "CA of a file beside it");
	is_str(a.cert_pem, "cert", "certificate in base64");
	is_str(a.key_pem, "key", "key in base64");
	ok(a.insecure == 1 && strstr(a.token_file, "/tok") && a.token_file[0] == '/',
		"a token's file beside it");
	kvp_kube_access_free(&a);
	ok(!a.base[0] && !a.ca_pem && !a.key_pem, "freed");
}

static void kubeconfig_bad(void)
{
	static const struct {
		const char *text, *why;
	} bad[] = {
		{"", "current-context"},
		{"a: [", "did not find"},
		{CLUSTER, "current-context is not set"},
		{"current-context: other\n" CLUSTER, "names no context"},
		{CONTEXT, "names no cluster"},
		{CONTEXT "clusters: [{name: k, cluster: {}}]\n", "has no server"},
		{CONTEXT "clusters: [{name: k, cluster: {server: 'ftp://a'}}]\n", "not http:// or https://"},
		{CONTEXT "clusters: [{name: k, cluster: {server: 'https://a', proxy-url: x}}]\n",
			"proxy-url"},
		{CONTEXT CLUSTER, "names no user"},
		{CONTEXT CLUSTER "users: [{name: u, user: {exec: {command: aws}}}]\n",
			"exec is not supported"},
		{CONTEXT CLUSTER "users: [{name: u, user: {username: x}}]\n", "username is not supported"},
		{CONTEXT CLUSTER "users: [{name: u, user: {client-key-data: a2V5}}]\n", "both or neither"},
		{CONTEXT CLUSTER "users: [{name: u, user: {client-key-data: '*'}}]\n", "is not base64"},
		{CONTEXT CLUSTER "users: [{name: u, user: {client-key: /no/such}}]\n", "No such file"},
	};
	struct kvp_kube_access a;
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		char why[512] = "";
		int rc = kvp_kube_access_file(file("bad", bad[i].text), &a, why, sizeof(why));
		ok(rc == KVP_ERR_INVAL && strstr(why, bad[i].why), "refused, because %s: %s", bad[i].why,
			why);
		kvp_kube_access_free(&a);
	}
}

static void which_one(void)
{
	struct kvp_kube_access a;
	struct kvp_kube_where w = {.account_dir = dir};
	char why[512] = "", config[300];
	ok(kvp_kube_access_find(&w, &a, why, sizeof(why)) == KVP_ERR_NOTFOUND && strstr(why, "KUBECONFIG"),
		"nothing configured: %s", why);
	w.host = "10.0.0.1";
	w.port = 443;
	ok(kvp_kube_access_find(&w, &a, why, sizeof(why)) == KVP_ERR_INVAL && strstr(why, "token"),
		"in a pod without a token: %s", why);
	file("token", "t");
	ok(kvp_kube_access_find(&w, &a, why, sizeof(why)) == KVP_ERR_INVAL && strstr(why, "ca.crt"),
		"nor without the CA: %s", why);
	file("ca.crt", "c");
	file("namespace", "mine\n");
	ok(kvp_kube_access_find(&w, &a, why, sizeof(why)) == KVP_OK, "in a pod");
	is_str(a.base, "https://10.0.0.1:443", "address");
	is_str(a.namespace_, "mine", "namespace");
	w.host = "fd00::5";
	kvp_kube_access_find(&w, &a, why, sizeof(why));
	is_str(a.base, "https://[fd00::5]:443", "an IPv6 address gets its brackets");
	w.url = "http://127.0.0.1:8001/";
	ok(kvp_kube_access_find(&w, &a, why, sizeof(why)) == KVP_OK && !a.token_file[0],
		"an address wins; without TLS it gets no token");
	is_str(a.base, "http://127.0.0.1:8001", "address");
	w.url = "https://h:1";
	ok(kvp_kube_access_find(&w, &a, why, sizeof(why)) == KVP_OK && a.token_file[0] && a.ca_file[0],
		"with TLS the account's token and CA");
	snprintf(config, sizeof(config), "%s:/no/such",
		file("first", CONTEXT CLUSTER "users: [{name: u, user: {token: s}}]\n"));
	w = (struct kvp_kube_where){.kubeconfig = config, .account_dir = dir};
	ok(kvp_kube_access_find(&w, &a, why, sizeof(why)) == KVP_OK && a.token,
		"the first file of KUBECONFIG");
	kvp_kube_access_free(&a);
}

#define NAMES 200

static void store_model(void)
{
	static char model[NAMES][32];
	static int there[NAMES];
	struct kube_store s = {0};
	uint32_t r = 12345, cnt = 0, wrong = 0;
	for (int step = 0; step < 20000; step++) {
		char name[16], text[32];
		struct kube_entry *was = NULL, *found;
		r = r * 1664525 + 1013904223;
		uint32_t i = (r >> 8) % NAMES;
		snprintf(name, sizeof(name), "pod-%u", i);
		found = kube_store_find(&s, name, strlen(name));
		wrong += !found != !there[i] || (found && strcmp(kube_entry_bytes(found).p, model[i]) != 0);
		if (r >> 30) {
			snprintf(text, sizeof(text), "v%d", step);
			kube_store_put(&s, name, strlen(name),
				(struct kvp_kube_bytes){text, strlen(text) + 1}, &was);
			wrong += !was != !there[i];
			cnt += !there[i];
			there[i] = 1;
			snprintf(model[i], sizeof(model[i]), "%s", text);
		} else {
			was = kube_store_take(&s, name, strlen(name));
			wrong += !was != !there[i];
			cnt -= there[i] ? 1 : 0;
			there[i] = 0;
		}
		free(was);
	}
	is_u64(wrong, 0, "20000 random steps: the table agrees with the model");
	uint32_t walked = 0;
	for (struct kube_entry *e = kube_store_next(&s, NULL); e; e = kube_store_next(&s, e))
		walked++;
	ok(walked == cnt && s.cnt == cnt, "a walk meets each once: %u of %u", walked, cnt);
	kube_store_clear(&s);
	ok(!s.cnt && !kube_store_find(&s, "pod-1", 5), "cleared");
}

static void pauses(void)
{
	static struct kvp_kube k;
	uint32_t least[9], most[9], wrong = 0;
	k.cfg.backoff_min_ms = KVP_KUBE_BACKOFF_MIN_MS;
	k.cfg.backoff_max_ms = KVP_KUBE_BACKOFF_MAX_MS;
	k.random = 99;
	for (uint32_t n = 1; n < 9; n++) {
		uint32_t whole = n < 7 ? 800u << (n - 1) : 30000;
		whole = whole < 30000 ? whole : 30000;
		least[n] = UINT32_MAX;
		most[n] = 0;
		for (int i = 0; i < 500; i++) {
			uint32_t ms = kube_backoff_ms(&k, n, 0);
			least[n] = ms < least[n] ? ms : least[n];
			most[n] = ms > most[n] ? ms : most[n];
		}
		wrong += least[n] < whole / 2 || most[n] > whole || most[n] - least[n] < whole / 3;
	}
	is_u64(wrong, 0, "0.8 s, doubling to 30 s, of which up to a half is left out at random");
	ok(kube_backoff_ms(&k, 1000000, 0) <= 30000, "for ever");
	is_u64(kube_backoff_ms(&k, 1, 45000), 45000, "Retry-After counts when it is longer");
	ok(kube_backoff_ms(&k, 8, 1) >= 15000, "and not when it is shorter");
}

int main(void)
{
	char line[128];
	if (!mkdtemp(dir))
		return skip_all("no directory for its files");
	kubeconfig_good();
	kubeconfig_bad();
	which_one();
	store_model();
	pauses();
	snprintf(line, sizeof(line), "rm -rf %s", dir);
	ok(system(line) == 0, "files removed");
	return done();
}
