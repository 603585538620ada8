#!/usr/bin/env python3
"""Whether a decode worker prefills itself, as llm-d's prefix-based decider and as TensorRT-LLM's orchestrator would have
it: every row of their tables, with KV events of real publishers in blocks of one token, read off the answer's headers.
And conditional disaggregation switched off, prompts whose cached part nobody knows, and the decode gate."""
import json
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from disagg import DEST, PREFILLER, Disagg
from engine import Engine, stored
from epp import COMPLETIONS, MODEL, Renderer, routed
from node import Tap, wait_for

tap = Tap()
RENDERER = Renderer()
HERE = os.path.dirname(os.path.abspath(__file__))
EMBEDDINGS = [(":method", "POST"), (":path", "/v1/embeddings"), ("content-type", "application/json")]
POLICY = "DYN_ROUTER_CONDITIONAL_DISAGG_POLICY"
NON_CACHED = "KVPICK_CONDITIONAL_DISAGG_NON_CACHED_TOKENS"
LENGTH = "KVPICK_CONDITIONAL_DISAGG_MAX_LOCAL_PREFILL_LENGTH"


class Pair:
    """A prefill and a decode worker that tell what they hold, in blocks of one token."""

    def __init__(self, settings, **decode):
        self.engines = [Engine(replay=False) for _ in range(2)]
        size = {"block_size": 1}
        self.pool = [(1, "prefill", "10.0.0.21:8000", {**size, "kv_events_endpoint": self.engines[0].at}),
                     (7, "decode", "10.0.0.7:8000", {**size, "kv_events_endpoint": self.engines[1].at, **decode})]
        self.node = Disagg(RENDERER, self.pool, env={"DYN_ROUTER_USE_KV_EVENTS": "true",
                                                     "KVPICK_EPP_DISAGG_PATHS": "/completions,/embeddings",
                                                     "DYN_ROUTER_CONDITIONAL_DISAGG": "true", **settings})
        self.seq, self.first = 0, 0

    def __enter__(self):
        self.node.__enter__()
        return self

    def start(self):
        for e in self.engines:
            e.subscribed()
        self.envoy = self.node.envoy()
        return self

    def blocks(self):
        text = self.node.call("GET", "/metrics")[1]
        return next(int(float(line.split()[1])) for line in text.splitlines()
                    if line.startswith("kvpick_indexer_radix_blocks "))

    def way(self, total, held, path=COMPLETIONS):
        """Where a prompt goes of which the decode worker holds the first tokens: remote or local."""
        self.first += 1
        ids = [self.first * 100000 + i for i in range(total)]
        before = self.blocks()
        if held:
            self.engines[1].send(self.seq, stored(
                self.first, 0, 0, block_hashes=[self.first * 10000 + i for i in range(held)], token_ids=ids[:held],
                block_size=1))
            self.seq += 1
            wait_for(lambda: self.blocks() == before + held)
        s, head, _ = routed(self.envoy, path + [(PREFILLER, "127.0.0.1:9")],
                            json.dumps({"model": MODEL, "prompt": ids}).encode())
        got = ("remote" if head.set == {DEST: "10.0.0.7:8000", PREFILLER: "10.0.0.21:8000"} and
               PREFILLER not in head.removed else
               "local" if head.set == {DEST: "10.0.0.7:8000"} and PREFILLER in head.removed else (head.set, head.status))
        load = self.node.roles_load()
        s.reset()
        wait_for(lambda: not self.node.roles_load())
        charged = {"remote": {1: (total, total, 1), 7: (0, total, 1)}, "local": {7: (total - held, total, 1)}}
        if path == COMPLETIONS and isinstance(got, str) and load != charged[got]:
            return got, load
        return got

    def __exit__(self, *exc):
        if not exc[0]:
            tap.ok(wait_for(lambda: not self.node.roles_load() and not self.node.ids()), "no load and no booking is left")
            tap.same(self.node.ctl("check")[0], 0, "kvpickctl check finds no fault")
        self.envoy.close()
        self.node.__exit__(*exc)
        for e in self.engines:
            e.close()


def rows(name, key):
    with open(os.path.join(HERE, "vectors", "disagg.json"), encoding="utf-8") as f:
        table = json.load(f)[name]
    for limit in sorted({r[key] for r in table}):
        yield limit, [r for r in table if r[key] == limit]


def llmd():
    for limit, table in rows("llmd_prefix_decider", "nonCachedTokens"):
        with Pair({POLICY: "non_cached_tokens", NON_CACHED: str(limit), LENGTH: "1"}) as p:
            p.start()
            for r in table:
                tap.same(p.way(r["input_tokens"], r["hit_prefix_tokens"]), "remote" if r["disaggregate"] else "local",
                         f"llm-d's decider at {limit}: {r['hit_prefix_tokens']} of {r['input_tokens']} tokens cached")
            tap.same((p.node.plan("remote"), p.node.plan("local")),
                     (sum(r["disaggregate"] for r in table), sum(not r["disaggregate"] for r in table)), "counted")
            local = p.node.plan("local")
            tap.same((p.way(100, 0, EMBEDDINGS), p.node.plan("local")), ("local", local + 1),
                     "nobody knows what is cached of it: no disaggregation")
            tap.ok(f"setting={LENGTH} value=1 effect=" in p.node.log_text(), "a threshold of another policy is named in the log")


def trtllm():
    for limit, table in rows("trtllm_conditional", "max_local_prefill_length"):
        form = json.dumps({"policy": "max_local_prefill_length", "max_local_prefill_length": limit})
        with Pair({"DYN_ROUTER_CONDITIONAL_DISAGG_CONFIG": form}) as p:
            p.start()
            for r in table:
                tap.same(p.way(r["total"], r["match"]), "remote" if r["need_ctx"] else "local",
                         f"TensorRT-LLM's orchestrator at {limit}: {r['match']} of {r['total']} tokens match")
            tap.same(p.way(10, 0, EMBEDDINGS), "remote", "nobody knows what matches: it is prefilled remotely")
            tap.ok("effect=" not in p.node.log_text(), "nothing is set in vain")


def gate():
    """Behind the decode gate only a decode worker that is known to be calm prefills."""
    for policy, threshold in (("non_cached_tokens", NON_CACHED), ("max_local_prefill_length", LENGTH)):
        busy = {POLICY: policy, threshold: "8", "DYN_ROUTER_CONDITIONAL_DISAGG_DECODE_BUSY_THRESHOLD": "0.5"}
        with Pair(busy) as p:
            p.start()
            tap.same(p.way(100, 96), "remote", f"{policy}: a decode worker of unknown size may be busy")
            tap.same((p.node.plan("local_vetoed"), p.node.plan("local")), (1, 0), "counted")
        with Pair(busy, total_kv_blocks=1000) as p:
            p.start()
            tap.same(p.way(100, 96), "local", f"{policy}: one with room is calm")
            tap.same(p.way(600, 596), "remote", f"{policy}: one that would be over its share is not")
            tap.same((p.node.plan("local_vetoed"), p.node.plan("local")), (1, 1), "counted")


def off():
    with Pair({"DYN_ROUTER_CONDITIONAL_DISAGG": "false", POLICY: "non_cached_tokens", NON_CACHED: "1000000"}) as p:
        p.start()
        tap.same([p.way(n, held) for n, held in ((100, 0), (100, 96), (4, 4))], ["remote"] * 3,
                 "Conditional disagg: disabled: every prompt has two workers, whatever the decode worker holds")
        tap.ok(f"setting={NON_CACHED} value=1000000 effect=" in p.node.log_text(), "and its threshold is named in the log")
    with Pair({POLICY: "non_cached_tokens", NON_CACHED: "50", "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT": "0"}) as p:
        p.start()
        tap.same(p.way(100, 0), "local", "without credit for cached blocks nobody looks: no disaggregation")


for part in (llmd, trtllm, gate, off):
    if len(sys.argv) < 2 or part.__name__ in sys.argv[1:]:
        part()
sys.exit(tap.done())
