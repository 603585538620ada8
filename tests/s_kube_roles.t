#!/usr/bin/env python3
"""Prefill and decode workers from Kubernetes: one pool and a label, or two pools. Discovery runs alone here (tests/
helpers/h_cluster.c); what it asks of the indexer is what is looked at."""
import json
import os
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from kube_stub import KubeStub, pod, pool  # noqa: E402
from node import BUILD, SLOW, Tap, wait_for  # noqa: E402

tap = Tap()
ROLES = {"0": "aggregated", "1": "prefill", "2": "decode"}
ROLE = "nvidia.com/role"


class Discovery:
    def __init__(self, stub, **env):
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "KVPICK_", "KUBE", "POD_"))}
        settings = {"DYN_EPP_MODE": "standalone", "DYN_MODEL_NAME": "m", "DYN_EPP_INFERENCE_POOL_NAME": "pool",
                    "POD_NAMESPACE": "ns", "DYN_KV_CACHE_BLOCK_SIZE": "16",
                    "DYN_EPP_TOKENIZER_PROTOCOL": "vllm-render",
                    "DYN_EPP_TOKENIZER_SERVICE_URL": "http://127.0.0.1:1",
                    "KUBECONFIG": stub.kubeconfig(tokenFile=stub.account + "/token")}
        self.proc = subprocess.Popen([f"{BUILD}/tests/helpers/h_cluster"], env={**keep, **settings, **env},
                                     stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.workers, self.ready, self.said, self.log = {}, None, [], []
        threading.Thread(target=self.read, daemon=True).start()
        threading.Thread(target=lambda: self.log.extend(self.proc.stderr), daemon=True).start()

    def read(self):
        for line in self.proc.stdout:
            what, _, rest = line.strip().partition(" ")
            self.said.append(line.strip())
            if what == "post":
                role, _, text = rest.partition(" ")
                body = json.loads(text)
                self.workers[body["worker_id"]] = (ROLES[role], body)
            elif what == "delete":
                self.workers.pop(int(rest), None)
            elif what == "ready":
                self.ready = rest == "1"

    def is_now(self, *want, name):
        """want: (role, endpoint)."""
        got = lambda: sorted((r, b["endpoint"][7:]) for r, b in self.workers.values())
        tap.ok(wait_for(lambda: got() == sorted(want)), name, f"{got()}\n{sorted(want)}\n{''.join(self.log[-5:])}")

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.proc.stdin.close()
        tap.same(self.proc.wait(20 * SLOW), 0, "it ends well")


def by_label():
    stub = KubeStub()
    stub.put("inferencepools", pool())
    for name, ip, role in (("p", "10.0.0.1", "prefill"), ("d", "10.0.0.2", " Decode "), ("x", "10.0.0.3", "both"),
                           ("y", "10.0.0.4", None)):
        stub.put("pods", pod(name, ip, labels={"app": "engine", **({ROLE: role} if role is not None else {})}))
    with Discovery(stub, DYN_EPP_TOPOLOGY_MODE="disaggregated", DYN_EPP_MAX_NUM_BATCHED_TOKENS="100",
                   DYN_EPP_PREFILL_MAX_NUM_BATCHED_TOKENS="800") as k:
        k.is_now(("prefill", "10.0.0.1:8000"), ("decode", "10.0.0.2:8000"),
                 name="roles by label; pods without one, or with another, are left out")
        tap.ok(wait_for(lambda: k.ready), "ready")
        bodies = {r: b for r, b in k.workers.values()}
        tap.same((bodies["prefill"]["max_num_batched_tokens"], bodies["decode"]["max_num_batched_tokens"]), (800, 100),
                 "each role has its capacity")
        tap.ok("kv_events_endpoints" in bodies["prefill"] and "kv_events_endpoints" not in bodies["decode"],
               "who decodes has no events")
        tap.ok(wait_for(lambda: any("role_label_" in line for line in k.log)), "who is left out is told", k.log)
        n = len(k.said)
        stub.put("pods", pod("d", "10.0.0.2", labels={"app": "engine", ROLE: "prefill"}))
        k.is_now(("prefill", "10.0.0.1:8000"), ("prefill", "10.0.0.2:8000"), name="a change of the role")
        tap.ok([s.split()[:2] for s in k.said[n:]] == [["post", "1"]], "is one change of one worker", k.said[n:])
        tap.same(k.ready, True, "a role without workers is ready")
        stub.put("pods", pod("y", "10.0.0.4", labels={"app": "engine", ROLE: "DECODE"}))
        k.is_now(("prefill", "10.0.0.1:8000"), ("prefill", "10.0.0.2:8000"), ("decode", "10.0.0.4:8000"),
                 name="a label that comes later")
    stub.close()


def other_label():
    """llm-d-router#220: the label is a setting, as of pods that are a group of several."""
    stub = KubeStub()
    stub.put("inferencepools", pool())
    other = "example.com/what.it-does"
    stub.put("pods", pod("p", "10.0.0.1", labels={"app": "engine", other: "prefill"}))
    stub.put("pods", pod("d", "10.0.0.2", labels={"app": "engine", other: "decode", ROLE: "prefill"}))
    with Discovery(stub, DYN_EPP_TOPOLOGY_MODE="disaggregated", DYN_EPP_WORKER_ROLE_LABEL=other) as k:
        k.is_now(("prefill", "10.0.0.1:8000"), ("decode", "10.0.0.2:8000"),
                 name="llm-d-router#220: another label names the roles")
    stub.close()


def by_pool():
    stub = KubeStub()
    stub.put("inferencepools", pool(labels={"kind": "d"}, ports=(8000,)))
    stub.put("pods", pod("d", "10.0.0.1", labels={"kind": "d"}))
    stub.put("pods", pod("p", "10.0.0.2", labels={"kind": "p", ROLE: "decode"}))
    with Discovery(stub, DYN_EPP_PREFILL_INFERENCE_POOL_NAME="pre", DYN_ROUTER_CONDITIONAL_DISAGG="true") as k:
        tap.ok(wait_for(lambda: any("pool=pre valid=0" in line for line in k.log)), "the second pool is not there", k.log)
        tap.same((k.ready, k.workers), (False, {}), "with one of two pools nothing is known, and nobody ready")
        stub.put("inferencepools", pool("pre", labels={"kind": "p"}, ports=(9000,)))
        k.is_now(("decode", "10.0.0.1:8000"), ("prefill", "10.0.0.2:9000"),
                 name="each pool gives its role and its port, whatever labels say")
        tap.ok(wait_for(lambda: k.ready), "now it is ready")
        tap.ok(all("kv_events_endpoints" in b for _, b in k.workers.values()),
               "with conditional disaggregation who decodes has events, too")
        n = len(k.said)
        stub.put("pods", pod("p", "10.0.0.2", labels={"kind": "d"}))
        k.is_now(("decode", "10.0.0.1:8000"), ("decode", "10.0.0.2:8000"), name="a pod goes from one pool to the other")
        tap.ok([s.split()[:2] for s in k.said[n:]] == [["post", "2"]], "in one step", k.said[n:])
        stub.put("inferencepools", pool("pre", labels={"app": "all"}, ports=(9000,)))
        stub.put("pods", pod("q", "10.0.0.3", labels={"app": "all", "kind": "d"}))
        stub.put("pods", pod("r", "10.0.0.4", labels={"app": "all"}))
        k.is_now(("decode", "10.0.0.1:8000"), ("decode", "10.0.0.2:8000"), ("prefill", "10.0.0.4:9000"),
                 name="a pod of both pools is left out")
        tap.ok(wait_for(lambda: any("in_both_pools" in line for line in k.log)), "and told")
        stub.delete("inferencepools", "pre")
        k.is_now(name="one of the pools is deleted: nobody is left")
        tap.ok(wait_for(lambda: k.ready is False), "and nothing ready")
        time.sleep(0.1)
        stub.put("inferencepools", pool("pre", labels={"app": "all"}, ports=(9001,)))
        k.is_now(("decode", "10.0.0.1:8000"), ("decode", "10.0.0.2:8000"), ("prefill", "10.0.0.4:9001"), name="it is back")
        tap.ok(wait_for(lambda: k.ready), "and ready")
        stub.put("inferencepools", pool(labels={"kind": "d"}, ports=(7000,)))
        k.is_now(("decode", "10.0.0.1:7000"), ("decode", "10.0.0.2:7000"), ("prefill", "10.0.0.4:9001"),
                 name="R04: a pool's port is its own")
    stub.close()


def ranks():
    stub = KubeStub()
    stub.put("inferencepools", pool(ports=(8000, 8001, 8002)))
    stub.put("pods", pod("a", "10.0.0.1"))
    with Discovery(stub, KVPICK_EPP_DP_ROUTING="port", DYN_EPP_KV_EVENT_REPLAY_PORT="6000",
                   KVPICK_EPP_KV_EVENT_PORT_STRIDE="10") as k:
        k.is_now(("aggregated", "10.0.0.1:8000"), name="three target ports")
        (_, body), = k.workers.values()
        tap.same((body["data_parallel_size"], body["kv_events_endpoints"]["2"], body["replay_endpoints"]["1"]),
                 (3, "tcp://10.0.0.1:5577", "tcp://10.0.0.1:6010"), "are three ranks")
        stub.put("pods", pod("a", "10.0.0.1", annotations={"inference.networking.k8s.io/active-ports": "8001"}))
        k.is_now(("aggregated", "10.0.0.1:8001"), name="of which one is active")
        (_, body), = k.workers.values()
        tap.same((body["data_parallel_start_rank"], body["data_parallel_size"], body["kv_events_endpoints"]),
                 (1, 1, {"1": "tcp://10.0.0.1:5567"}), "as the rank that it is")
        stub.put("inferencepools", pool(ports=(8000,)))
        k.is_now(name="R04: a pool that shrinks to one port, which is not active")
        stub.put("pods", pod("a", "10.0.0.1"))
        k.is_now(("aggregated", "10.0.0.1:8000"), name="and is")
    stub.close()


for test in (by_label, other_label, by_pool, ranks):
    print(f"# {test.__name__}")
    test()
sys.exit(tap.done())
