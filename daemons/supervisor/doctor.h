/* daemons/supervisor/doctor.h — kvpick doctor: looks at what a node needs and says what to do about what is
 * missing.
 *
 * Shape      one process a call; checks one after another, each says one or more findings: ok, warn or FAIL,
 *            what it looked at, what to do. With --json one object. Exit code 1 when anything failed, else 0.
 * Truth      the system at this moment; of a running node its region, mapped read-only.
 * Writers    nothing: memory files, sockets and rings are made and closed again; to the tokenizer it sends
 *            one request, to the API server lists of one object.
 * Bounds     every call over the network has a time limit; all event ports together DOC_EVENTS_MS.
 * Crash      leaves nothing.
 * Proved by  tests/s_doctor.t
 */
#ifndef KVP_SUPERVISOR_DOCTOR_H
#define KVP_SUPERVISOR_DOCTOR_H

#include "daemons/supervisor/sup.h"
#include "ipc/http_url.h"
#include "ipc/json_out.h"
#include "shm/region.h"

#define DOC_CONNECT_MS 2000
#define DOC_CALL_MS 5000
#define DOC_EVENTS_MS 10000
#define DOC_REPLY_MAX (1u << 20)

enum doc_result { DOC_OK, DOC_WARN, DOC_FAIL };
enum doc_form { DOC_TEXT, DOC_JSON };

struct doctor {
	const struct kvp_config *cfg;
	struct sup *plan; /* programs and capacities, as `kvpick run` would have them */
	enum doc_form form;
	struct kvp_jw doc;
	unsigned cnt[3]; /* findings by result */
	struct kvp_attach at;
	struct kvp_region *region; /* of the running node; base NULL = none runs */
};

/* doc_say tells one finding. todo: what to do, NULL with DOC_OK. fmt: what was looked at and what was
 * seen. */
__attribute__((format(printf, 5, 6))) void doc_say(
	struct doctor *d, enum doc_result r, const char *check, const char *todo, const char *fmt, ...);

/* doctor_host.c: this machine, or this container. */
void doc_memory_file(struct doctor *d);
void doc_io_uring(struct doctor *d);
void doc_open_files(struct doctor *d);
void doc_run_dir(struct doctor *d);
void doc_memory(struct doctor *d);
void doc_cpu(struct doctor *d);
void doc_certificate(struct doctor *d);

/* doctor_net.c: listeners, engines' event sockets, other replicas. */
void doc_listeners(struct doctor *d);
void doc_events(struct doctor *d);
void doc_peers(struct doctor *d);

/* doctor_tokenizer.c, doctor_kube.c: what kvpick calls. */
void doc_tokenizer(struct doctor *d);
void doc_api_server(struct doctor *d);

/* doctor_node.c: what only a running node knows. */
void doc_node(struct doctor *d);

/* doctor_http.c: one exchange with a deadline. */
struct doc_http {
	const struct kvp_http_url *url;
	const char *path;	/* appended to the address's own */
	const char *token_file; /* bearer token; NULL or "" = none */
	const char *ca_file;	/* for https; NULL or "" = the system's */
	const char *body;	/* JSON, POSTed */
	int status;		/* out */
	size_t len;
	char *reply;	 /* out: the body, 0-terminated; freed by doc_http_free */
	char error[320]; /* out: why there is no answer */
};
/* doc_http_call: KVP_OK with status and reply, else KVP_ERR_* with error. doc_http_free after either. */
int doc_http_call(struct doc_http *h);
void doc_http_free(struct doc_http *h);
/* doc_connect: a connected socket, or -1 with error. Names are looked up; every address is tried. */
int doc_connect(const char *host, uint16_t port, int timeout_ms, char *error, size_t cap);

/* doctor.c */
int doc_main(int argc, const char *const *argv, const char *const *envp);
#endif
