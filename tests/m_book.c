/* Random bookings against a naive model: a list of live bookings per rank, everything recomputed from it.
 * Requests are paths in a random tree of hashes, so they share prefixes as real prompts do. */
#include "tests/book_fixture.h"

#include <math.h>

#define RANKS 5
#define LIVE_MAX 60
#define SEQ_MAX 300
#define NODES 4000

struct booking {
	uint64_t h, tok;
	uint32_t rank, n, out;
	int prefill;
	double out_w;
	uint64_t seq[SEQ_MAX];
};
struct node { /* live block of a rank */
	uint64_t hash;
	uint32_t cnt;
	double w;
};
struct model {
	struct booking live[LIVE_MAX];
	uint32_t cnt;
	struct node node[RANKS][NODES];
	uint32_t node_cnt[RANKS];
};

static struct model m;
static uint32_t gen[RANKS];

static struct node *node_at(uint32_t rank, uint64_t hash)
{
	for (uint32_t i = 0; i < m.node_cnt[rank]; i++)
		if (m.node[rank][i].hash == hash)
			return &m.node[rank][i];
	return NULL;
}

static void node_add(uint32_t rank, uint64_t hash)
{
	struct node *n = node_at(rank, hash);
	if (!n) {
		n = &m.node[rank][m.node_cnt[rank]++];
		*n = (struct node){ hash, 0, 1.0 };
	}
	n->cnt++;
}

static void node_del(uint32_t rank, uint64_t hash)
{
	struct node *n = node_at(rank, hash);
	if (--n->cnt == 0)
		*n = m.node[rank][--m.node_cnt[rank]];
}

static uint32_t path(uint64_t *seq)
{
	uint32_t n = rnd_below(4) ? rnd_below(40) : rnd_below(SEQ_MAX);
	uint64_t at = 0x9e3779b97f4a7c15ULL;
	for (uint32_t i = 0; i < n; i++) {
		/* seldom a branch: long shared prefixes */
		at = (at ^ (rnd_below(12) ? 0 : rnd_below(3) + 1)) * 0xd1342543de82ef95ULL + 1;
		seq[i] = at;
	}
	return n;
}

static double model_blocks(uint32_t rank)
{
	double sum = 0;
	for (uint32_t i = 0; i < m.node_cnt[rank]; i++)
		sum += m.node[rank][i].w;
	for (uint32_t i = 0; i < m.cnt; i++)
		sum += m.live[i].rank == rank ? m.live[i].out_w : 0;
	return sum;
}

static int same(struct kvp_book *b, uint32_t rank)
{
	struct kvp_load l;
	uint64_t tok = 0, req = 0;
	kvp_load_read(b, rank, &l);
	for (uint32_t i = 0; i < m.cnt; i++)
		if (m.live[i].rank == rank) {
			tok += m.live[i].prefill ? m.live[i].tok : 0;
			req++;
		}
	double blk = model_blocks(rank), got = (double)l.active_blk_fx / (double)KVP_BLK_FX_ONE;
	if (l.prefill_tok == tok && l.requests == req && fabs(blk - got) < 1e-8)
		return 1;
	printf("# rank %u: got %" PRIu64 " %u %.9f, want %" PRIu64 " %" PRIu64 " %.9f\n", rank, l.prefill_tok,
		l.requests, got, tok, req, blk);
	return 0;
}

static void model_free(uint32_t i)
{
	struct booking *k = &m.live[i];
	for (uint32_t j = 0; j < k->n; j++)
		node_del(k->rank, k->seq[j]);
	m.live[i] = m.live[--m.cnt];
}

static int op_book(struct kvp_book *b, uint64_t step)
{
	if (m.cnt == LIVE_MAX)
		return 1;
	struct booking *k = &m.live[m.cnt];
	char id[64];
	snprintf(id, sizeof(id), "request-%" PRIu64, step);
	memset(k, 0, sizeof(*k));
	k->rank = rnd_below(RANKS);
	k->n = path(k->seq);
	k->tok = rnd_below(3) ? rnd_below(5000) : 0;
	k->prefill = k->tok > 0;
	uint32_t depth = 0;
	while (depth < k->n && node_at(k->rank, k->seq[depth]))
		depth++;
	if (kvp_active_depth(b, k->rank, gen[k->rank], k->seq, k->n) != depth)
		return 0;
	/* a repeated hash counts once */
	uint64_t sent[SEQ_MAX + 8];
	memcpy(sent, k->seq, k->n * sizeof(sent[0]));
	uint32_t n = k->n;
	if (n && !rnd_below(6))
		for (int i = 0; i < 4; i++)
			sent[n++] = k->seq[rnd_below(k->n)];
	if (book_simple(b, KVP_OWNER(1, 1), id, k->rank, gen[k->rank], k->tok, sent, n, &k->h))
		return 0;
	for (uint32_t j = 0; j < k->n; j++)
		node_add(k->rank, k->seq[j]);
	m.cnt++;
	return 1;
}

static int op_output(struct kvp_book *b, struct booking *k)
{
	double f = (double)rnd_below(1001) / 1000.0;
	int frac = rnd_below(3) != 0;
	k->out++;
	k->out_w = frac ? k->out * f : k->out_w + 1.0;
	for (uint32_t j = k->n; frac && j-- > 0;) {
		struct node *n = node_at(k->rank, k->seq[j]);
		if (n->cnt != 1)
			break;
		n->w = f;
	}
	return kvp_resv_output(b, k->h, frac ? &f : NULL) == KVP_OK;
}

static int op_flap(struct kvp_book *b, uint32_t rank)
{
	uint64_t gone[LIVE_MAX];
	uint32_t n = 0;
	for (uint32_t i = 0; i < m.cnt;) {
		if (m.live[i].rank != rank) {
			i++;
			continue;
		}
		gone[n++] = m.live[i].h;
		model_free(i);
	}
	int good = kvp_rank_close(b, rank, gen[rank]) == KVP_OK;
	good &= kvp_rank_open(b, rank, ++gen[rank]) == KVP_OK;
	for (uint32_t i = 0; i < n; i++)
		good &= kvp_resv_free(b, gone[i]) == KVP_ERR_NOTFOUND;
	return good;
}

int main(void)
{
	struct fixture f;
	rnd_seed();
	fixture_make(&f, KVP_LOAD_PADDED_MAX + 1, 256, 65536); /* dense loads; other tests: padded ones */
	struct kvp_book *b = &f.b;
	kvp_book_attach(b, KVP_OWNER(1, 1), NULL);
	for (uint32_t r = 0; r < RANKS; r++)
		kvp_rank_open(b, r, gen[r] = 1);
	uint64_t step, bad = 0;
	for (step = 0; step < 20000 && !bad; step++) {
		uint32_t what = rnd_below(100), i = m.cnt ? rnd_below(m.cnt) : 0;
		if (what < 40 || m.cnt == 0) {
			bad = !op_book(b, step);
		} else if (what < 50) {
			bad = kvp_resv_prefill_done(b, m.live[i].h) != KVP_OK;
			m.live[i].prefill = 0;
		} else if (what < 70) {
			bad = !op_output(b, &m.live[i]);
		} else if (what < 99) {
			bad = kvp_resv_free(b, m.live[i].h) != KVP_OK;
			bad |= kvp_resv_free(b, m.live[i].h) != KVP_ERR_NOTFOUND;
			model_free(i);
		} else if (!rnd_below(4)) {
			bad = !op_flap(b, rnd_below(RANKS));
		}
		for (uint32_t r = 0; r < RANKS && !bad; r++)
			bad = !same(b, r);
		if (!bad && step % 2000 == 0)
			bad = kvp_book_check(b) != 0;
		if (bad)
			printf("# step %" PRIu64 " kind %u\n", step, what);
	}
	ok(!bad, "20000 random operations give the loads of the model after every step");
	is_u64(kvp_resv_cnt(b), m.cnt, "the table holds exactly the live bookings");
	is_u64(kvp_book_check(b), 0, "check finds no fault");
	while (m.cnt) {
		kvp_resv_free(b, m.live[0].h);
		model_free(0);
	}
	uint64_t rest = 0;
	for (uint32_t r = 0; r < RANKS; r++) {
		struct kvp_load l;
		kvp_load_read(b, r, &l);
		rest += l.prefill_tok + l.requests + l.active_blk_fx;
	}
	is_u64(rest, 0, "everything freed leaves exactly zero load");
	is_u64(kvp_book_check(b), 0, "check finds no fault in the empty table");
	fixture_drop(&f);
	return done();
}
