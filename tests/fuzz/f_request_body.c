/* Fuzz: any bytes as a body of the Selection API, read by every form. */
#define KVP_FUZZ_NAME "request_body"
#include "daemons/common/request_body.h"
#include "tests/fuzz/replay.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct kvp_parse p;
	struct kvp_select_request sel;
	struct kvp_reserve_request res;
	enum kvp_tristate has;
	double f;
	uint8_t *body = malloc(size + 64);
	if (!body || kvp_parse_open(&p)) {
		free(body);
		return 0;
	}
	if (size)
		memcpy(body, data, size);
	memset(body + size, 0, 64);
	if (kvp_parse_body(&p, body, size) == 0) {
		kvp_parse_select(&p, &sel);
		kvp_parse_reserve(&p, &res, &has);
		kvp_parse_output_block(&p, &f, &has);
	}
	kvp_parse_close(&p);
	free(body);
	return 0;
}
