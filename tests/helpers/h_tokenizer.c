/* A tokenizer service as a process of its own, for tests of whole nodes and for benches.
 *
 * Usage      h_tokenizer [at=ADDRESS|unix:/path] [style=token_ids|input_ids|tokens] [ids=N] [delay_ms=N]
 *            [fault=NUMBER] [fault_left=N] [status=N] [old=1]
 * Prints     "port N" (0 on a Unix socket) when it listens; then one line for each line that it reads from
 *            its standard input: "?" prints the requests and connections seen; key=value words change a
 *            setting and print "set". Ends at the end of its input.
 * Answers    tests/tokenizer_sim.h: ids of the body's bytes, or ids=N of them, always the same; faults by
 *            their number there.
 */
#include "tests/tokenizer_sim.h"

#include <signal.h>
#include <unistd.h>

static struct kvp_loop *loop;
static struct simtok sim;
static char line[4096];
static size_t line_len;

static const char *const styles[] = {"token_ids", "input_ids", "tokens"};

/* The same answer for everybody, made once. */
static void make_ready(void)
{
	free(sim.ready);
	sim.ready = NULL;
	if (sim.id_cnt)
		sim.ready = simtok_ids(&sim, "", 0, &sim.ready_len, 0);
}

static int set(const char *word)
{
	const char *v = strchr(word, '=');
	if (!v)
		return 0;
	size_t n = (size_t)(v - word);
	uint64_t number = strtoull(++v, NULL, 10);
	if (n == 5 && !memcmp(word, "style", 5)) {
		for (size_t i = 0; i < 3; i++)
			if (!strcmp(v, styles[i]))
				sim.style = styles[i];
	} else if (n == 3 && !memcmp(word, "ids", 3)) {
		sim.id_cnt = (uint32_t)number;
	} else if (n == 8 && !memcmp(word, "delay_ms", 8)) {
		sim.delay_ns = number * 1000000;
	} else if (n == 5 && !memcmp(word, "fault", 5) && number < SIMTOK_BODY) {
		sim.fault = (enum simtok_fault)number;
	} else if (n == 10 && !memcmp(word, "fault_left", 10)) {
		sim.fault_left = (uint32_t)number;
	} else if (n == 6 && !memcmp(word, "status", 6)) {
		sim.status = (int)number;
	} else if (n == 3 && !memcmp(word, "old", 3)) {
		sim.old_tokenize = number != 0;
	} else {
		return 0;
	}
	return 1;
}

static void command(char *text)
{
	char *save = NULL;
	int good = 1;
	if (!strcmp(text, "?")) {
		printf("requests %llu accepted %llu gone %llu\n", (unsigned long long)sim.requests,
			(unsigned long long)sim.accepted, (unsigned long long)sim.gone);
	} else {
		for (char *w = strtok_r(text, " ", &save); w; w = strtok_r(NULL, " ", &save))
			good &= set(w);
		make_ready();
		printf("%s\n", good ? "set" : "unknown");
	}
	fflush(stdout);
}

static void on_input(void *ctx, int fd)
{
	(void)ctx;
	ssize_t n = read(fd, line + line_len, sizeof(line) - 1 - line_len);
	if (n <= 0) {
		kvp_loop_stop(loop);
		return;
	}
	line_len += (size_t)n;
	for (char *nl; (nl = memchr(line, '\n', line_len));) {
		size_t used = (size_t)(nl - line) + 1;
		*nl = 0;
		command(line);
		memmove(line, line + used, line_len - used);
		line_len -= used;
	}
	if (line_len == sizeof(line) - 1)
		line_len = 0;
}

int main(int argc, char **argv)
{
	const char *at = "127.0.0.1";
	struct kvp_watch w;
	signal(SIGPIPE, SIG_IGN);
	memset(&w, 0, sizeof(w));
	for (int i = 1; i < argc; i++)
		if (!strncmp(argv[i], "at=", 3))
			at = argv[i] + 3;
	if (kvp_loop_open(&loop, 0) || simtok_open(&sim, loop, at) ||
		kvp_loop_watch_fd(loop, &w, 0, on_input, NULL)) {
		perror("h_tokenizer");
		return 1;
	}
	for (int i = 1; i < argc; i++)
		if (strncmp(argv[i], "at=", 3) != 0 && !set(argv[i])) {
			fprintf(stderr, "h_tokenizer: unknown argument %s\n", argv[i]);
			return 2;
		}
	make_ready();
	printf("port %u\n", (unsigned)sim.ls.port);
	fflush(stdout);
	kvp_loop_run(loop);
	simtok_close(&sim);
	kvp_loop_close(loop);
	return 0;
}
