#include "daemons/ctl/ctl.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

void ctl_doc_begin(struct ctl *c)
{
	kvp_jw_init(&c->doc);
	kvp_jw_obj(&c->doc);
}

int ctl_doc_end(struct ctl *c)
{
	int bad = 0;
	kvp_jw_end(&c->doc);
	if (c->form == CTL_JSON) {
		bad = kvp_jw_done(&c->doc) != KVP_OK;
		if (!bad) {
			fwrite(c->doc.buf, 1, c->doc.len, stdout);
			fputc('\n', stdout);
		}
	}
	kvp_jw_free(&c->doc);
	return bad ? KVP_EXIT_DEPEND : KVP_EXIT_OK;
}

void ctl_tab_begin(
	struct ctl_tab *t, struct ctl *c, const char *name, uint32_t col_cnt, const char *const *col_name)
{
	memset(t, 0, sizeof(*t));
	KVP_ASSERT(col_cnt <= CTL_COL_MAX);
	t->ctl = c;
	t->col_cnt = col_cnt;
	t->col_name = col_name;
	if (c->form == CTL_JSON) {
		kvp_jw_key(&c->doc, name);
		kvp_jw_arr(&c->doc);
	}
}

static struct kvp_jw *json(struct ctl_tab *t)
{
	return t->ctl->form == CTL_JSON ? &t->ctl->doc : NULL;
}

/* cell starts the next cell: in JSON it writes the key, opening the row's object as needed. */
static void cell(struct ctl_tab *t)
{
	struct kvp_jw *w = json(t);
	if (w) {
		if (t->col == 0)
			kvp_jw_obj(w);
		kvp_jw_key(w, t->col_name[t->col]);
	}
}

static void next(struct ctl_tab *t)
{
	t->col = (t->col + 1) % t->col_cnt;
	if (json(t) && t->col == 0)
		kvp_jw_end(json(t));
}

static void text(struct ctl_tab *t, const char *s, size_t n)
{
	if (t->cell_cnt == t->cell_max) {
		uint32_t max = t->cell_max ? t->cell_max * 2 : 256;
		char **p = realloc(t->cell, max * sizeof(*p));
		if (!p) {
			t->failed = 1;
			return;
		}
		t->cell = p;
		t->cell_max = max;
	}
	char *copy = malloc(n + 1);
	if (!copy) {
		t->failed = 1;
		return;
	}
	for (size_t i = 0; i < n; i++) /* nothing from outside may move the cursor of a terminal */
		copy[i] = (unsigned char)s[i] < 0x20 || s[i] == 0x7f ? '?' : s[i];
	copy[n] = 0;
	t->cell[t->cell_cnt++] = copy;
}

void ctl_tab_u64(struct ctl_tab *t, uint64_t v)
{
	char b[24];
	cell(t);
	if (json(t))
		kvp_jw_u64(json(t), v);
	else
		text(t, b, (size_t)snprintf(b, sizeof(b), "%" PRIu64, v));
	t->right[t->col] = 1;
	next(t);
}

void ctl_tab_f64(struct ctl_tab *t, double v)
{
	char b[32];
	cell(t);
	if (json(t))
		kvp_jw_f64(json(t), v);
	else
		text(t, b, (size_t)snprintf(b, sizeof(b), "%.1f", v));
	t->right[t->col] = 1;
	next(t);
}

void ctl_tab_strn(struct ctl_tab *t, const char *s, size_t n)
{
	cell(t);
	if (json(t))
		kvp_jw_strn(json(t), s, n);
	else
		text(t, s, n);
	next(t);
}

void ctl_tab_str(struct ctl_tab *t, const char *s)
{
	ctl_tab_strn(t, s, strlen(s));
}

void ctl_tab_none(struct ctl_tab *t)
{
	cell(t);
	if (json(t))
		kvp_jw_null(json(t));
	else
		text(t, "-", 1);
	next(t);
}

static void print_text(const struct ctl_tab *t)
{
	size_t width[CTL_COL_MAX];
	for (uint32_t c = 0; c < t->col_cnt; c++)
		width[c] = strlen(t->col_name[c]);
	for (uint32_t i = 0; i < t->cell_cnt; i++) {
		size_t n = strlen(t->cell[i]);
		uint32_t c = i % t->col_cnt;
		width[c] = n > width[c] ? n : width[c];
	}
	for (uint32_t i = 0; i < t->col_cnt + t->cell_cnt; i++) {
		uint32_t c = i % t->col_cnt;
		const char *s = i < t->col_cnt ? t->col_name[c] : t->cell[i - t->col_cnt];
		int last = c + 1 == t->col_cnt;
		if (last && !t->right[c])
			fputs(s, stdout); /* no blanks at the end of a line */
		else
			fprintf(stdout, t->right[c] ? "%*s" : "%-*s", (int)width[c], s);
		fputs(last ? "\n" : "  ", stdout);
	}
}

int ctl_tab_end(struct ctl_tab *t)
{
	if (json(t))
		kvp_jw_end(json(t));
	else if (!t->failed)
		print_text(t);
	for (uint32_t i = 0; i < t->cell_cnt; i++)
		free(t->cell[i]);
	free(t->cell);
	if (t->failed)
		fputs("kvpickctl: no memory\n", stderr);
	return t->failed ? KVP_EXIT_DEPEND : KVP_EXIT_OK;
}

void ctl_time(uint64_t real_ns, char buf[32])
{
	time_t s = (time_t)(real_ns / 1000000000u);
	struct tm tm;
	gmtime_r(&s, &tm);
	strftime(buf, 32, "%Y-%m-%dT%H:%M:%SZ", &tm);
}
