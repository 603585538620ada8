#!/usr/bin/env python3
"""The cost of selection policy least_work, written apart from the product, in exact fractions; and the vectors that
tests/v_least_work.c replays: `tests/lib/least_work.py --write` makes tests/vectors/least_work.json.

Tokens of work that a request makes a rank do. found: its tokens that are cached there, by the same credits as in the
reference policy, or that belong to a live request's prompt there, whichever are more. miss: the others.
  prefill role     scale * (miss + miss^2 / 51200 + 0.35 * prompt tokens to be prefilled there)
  aggregated       the same + 640 * live requests + tokens of live blocks, the request's own included, / 128
  decode           the same + tokens of those blocks beyond 0.9 of the rank's capacity, where that is known
and in every role active_request_weight * block size * live requests."""
import json
import os
import random
import sys
from fractions import Fraction

VECTORS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "vectors", "least_work.json")
WEIGHTS = {"overlap_score_credit": 1.0, "overlap_score_credit_decay": 0.0, "prefill_load_scale": 1.0,
           "active_request_weight": 0.0, "host_weight": 0.75, "disk_weight": 0.25, "shared_multiplier": 0.0}
RANK = {"device": 0, "host": 0, "disk": 0, "shared": 0, "additional": 0, "active_prefill_tokens": 0, "active_blocks": 0,
        "active_requests": 0, "total_blocks": 0, "taint_multiplier": 1.0}


def logit(q, r, least_prefill):
    """Cost of one rank before taints. least_prefill: the fewest outstanding prompt tokens among all ranks."""
    w = {k: Fraction(v) for k, v in {**WEIGHTS, **q.get("weights", {})}.items()}
    size, isl, track = q["block_size"], q["isl_tokens"], q.get("track", True)
    decay = Fraction(1)
    if track and w["overlap_score_credit_decay"] > 0:
        excess = Fraction(r["active_prefill_tokens"] - least_prefill, size)
        decay = 1 / (1 + w["overlap_score_credit_decay"] * excess / -(-isl // size))
    cached = (w["overlap_score_credit"] * decay * r["device"] + w["host_weight"] * r["host"] +
              w["disk_weight"] * r["disk"] + w["shared_multiplier"] * r["shared"])
    live = w["overlap_score_credit"] * max(0, q["sequence_blocks"] - r["additional"])
    miss = max(Fraction(0), isl - size * max(cached, live))
    ahead = r["active_prefill_tokens"] if track else 0
    cost = w["prefill_load_scale"] * (miss + miss * miss / 51200 + Fraction(35, 100) * ahead)
    cost += w["active_request_weight"] * size * r["active_requests"]
    if q["role"] == "prefill":
        return cost
    held = size * (r["active_blocks"] + r["additional"])
    cost += 640 * r["active_requests"] + Fraction(held, 128)
    if q["role"] == "decode" and r["total_blocks"]:
        cost += max(Fraction(0), held - Fraction(9, 10) * r["total_blocks"] * size)
    return cost


def costs(q, ranks):
    """[(logit, cost)] of the ranks, which may leave out what is as in RANK."""
    full = [{**RANK, **r} for r in ranks]
    least = min(r["active_prefill_tokens"] for r in full)
    out = []
    for r in full:
        c = logit(q, r, least)
        out.append((c, c * Fraction(r["taint_multiplier"]) if q.get("preferred") else c))
    return out


def by_hand():
    """Each term alone, so that a wrong one is named."""
    def one(name, ranks, **q):
        return name, {"role": "aggregated", "block_size": 16, "isl_tokens": 1000, "sequence_blocks": 62, **q}, ranks
    none = {"additional": 62}
    yield one("an idle rank without anything of the prompt", [none])
    for tier in ("device", "host", "disk"):
        yield one(f"{tier} blocks", [{**none, tier: 40}, none])
    yield one("the shared cache", [{**none, "shared": 8}], weights={"shared_multiplier": 0.5})
    yield one("more credit than prompt", [{"device": 62, "host": 62, "additional": 62}])
    yield one("blocks of a live prompt count like cached ones", [{"additional": 22}, {**none, "device": 40}])
    yield one("the more of both", [{"additional": 22, "device": 10}, {"additional": 50, "device": 40}])
    yield one("none are tracked", [{"additional": 0, "device": 2}], sequence_blocks=0)
    yield one("a credit of 0 hides both", [{"additional": 2, "device": 60}], weights={"overlap_score_credit": 0})
    yield one("half of the credit", [{"additional": 2, "device": 60}], weights={"overlap_score_credit": 0.5})
    yield one("a long prompt", [{"additional": 6250}, {"device": 6000, "additional": 6250}], isl_tokens=100000,
              sequence_blocks=6250)
    yield one("others' prompts", [{**none, "active_prefill_tokens": 4000}])
    yield one("others' prompts, untracked", [{**none, "active_prefill_tokens": 4000}], track=False)
    yield one("live requests", [{**none, "active_requests": 3}])
    yield one("live requests with a weight", [{**none, "active_requests": 3}], weights={"active_request_weight": 2.5})
    yield one("live blocks", [{**none, "active_blocks": 1234}])
    yield one("scale", [{**none, "active_prefill_tokens": 7, "active_requests": 1}], weights={"prefill_load_scale": 3})
    yield one("decayed credit", [{**none, "device": 40, "active_prefill_tokens": 5000},
                                 {**none, "active_prefill_tokens": 1000}],
              weights={"overlap_score_credit_decay": 0.5})
    for role in ("prefill", "decode", "aggregated"):
        yield one(f"every term, {role}",
                  [{"device": 10, "host": 4, "disk": 2, "additional": 30, "active_prefill_tokens": 900,
                    "active_blocks": 970, "active_requests": 5, "total_blocks": 1000}], role=role)
    full = {**none, "active_blocks": 880, "total_blocks": 1000}
    yield one("decode: over 0.9 of the capacity", [full, {**full, "total_blocks": 2000}, {**full, "total_blocks": 0}],
              role="decode")
    yield one("decode: exactly 0.9", [{**full, "active_blocks": 838}, {**full, "active_blocks": 839}], role="decode")
    yield one("aggregated ranks have no such edge", [full, {**full, "total_blocks": 0}])
    yield one("taints", [{**none, "taint_multiplier": 0.5}, none], preferred=True)
    yield one("taints that nobody asks for", [{**none, "taint_multiplier": 0.5}, none])
    yield one("a decode leg that asks for no cache", [{**none, "device": 60, "active_requests": 1}, {**none,
              "active_blocks": 300}], role="decode", track=False, weights={"overlap_score_credit": 0})


def at_random(rng, n):
    for i in range(n):
        size = rng.choice([1, 4, 16, 64, 512])
        isl = rng.randint(1, 200000 if size > 4 else 3000)
        seq = rng.choice([isl // size, isl // size, 0])
        q = {"role": rng.choice(["aggregated", "prefill", "decode"]), "block_size": size, "isl_tokens": isl,
             "sequence_blocks": seq, "track": rng.random() < 0.8, "preferred": rng.random() < 0.2, "weights": {}}
        for key, values in (("overlap_score_credit", (0, 0.5, 1.5)), ("overlap_score_credit_decay", (0.25, 2)),
                            ("prefill_load_scale", (0, 0.5, 4)), ("active_request_weight", (1, 100)),
                            ("shared_multiplier", (0.25, 1))):
            if rng.random() < 0.2:
                q["weights"][key] = rng.choice(values)
        ranks = []
        for _ in range(rng.randint(2, 8)):
            held = rng.choice([0, 0, rng.randint(0, isl // size), isl // size])
            ranks.append({"device": held, "host": rng.choice([0, rng.randint(0, isl // size - held)]),
                          "disk": rng.choice([0, rng.randint(0, 5)]), "shared": rng.choice([0, 3]),
                          "additional": seq - rng.choice([0, rng.randint(0, seq)]) if seq else 0,
                          "active_prefill_tokens": rng.choice([0, rng.randint(0, 300000)]),
                          "active_blocks": rng.choice([0, rng.randint(0, 5000)]), "active_requests": rng.randint(0, 40),
                          "total_blocks": rng.choice([0, 1000, 5000]),
                          "taint_multiplier": rng.choice([1.0, 0.5, 0.7615941559557649])})
        yield f"random {i}", q, ranks


def vectors():
    out = []
    for name, q, ranks in [*by_hand(), *at_random(random.Random(12), 60)]:
        got = costs(q, ranks)
        lowest = min(c for _, c in got)
        q = {"track": True, "preferred": False, **q, "weights": {**WEIGHTS, **q.get("weights", {})}}
        out.append({"id": name, "request": q, "ranks": [{**RANK, **r} for r in ranks],
                    "logit": [float(a) for a, _ in got], "cost": [float(c) for _, c in got],
                    "least": [i for i, (_, c) in enumerate(got) if c == lowest]})
    return {"policy": "least_work", "vectors": out}


def text():
    v = vectors()
    lines = ",\n".join(json.dumps(x, sort_keys=True) for x in v["vectors"])
    return f'{{"policy": "{v["policy"]}", "vectors": [\n{lines}\n]}}\n'


if __name__ == "__main__" and "--write" in sys.argv:
    with open(VECTORS, "w", encoding="utf-8") as f:
        f.write(text())
