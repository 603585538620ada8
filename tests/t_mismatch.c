/* R33: predictions that do not come true are noticed, in which direction; healthy traffic is not. */
#include "daemons/extproc/mismatch.h"
#include "tests/tap.h"

#include <stdlib.h>

int main(void)
{
	struct kvp_mismatch m = {0};
	uint32_t words = 0;

	uint64_t seed = tap_seed(12345);
	for (int i = 0; i < 10000; i++) {
		seed = seed * 6364136223846793005u + 1442695040888963407u;
		int hit = (seed >> 33) % 100 < 5;
		words += kvp_mismatch_report(&m, 1000, hit ? 640 : 0, hit ? 650 : 3) != 0;
	}
	is_u64(words, 0, "10,000 prompts of which 5 %% hit: no warning");

	m = (struct kvp_mismatch){0};
	uint32_t under = 0, over = 0;
	for (int i = 0; i < 1000; i++)
		under += kvp_mismatch_report(&m, 1000, 0, 900) == KVP_MISMATCH_UNDERSTATED;
	ok(under == 1 && m.stands, "90 %% reported, nothing predicted: said once");
	for (int i = 0; i < 1000; i++)
		words += kvp_mismatch_report(&m, 1000, 850, 900) != 0;
	ok(words == 0 && !m.stands, "predictions that come true end it");
	for (int i = 0; i < 1000; i++)
		over += kvp_mismatch_report(&m, 1000, 900, 0) == KVP_MISMATCH_OVERSTATED;
	is_u64(over, 1, "the reverse is said as the reverse");
	for (int i = 0; i < 1000; i++)
		words += kvp_mismatch_report(&m, 0, 0, 0) != 0;
	is_u64(words, 0, "prompts without tokens say nothing");
	return done();
}
