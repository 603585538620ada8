#include "daemons/extproc/plan.h"

static int is_part(const struct kvp_plan *p, int leg)
{
	return leg == KVP_PLAN_MAIN || p->form != KVP_PLAN_LOCAL;
}

/* give_up ends what is pending and booked, the decode leg last. */
static void give_up(struct kvp_plan *p)
{
	for (int i = 0; i < KVP_PLAN_LEGS; i++)
		if (p->leg[i] == KVP_LEG_PENDING) {
			p->leg[i] = KVP_LEG_CANCELLED;
			p->ops->cancel(p->ctx, (enum kvp_plan_leg)i);
		}
	for (int i = 0; i < KVP_PLAN_LEGS; i++)
		if (p->leg[i] == KVP_LEG_BOOKED) {
			p->leg[i] = KVP_LEG_FREED;
			p->ops->free(p->ctx, (enum kvp_plan_leg)i);
		}
}

static void abort_for(struct kvp_plan *p, enum kvp_plan_fault fault, enum kvp_plan_leg leg)
{
	p->state = KVP_PLAN_ABORTED;
	give_up(p);
	p->ops->refuse(p->ctx, fault, leg);
}

void kvp_plan_begin(struct kvp_plan *p, const struct kvp_plan_ops *ops, void *ctx, enum kvp_plan_form form,
	enum kvp_plan_leg first)
{
	unsigned attempt = p->attempt + 1;
	*p = (struct kvp_plan){
		.ops = ops, .ctx = ctx, .state = KVP_PLAN_SELECTING, .form = form, .attempt = attempt};
	enum kvp_plan_leg order[KVP_PLAN_LEGS] = {
		first, first == KVP_PLAN_MAIN ? KVP_PLAN_PREFILL : KVP_PLAN_MAIN};
	for (int i = 0; i < KVP_PLAN_LEGS; i++) {
		if (!is_part(p, (int)order[i]) || (form == KVP_PLAN_CHAIN && order[i] != KVP_PLAN_MAIN))
			continue;
		/* What was asked for first may have failed at once, and the plan may have begun anew. */
		if (p->attempt != attempt || p->state != KVP_PLAN_SELECTING)
			return;
		p->leg[order[i]] = KVP_LEG_PENDING;
		ops->book(ctx, order[i]);
	}
}

void kvp_plan_booked(struct kvp_plan *p, enum kvp_plan_leg leg)
{
	if (p->leg[leg] == KVP_LEG_CANCELLED) {
		p->leg[leg] = KVP_LEG_FREED;
		p->ops->free(p->ctx, leg);
		return;
	}
	if (p->leg[leg] != KVP_LEG_PENDING)
		return;
	p->leg[leg] = KVP_LEG_BOOKED;
	if (p->form == KVP_PLAN_CHAIN && p->leg[KVP_PLAN_PREFILL] == KVP_LEG_IDLE) {
		p->leg[KVP_PLAN_PREFILL] = KVP_LEG_PENDING;
		p->ops->book(p->ctx, KVP_PLAN_PREFILL);
		return;
	}
	for (int i = 0; i < KVP_PLAN_LEGS; i++)
		if (is_part(p, i) && p->leg[i] != KVP_LEG_BOOKED)
			return;
	for (int i = 0; i < KVP_PLAN_LEGS; i++)
		if (is_part(p, i) && !p->ops->holds(p->ctx, (enum kvp_plan_leg)i)) {
			abort_for(p, KVP_PLAN_LOST, (enum kvp_plan_leg)i);
			return;
		}
	p->state = KVP_PLAN_PUBLISHED;
	p->ops->publish(p->ctx);
}

void kvp_plan_failed(struct kvp_plan *p, enum kvp_plan_leg leg)
{
	if (p->leg[leg] != KVP_LEG_PENDING)
		return;
	p->leg[leg] = KVP_LEG_FAILED;
	abort_for(p, KVP_PLAN_FAILED, leg);
}

void kvp_plan_late(struct kvp_plan *p)
{
	if (p->state != KVP_PLAN_SELECTING)
		return;
	/* Where both are late the decode leg is: without it nothing helps. */
	int main_waits = p->leg[KVP_PLAN_MAIN] == KVP_LEG_PENDING;
	abort_for(p, KVP_PLAN_LATE, main_waits ? KVP_PLAN_MAIN : KVP_PLAN_PREFILL);
}

void kvp_plan_first_body(struct kvp_plan *p)
{
	if (p->state != KVP_PLAN_PUBLISHED)
		return;
	p->state = KVP_PLAN_DECODING;
	if (p->form == KVP_PLAN_LOCAL) {
		p->ops->prefill_done(p->ctx);
	} else if (p->leg[KVP_PLAN_PREFILL] == KVP_LEG_BOOKED) {
		p->leg[KVP_PLAN_PREFILL] = KVP_LEG_FREED;
		p->ops->free(p->ctx, KVP_PLAN_PREFILL);
	}
}

void kvp_plan_end(struct kvp_plan *p)
{
	if (p->state == KVP_PLAN_SELECTING)
		p->state = KVP_PLAN_ABORTED;
	else if (p->state == KVP_PLAN_PUBLISHED || p->state == KVP_PLAN_DECODING)
		p->state = KVP_PLAN_CLOSED;
	else
		return;
	give_up(p);
}
