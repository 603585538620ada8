#include "shm/radix_priv.h"

#include <string.h>
#include <sys/mman.h>

void *kvp_radix_mem_get(uint64_t bytes)
{
	void *p =
		mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	return p == MAP_FAILED ? NULL : p;
}

void kvp_radix_mem_put(void *p, uint64_t bytes)
{
	if (p)
		munmap(p, bytes);
}

int kvp_radix_buddy_open(struct kvp_radix_buddy *b, uint32_t gran_max, uint32_t top_order, uint32_t *bump)
{
	memset(b, 0, sizeof(*b));
	b->gran_max = gran_max >> top_order << top_order;
	b->top_order = top_order;
	b->bump = bump;
	b->next = kvp_radix_mem_get(4ULL * gran_max);
	b->prev = kvp_radix_mem_get(4ULL * gran_max);
	b->state = kvp_radix_mem_get(gran_max);
	b->clean = kvp_radix_mem_get((gran_max >> top_order) + 1);
	if (b->next && b->prev && b->state && b->clean)
		return KVP_OK;
	kvp_radix_buddy_close(b);
	return KVP_ERR_SYS;
}

void kvp_radix_buddy_close(struct kvp_radix_buddy *b)
{
	kvp_radix_mem_put(b->next, 4ULL * b->gran_max);
	kvp_radix_mem_put(b->prev, 4ULL * b->gran_max);
	kvp_radix_mem_put(b->state, b->gran_max);
	kvp_radix_mem_put(b->clean, (b->gran_max >> b->top_order) + 1);
	memset(b, 0, sizeof(*b));
}

static void push(struct kvp_radix_buddy *b, uint32_t g, uint32_t order)
{
	uint32_t h = b->head[order];
	b->next[g] = h;
	b->prev[g] = 0;
	if (h)
		b->prev[h - 1] = g + 1;
	b->head[order] = g + 1;
	b->state[g] = (uint8_t)(order + 1);
}

static void unlink_block(struct kvp_radix_buddy *b, uint32_t g)
{
	uint32_t order = b->state[g] - 1u, n = b->next[g], p = b->prev[g];
	if (p)
		b->next[p - 1] = n;
	else
		b->head[order] = n;
	if (n)
		b->prev[n - 1] = p;
	b->state[g] = 0;
}

uint32_t kvp_radix_buddy_get(struct kvp_radix_buddy *b, uint32_t order)
{
	uint32_t o = order, g;
	while (o <= b->top_order && !b->head[o])
		o++;
	if (o <= b->top_order) {
		g = b->head[o] - 1;
		unlink_block(b, g);
		b->free_gran -= 1u << o;
		if (o == b->top_order && b->clean[g >> o]) {
			b->clean[g >> o] = 0;
			b->clean_gran -= 1u << o;
		}
	} else {
		o = b->top_order;
		if (b->gran_max - *b->bump < 1u << o)
			return KVP_RADIX_NOPOS;
		g = *b->bump;
		kvp_st_rlx_u32(b->bump, g + (1u << o));
	}
	while (o > order) { /* the upper half goes back */
		o--;
		push(b, g + (1u << o), o);
		b->free_gran += 1u << o;
	}
	return g;
}

static void put_block(struct kvp_radix_buddy *b, uint32_t g, uint32_t order)
{
	b->free_gran += 1u << order;
	while (order < b->top_order) {
		uint32_t mate = g ^ (1u << order);
		if (mate >= *b->bump || b->state[mate] != order + 1)
			break;
		unlink_block(b, mate);
		g &= ~(1u << order);
		order++;
	}
	push(b, g, order);
}

void kvp_radix_buddy_put(struct kvp_radix_buddy *b, uint32_t g, uint32_t n)
{
	while (n) {
		uint32_t fit = 31u - (uint32_t)__builtin_clz(n);
		uint32_t low = g ? (uint32_t)__builtin_ctz(g) : fit;
		uint32_t order = low < fit ? low : fit;
		order = order < b->top_order ? order : b->top_order;
		put_block(b, g, order);
		g += 1u << order;
		n -= 1u << order;
	}
}
