/* Fuzz: any bytes as workers file. What is accepted is a list of registrations that are accepted again. */
#define KVP_FUZZ_NAME "workers_file"
#include "daemons/discovery/workers_file.c"
#include "tests/fuzz/replay.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
	struct kvp_workers_list l;
	struct kvp_json *p = kvp_json_new();
	char err[300] = "";
	int rc = kvp_workers_parse((const char *)data, len, &l, err, sizeof(err));
	if (rc && !err[0])
		abort();
	for (uint32_t i = 0; !rc && i < l.cnt; i++) {
		struct kvp_wrec rec;
		struct kvp_wrec_err why;
		if (kvp_wrec_post(p, l.want[i].json, l.want[i].len, &rec, &why) != KVP_OK ||
			rec.worker_id != l.want[i].worker_id)
			abort();
		kvp_wrec_free(&rec);
	}
	if (!rc)
		kvp_workers_list_free(&l);
	kvp_json_free(p);
	return 0;
}
