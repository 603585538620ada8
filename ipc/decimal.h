/* ipc/decimal.h - the decimal digits of a number, for everything that writes many: JSON, dumps, HTTP.
 *
 * Shape      one call over the caller's bytes.
 * Crash      process-local.
 * Proved by  tests/t_json.c, tests/t_http_parse.c, tests/t_dump.c
 */
#ifndef KVP_IPC_DECIMAL_H
#define KVP_IPC_DECIMAL_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define KVP_DECIMAL_MAX 20 /* digits of the largest number */

/* kvp_decimal writes the digits of v so that they end before `to`; returns where they begin. Two digits a
 * division, and divisions of 32 bits where that is enough: hashes are long and come in thousands. */
static inline char *kvp_decimal(char *to, uint64_t v)
{
	static const char pair[] = "0001020304050607080910111213141516171819202122232425262728293031323334"
				   "3536373839404142434445464748495051525354555657585960616263646566676869"
				   "707172737475767778798081828384858687888990919293949596979899";
	while (v >= 100000000) {
		uint32_t low = (uint32_t)(v % 100000000);
		v /= 100000000;
		for (int i = 0; i < 4; i++, low /= 100)
			memcpy(to -= 2, pair + (size_t)(low % 100) * 2, 2);
	}
	uint32_t rest = (uint32_t)v;
	for (; rest >= 100; rest /= 100)
		memcpy(to -= 2, pair + (size_t)(rest % 100) * 2, 2);
	if (rest >= 10)
		memcpy(to -= 2, pair + (size_t)rest * 2, 2);
	else
		*--to = (char)('0' + rest);
	return to;
}
#endif
