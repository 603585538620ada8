/* Which peer is asked, and when: each rule by hand, then random histories against an independent record of
 * them. */
#include "daemons/peer/recovery_drive.c"

#include <stdio.h>
#include <stdlib.h>

#include "tests/tap.h"

#define S 1000000000ull
#define PEERS 6

static struct kvp_drive d;
static const char *const name[PEERS] = {
	"http://a", "http://b", "http://c", "http://d", "http://e", "http://f"};

static void peers(uint32_t set)
{
	const char *url[PEERS];
	uint32_t n = 0;
	for (uint32_t i = 0; i < PEERS; i++)
		if (set >> i & 1)
			url[n++] = name[i];
	kvp_drive_peers(&d, url, n);
}

static int index_of(const char *url)
{
	for (int i = 0; i < PEERS; i++)
		if (strcmp(url, name[i]) == 0)
			return i;
	return -1;
}

static int asks(uint64_t now) /* the peer that is to be tried; -1 = something else */
{
	struct kvp_drive_step s = kvp_drive_next(&d, now);
	return s.what == KVP_DRIVE_ATTEMPT ? index_of(s.url) : -1;
}

static int waits(uint64_t now, uint64_t until)
{
	struct kvp_drive_step s = kvp_drive_next(&d, now);
	return s.what == KVP_DRIVE_WAIT && s.until_ns == until;
}

static int ends(uint64_t now, enum kvp_drive_do how)
{
	return kvp_drive_next(&d, now).what == how && kvp_drive_next(&d, now + 100 * S).what == how;
}

static void list(void)
{
	kvp_drive_init(&d, KVP_DRIVE_LIST, 1);
	ok(waits(0, UINT64_MAX), "nothing before the list is there");
	peers(7);
	ok(asks(0) == 0 && waits(0, UINT64_MAX), "the first one, and nothing while it is asked");
	kvp_drive_result(&d, KVP_DRIVE_FAILED);
	ok(asks(0) == 1, "the second one");
	kvp_drive_result(&d, KVP_DRIVE_FAILED);
	ok(asks(0) == 2, "the third one");
	kvp_drive_result(&d, KVP_DRIVE_FAILED);
	ok(ends(0, KVP_DRIVE_EXHAUSTED) && d.attempts == 3, "a list is tried once");
	kvp_drive_init(&d, KVP_DRIVE_LIST, 1);
	peers(7);
	asks(0);
	kvp_drive_result(&d, KVP_DRIVE_SUCCEEDED);
	ok(ends(0, KVP_DRIVE_RECOVERED), "the first success ends it");
}

static void set(void)
{
	kvp_drive_init(&d, KVP_DRIVE_SET, 1);
	peers(0);
	ok(ends(0, KVP_DRIVE_EMPTY), "no candidate: begins empty at once");
	kvp_drive_init(&d, KVP_DRIVE_SET, 1);
	peers(1);
	ok(asks(0) == 0, "the only one");
	kvp_drive_result(&d, KVP_DRIVE_FAILED);
	for (uint64_t wait = 1, now = 0, i = 0; i < 8; i++) {
		ok(waits(now, now + wait * S), "back-off of %llu s", (unsigned long long)wait);
		peers(1);
		ok(waits(now + wait * S - 1, now + wait * S), "a change that is none does not end it");
		now += wait * S;
		wait = 2 * wait < 30 ? 2 * wait : 30;
		ok(asks(now) == 0, "then once more");
		kvp_drive_result(&d, KVP_DRIVE_FAILED);
	}
	asks(500 * S);
	uint64_t now = 1000 * S;
	kvp_drive_next(&d, now);
	if (d.state == KVP_DRIVE_TRYING)
		kvp_drive_result(&d, KVP_DRIVE_FAILED);
	kvp_drive_next(&d, now);
	peers(2);
	ok(asks(now) == 1, "another set ends it at once");
	kvp_drive_result(&d, KVP_DRIVE_FAILED);
	ok(waits(now, now + S), "and begins with 1 s again");
	peers(0);
	ok(ends(now, KVP_DRIVE_EMPTY), "all are gone: begins empty");
}

static void changes(void)
{
	kvp_drive_init(&d, KVP_DRIVE_SET, 7);
	peers(3);
	int first = asks(0), other = 1 - first;
	peers(4);
	ok(waits(0, UINT64_MAX), "a change never ends an attempt, whoever left");
	kvp_drive_result(&d, KVP_DRIVE_FAILED);
	ok(asks(0) == 2, "who left is not tried, who came is");
	peers(4u | 1u << first);
	kvp_drive_result(&d, KVP_DRIVE_FAILED);
	ok(waits(0, S), "who was tried and came back is not tried again in this cycle");
	int again = asks(S);
	ok(again == first || again == 2, "but in the next");
	(void)other;
	kvp_drive_init(&d, KVP_DRIVE_SET, 7);
	peers(1);
	asks(0);
	peers(0);
	kvp_drive_result(&d, KVP_DRIVE_SUCCEEDED);
	ok(ends(0, KVP_DRIVE_RECOVERED), "all vanished, and the attempt succeeds");
}

static void order(void)
{
	uint32_t first[PEERS] = {0}, kinds = 0;
	for (uint64_t seed = 0; seed < 600; seed++) {
		kvp_drive_init(&d, KVP_DRIVE_SET, seed * 77);
		peers(63);
		first[asks(0)]++;
	}
	for (uint32_t i = 0; i < PEERS; i++)
		kinds += first[i] > 50;
	is_u64(kinds, PEERS, "each of six is the first one about as often as the others");
}

/* -- random histories -- */

static uint64_t state;
static uint64_t rnd(uint64_t n)
{
	state += 0x9e3779b97f4a7c15ull;
	uint64_t z = state;
	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return (z ^ (z >> 31)) % n;
}

/* What has been seen, by the rules alone: sets are bit masks. */
static struct seen {
	uint32_t now, tried;	    /* eligible; tried in this cycle */
	int trying;		    /* -1 = nobody */
	uint64_t wait_ns, until_ns; /* until_ns 0 = in a cycle */
	int faults;
} seen;

static void fault(const char *what)
{
	if (++seen.faults <= 5)
		printf("# %s: now %x tried %x\n", what, seen.now, seen.tried);
}

static void check_step(uint64_t now)
{
	struct kvp_drive_step s = kvp_drive_next(&d, now);
	if (seen.trying >= 0) {
		if (s.what != KVP_DRIVE_WAIT)
			fault("something beside an attempt");
		return;
	}
	if (seen.until_ns && now < seen.until_ns) {
		if (s.what != KVP_DRIVE_WAIT || s.until_ns != seen.until_ns)
			fault("a back-off cut short");
		return;
	}
	if (seen.until_ns) { /* over: a new cycle */
		seen.until_ns = 0;
		seen.tried = 0;
	}
	uint32_t left = seen.now & ~seen.tried;
	if (!seen.now && !seen.tried) {
		if (s.what != KVP_DRIVE_EMPTY)
			fault("no candidate at the beginning of a cycle");
		return;
	}
	if (left) {
		int i = s.what == KVP_DRIVE_ATTEMPT ? index_of(s.url) : -1;
		if (i < 0 || !(left >> i & 1))
			fault("not one that is left");
		seen.trying = i;
		return;
	}
	seen.until_ns = now + seen.wait_ns;
	seen.wait_ns = 2 * seen.wait_ns < 30 * S ? 2 * seen.wait_ns : 30 * S;
	if (s.what != KVP_DRIVE_WAIT || s.until_ns != seen.until_ns)
		fault("nobody is left, and no back-off");
}

static void random_histories(void)
{
	uint64_t empties = 0, attempts = 0;
	for (int run = 0; run < 300; run++) {
		uint64_t now = 5;
		kvp_drive_init(&d, KVP_DRIVE_SET, rnd(UINT64_MAX));
		seen = (struct seen){.trying = -1, .wait_ns = S, .faults = seen.faults};
		seen.now = (uint32_t)rnd(1 << PEERS);
		peers(seen.now);
		for (int i = 0; i < 200; i++) {
			check_step(now);
			if (!seen.now && !seen.tried && seen.trying < 0 && !seen.until_ns) {
				empties++;
				break;
			}
			uint64_t what = rnd(10);
			if (what < 5 && seen.trying >= 0) {
				seen.tried |= 1u << seen.trying;
				seen.trying = -1;
				attempts++;
				kvp_drive_result(&d, KVP_DRIVE_FAILED);
			} else if (what < 7) {
				uint32_t set_now = rnd(2) ? seen.now : (uint32_t)rnd(1 << PEERS);
				if (rnd(4))
					set_now |= 1;
				if (set_now != seen.now && seen.until_ns && now < seen.until_ns) {
					seen.until_ns = 0;
					seen.tried = 0;
					seen.wait_ns = S;
				}
				seen.now = set_now;
				peers(set_now);
			} else {
				now += rnd(2) ? rnd(3 * S) : rnd(40 * S);
			}
		}
	}
	printf("# %llu attempts, %llu ended empty\n", (unsigned long long)attempts,
		(unsigned long long)empties);
	is_u64((uint64_t)seen.faults, 0, "300 random histories keep the rules");
	ok(attempts > 5000 && empties > 5, "and are about something");
}

int main(void)
{
	state = tap_seed(4711);
	list();
	set();
	changes();
	order();
	random_histories();
	return done();
}
