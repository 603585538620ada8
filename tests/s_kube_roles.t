#!/usr/bin/env python3
"""Prefill and decode workers from Kubernetes: one pool and a label, or two pools. Discovery runs alone here (tests/
helpers/h_cluster.c); what it asks of the indexer is what is looked at. With llm-d's labels a whole node serves, too."""
import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from disagg import DEST, PREFILLER, Disagg  # noqa: E402
from epp import COMPLETIONS, Epp, Renderer, prompt, respond, routed  # noqa: E402
from kube_stub import KubeStub, pod, pool  # noqa: E402
from node import BUILD, SLOW, Tap, wait_for  # noqa: E402
from points import Points  # noqa: E402

tap = Tap()
ROLES = {"0": "aggregated", "1": "prefill", "2": "decode"}
ROLE, LLMD = "nvidia.com/role", "llm-d.ai/role"
LLMD_ROLES = {"DYN_EPP_TOPOLOGY_MODE": "disaggregated", "KVPICK_EPP_ROLE_VOCABULARY": "llmd"}


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

    def ids(self):
        return {(r, b["endpoint"][7:]): w for w, (r, b) in self.workers.items()}

    def since(self, n):
        """What was asked of the indexer since the n-th line: posts by role and endpoint, deletions by id."""
        for line in self.said[n:]:
            what, _, rest = line.partition(" ")
            if what == "post":
                yield what, ROLES[rest[0]], json.loads(rest[2:])["endpoint"][7:]
            else:
                yield what, int(rest)

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
               "Role config: who decodes has no events")
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


def llmd_pod(name, ip, role=None, **more):
    return pod(name, ip, labels={"app": "engine", **({LLMD: role} if role is not None else {})}, **more)


def llmd_labels():
    """A pod of both roles is two workers; what it becomes, and what that costs."""
    stub = KubeStub()
    stub.put("inferencepools", pool())
    for name, ip, role in (("p", "10.0.0.1", "prefill"), ("d", "10.0.0.2", "decode"), ("b", "10.0.0.3", "both"),
                           ("e", "10.0.0.4", " Prefill-Decode "), ("x", "10.0.0.5", "encode"), ("n", "10.0.0.6", None),
                           ("y", "10.0.0.7", "encode-decode"), ("z", "10.0.0.8", "encode-prefill")):
        stub.put("pods", llmd_pod(name, ip, role))
    with Discovery(stub, DYN_EPP_MAX_NUM_BATCHED_TOKENS="100", DYN_EPP_PREFILL_MAX_NUM_BATCHED_TOKENS="800",
                   **LLMD_ROLES) as k:
        want = [("prefill", "10.0.0.1:8000"), ("decode", "10.0.0.2:8000"), ("prefill", "10.0.0.3:8000"),
                ("decode", "10.0.0.3:8000"), ("prefill", "10.0.0.4:8000"), ("decode", "10.0.0.4:8000"),
                ("decode", "10.0.0.6:8000"), ("prefill", "10.0.0.8:8000")]
        k.is_now(*want, name="llm-d's words; a pod of both roles is in both pools, one without the label decodes")
        tap.ok(wait_for(lambda: k.ready), "ready")
        bodies = {(r, b["endpoint"][7:]): b for r, b in k.workers.values()}
        both = [bodies[r, "10.0.0.3:8000"] for r in ("prefill", "decode")]
        tap.same([(b["max_num_batched_tokens"], "kv_events_endpoints" in b) for b in both], [(800, True), (100, False)],
                 "each of the two is as its role says")
        tap.ok(wait_for(lambda: sum("reason=role_label_invalid" in line for line in k.log) == 1),
               "who is left out is told once", k.log)
        with Discovery(stub, **LLMD_ROLES) as other:
            other.is_now(*want, name="another replica finds the same")
            tap.same(other.ids(), k.ids(), "under the same ids")
        ids = k.ids()
        mine = {r: ids[r, "10.0.0.3:8000"] for r in ("prefill", "decode")}
        tap.ok(mine["prefill"] != mine["decode"], "the two workers of a pod have two", mine)
        at, gone = "10.0.0.3:8000", lambda r: ("delete", mine[r])
        # from role to role: who stays is left alone
        for role, now, asks in (("decode", ["decode"], {gone("prefill")}), (None, ["decode"], set()),
                                ("both", ["prefill", "decode"], {("post", "prefill", at)}),
                                ("prefill", ["prefill"], {gone("decode")}),
                                ("encode-prefill-decode", ["prefill", "decode"], {("post", "decode", at)}),
                                ("encode", [], {gone("prefill"), gone("decode")}),
                                ("prefill", ["prefill"], {("post", "prefill", at)}),
                                ("decode", ["decode"], {gone("prefill"), ("post", "decode", at)}),
                                ("prefill-decode", ["prefill", "decode"], {("post", "prefill", at)})):
            n = len(k.said)
            stub.put("pods", llmd_pod("b", "10.0.0.3", role))
            rest = [w for w in want if w[1] != at]
            k.is_now(*rest, *((r, at) for r in now), name=f"relabelled to {role}")
            stub.put("pods", llmd_pod("d", "10.0.0.2", "decode", ready=False))  # everything before it has been said
            k.is_now(*[w for w in rest if w[1] != "10.0.0.2:8000"], *((r, at) for r in now), name="and settled")
            got = {x for x in k.since(n) if x != ("delete", ids["decode", "10.0.0.2:8000"])}
            tap.same(got, asks, f"relabelled to {role}: that is all that changes")
            stub.put("pods", llmd_pod("d", "10.0.0.2", "decode"))
            k.is_now(*rest, *((r, at) for r in now), name="the other pod is back")
            tap.ok(all(k.ids()[r, at] == mine[r] for r in now), "with the ids of before", k.ids())
        stub.delete("pods", "b")
        k.is_now(*[w for w in want if w[1] != at], name="a pod of both roles goes: both workers do")
        # a picture of all is the same as what came piece by piece
        stub.put("pods", llmd_pod("b", "10.0.0.3", "both"))
        k.is_now(*want, name="and comes")
        n = len(k.said)
        stub.gone_in_stream(stub.path("pods"))
        stub.put("pods", llmd_pod("x", "10.0.0.5", "decode"))
        k.is_now(*want, ("decode", "10.0.0.5:8000"), name="the list is read anew")
        tap.same(list(k.since(n)), [("post", "decode", "10.0.0.5:8000")], "and changes nobody else")
    with Discovery(stub, DYN_EPP_WORKER_ROLE_LABEL=ROLE, DYN_ROUTER_CONDITIONAL_DISAGG="true", **LLMD_ROLES) as k:
        stub.put("pods", pod("b", "10.0.0.3", labels={"app": "engine", ROLE: "both", LLMD: "encode"}))
        k.is_now(("prefill", "10.0.0.3:8000"), *(("decode", f"10.0.0.{i}:8000") for i in range(1, 9)),
                 name="another label is read by llm-d's words; who lacks it decodes")
        tap.ok(all("kv_events_endpoints" in b for _, b in k.workers.values()),
               "with conditional disaggregation both workers of a pod have events")
    stub.close()


class Told(http.server.ThreadingHTTPServer):
    """An engine that tells of itself."""
    daemon_threads = True

    def __init__(self):
        seen = self.seen = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                seen.append(self.path)
                text = {"/v1/models": '{"data":[{"id":"m"}]}',
                        "/metrics": 'vllm:cache_config_info{block_size="32",num_gpu_blocks="77"} 1\n'}.get(self.path, "")
                self.send_response(200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_):
                pass
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


def llmd_probes():
    """An engine that is two workers is asked once; both are as it says."""
    engine, stub = Told(), KubeStub()
    stub.put("inferencepools", pool(ports=(engine.server_address[1],)))
    stub.put("pods", llmd_pod("b", "127.0.0.1", "both"))
    with Discovery(stub, KVPICK_EPP_PROBE_ENGINES="true", **LLMD_ROLES) as k:
        tap.ok(wait_for(lambda: sorted((r, b["block_size"], b.get("total_kv_blocks")) for r, b in k.workers.values()) ==
                        [("decode", 32, 77), ("prefill", 32, 77)]), "both workers are as their engine says", k.workers)
        tap.same(engine.seen, ["/health", "/v1/models", "/metrics"], "which was asked once")
        stub.put("pods", llmd_pod("b", "127.0.0.1", "decode"))
        tap.ok(wait_for(lambda: len(k.workers) == 1), "one of them goes")
        tap.same(engine.seen, ["/health", "/v1/models", "/metrics"], "and nothing is asked again")
    engine.shutdown()
    engine.server_close()
    stub.close()


class Cluster(Epp):
    """A whole node that finds its workers with the stub."""
    table, roles_load, ids, plan = Disagg.table, Disagg.roles_load, Disagg.ids, Disagg.plan

    def __init__(self, stub, renderer, **env):
        super().__init__(renderer, env={"KUBECONFIG": stub.kubeconfig(tokenFile=stub.account + "/token"),
                                        "POD_NAMESPACE": "ns", "DYN_EPP_INFERENCE_POOL_NAME": "pool",
                                        "DYN_KV_CACHE_BLOCK_SIZE": "4", "DYN_ROUTER_USE_KV_EVENTS": "false", **env})
        for name in ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"):
            self.env.pop(name, None)

    def pairs(self, n=8):
        """(destination, prefiller) of n requests at a time; None: the destination prefills itself."""
        got = [routed(self.proxy, COMPLETIONS, prompt(next(self.fresh), 4)) for _ in range(n)]
        for s, _, _ in got:
            s.reset()
        wait_for(lambda: not self.ids())
        return {(h.set.get(DEST), h.set.get(PREFILLER)) if h.kind == "request_headers" else h.text for _, h, _ in got}


def llmd_serves():
    """Pods of both roles behind the Endpoint Picker."""
    stub = KubeStub()
    a, b, c = (f"10.0.0.{i}:8000" for i in (1, 2, 3))
    stub.put("inferencepools", pool())
    stub.put("pods", llmd_pod("a", "10.0.0.1", "both"))
    with Cluster(stub, Renderer(), **LLMD_ROLES) as node:
        node.proxy, node.fresh = node.envoy(), iter(range(1000, 1 << 30))
        tap.ok(wait_for(lambda: node.pairs(1) == {(a, None)}), "one pod of both roles prefills and decodes", node.log_text())
        role = {int(w["worker_id"]): w["role"] for w in node.table("workers")}
        s, _, _ = routed(node.proxy, COMPLETIONS, prompt(1, 5))
        tap.same(sorted((role[w], x) for w, x in node.roles_load().items()),
                 [("decode", (0, 5, 1)), ("prefill", (20, 5, 1))], "each of its workers is charged what its role is")
        respond(s)
        tap.ok(wait_for(lambda: not node.roles_load() and not node.ids()), "until the end")
        stub.put("pods", llmd_pod("b", "10.0.0.2", "prefill-decode"))
        seen = set()
        tap.ok(wait_for(lambda: seen.update(node.pairs()) or {(a, b), (b, a)} <= seen),
               "two of them: each prefills for the other", seen)
        tap.ok(seen <= {(a, b), (b, a), (a, None), (b, None)}, "or for itself, without the header", seen)
        stub.put("pods", llmd_pod("a", "10.0.0.1", "prefill"))
        tap.ok(wait_for(lambda: {d for d, _ in node.pairs()} == {b}), "one that only prefills is no destination any more")
        stub.put("pods", llmd_pod("b", "10.0.0.2", "decode"))
        tap.ok(wait_for(lambda: node.pairs() == {(b, a)}), "and the other one only decodes")
        stub.put("pods", llmd_pod("c", "10.0.0.3"))
        tap.ok(wait_for(lambda: node.pairs() == {(b, a), (c, a)}), "a pod without the label decodes")
        stub.put("pods", llmd_pod("b", "10.0.0.2", "encode"))
        tap.ok(wait_for(lambda: node.pairs() == {(c, a)}), "one that encodes does neither")
        stub.put("pods", llmd_pod("c", "10.0.0.3", "both"))
        stub.put("pods", llmd_pod("a", "10.0.0.1", ready=False))
        tap.ok(wait_for(lambda: node.pairs() == {(c, None)}), "the last one does all again")
        stub.put("pods", llmd_pod("c", "10.0.0.3", "prefill"))
        tap.ok(wait_for(lambda: node.pairs(1) == {"no decode endpoints available"}), "without who decodes: refused")
        tap.ok(wait_for(lambda: not node.roles_load() and not node.ids()), "no load and no booking is left")
        tap.same(node.ctl("check")[0], 0, "kvpickctl check finds no fault")
        node.proxy.close()
    stub.close()


def llmd_killed():
    """Discovery is killed between the commands for the two workers of one pod: the next one ends what it began."""
    stub, at = KubeStub(), "10.0.0.1:8000"
    stub.put("inferencepools", pool())
    with Points(kvpick_discovery=None) as points, Cluster(stub, Renderer(), **LLMD_ROLES) as node:
        def workers():
            return {w["role"]: int(w["worker_id"]) for w in node.table("workers")}

        def killed():
            return len(re.findall("child.ended role=discovery .* how=signal code=9", node.log_text()))

        def step(role, place, want):
            """The pod changes while nobody looks. The next process is killed at the place, the one after it lives."""
            was = killed()
            pid, = wait_for(lambda: node.children().get("kvpick-discovery"), 20)
            os.kill(pid, signal.SIGSTOP)
            stub.put("pods", llmd_pod("b", "10.0.0.1", role))
            points.arm("kvpick-discovery", place)
            os.kill(pid, signal.SIGKILL)
            name = f"relabelled to {role}, killed at {place}"
            tap.ok(wait_for(lambda: killed() == was + 2, 20), f"{name}: it was", node.log_text())
            tap.ok(wait_for(lambda: sorted(workers()) == want, 20), f"{name}: and is as it should be", workers())
            return workers()

        both = step("both", "discovery:sent:1", ["decode", "prefill"])
        for role, place, want in (
                ("encode", "discovery:sent:1", []), ("both", "discovery:kept:2", ["decode", "prefill"]),
                ("prefill", "discovery:sent:1", ["prefill"]), ("decode", "discovery:sent:1", ["decode"]),
                ("both", "discovery:sent:1", ["decode", "prefill"]), ("encode", "discovery:kept:2", []),
                ("both", "discovery:sent:1", ["decode", "prefill"])):
            got = step(role, place, want)
            if not tap.ok(sorted(got) == want and all(both[r] == got[r] for r in got), "under the ids of before", got):
                return
        node.proxy, node.fresh = node.envoy(), iter(range(1000, 1 << 30))
        tap.ok(wait_for(lambda: node.pairs(1) == {(at, None)}), "the pod serves in both roles", node.log_text())
        tap.same(node.ctl("check")[0], 0, "kvpickctl check finds no fault")
        node.proxy.close()
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


for test in (by_label, other_label, by_pool, llmd_labels, llmd_probes, llmd_serves, llmd_killed, ranks):
    if len(sys.argv) < 2 or test.__name__ in sys.argv[1:]:
        print(f"# {test.__name__}")
        test()
sys.exit(tap.done())
