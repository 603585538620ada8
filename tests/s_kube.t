#!/usr/bin/env python3
"""Workers and replicas from Kubernetes: a real node against an API server of ours (tests/lib/kube_stub.py). Numbers
such as 7.6 name the sections of the specification of the Endpoint Picker."""
import http.server
import os
import random
import signal
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from engine import Engine, stored, tokens  # noqa: E402
from envoy import Envoy  # noqa: E402
from epp import COMPLETIONS, MODEL, Epp, Renderer, prompt, routed  # noqa: E402
from kube_stub import KubeStub, endpoint_slice, old_pool, pod, pool  # noqa: E402
from node import BUILD, SLOW, Tap, free_port, wait_for  # noqa: E402

tap = Tap()
renderer = Renderer()
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"


def worker_id(name):
    """SipHash-1-3 over the name and 0xff, 53 bits: written down a second time, independently."""
    mask = (1 << 64) - 1
    data = name.encode() + b"\xff"
    v = [0x736f6d6570736575, 0x646f72616e646f6d, 0x6c7967656e657261, 0x7465646279746573]

    def rot(x, n):
        return (x << n | x >> (64 - n)) & mask

    def rounds(n):
        for _ in range(n):
            v[0] = (v[0] + v[1]) & mask
            v[2] = (v[2] + v[3]) & mask
            v[1], v[3] = rot(v[1], 13) ^ v[0], rot(v[3], 16) ^ v[2]
            v[0] = rot(v[0], 32)
            v[2] = (v[2] + v[1]) & mask
            v[0] = (v[0] + v[3]) & mask
            v[1], v[3] = rot(v[1], 17) ^ v[2], rot(v[3], 21) ^ v[0]
            v[2] = rot(v[2], 32)

    whole = len(data) // 8 * 8
    words = [int.from_bytes(data[i:i + 8], "little") for i in range(0, whole, 8)]
    words.append(int.from_bytes(data[whole:], "little") | (len(data) & 0xff) << 56)
    for w in words:
        v[3] ^= w
        rounds(1)
        v[0] ^= w
    v[2] ^= 0xff
    rounds(3)
    return (v[0] ^ v[1] ^ v[2] ^ v[3]) & 0x1fffffffffffff


class Cluster(Epp):
    """A node that finds its workers with the stub."""

    def __init__(self, stub, *args, env=None, events=False):
        self.stub = stub
        settings = {"KUBECONFIG": stub.kubeconfig(tokenFile=stub.account + "/token"), "POD_NAMESPACE": "ns",
                    "DYN_EPP_INFERENCE_POOL_NAME": "pool", "DYN_KV_CACHE_BLOCK_SIZE": "4",
                    "DYN_ROUTER_USE_KV_EVENTS": "true" if events else "false"}
        settings.update(env or {})
        super().__init__(renderer, *args, env=settings)
        for name in ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"):
            self.env.pop(name, None)

    def start(self):
        super().start()
        self.health = Envoy(f"127.0.0.1:{self.health_port}")
        self.proxy = self.envoy()
        self.fresh = iter(range(1000, 1 << 30))
        return self

    def __exit__(self, *exc):
        if exc[0]:
            print("# " + self.log_text()[-6000:].replace("\n", "\n# "))
        else:
            tap.same(self.ctl("check")[0], 0, "kvpickctl check finds no fault")
            tap.same(self.stop(), 0, "the node stops with exit code 0")
        self.proxy.close()
        self.health.close()
        super().__exit__(*exc)

    def workers(self):
        return {w["worker_id"]: w for w in self.call("GET", "/workers")[1]}

    def endpoints(self):
        return sorted(w["endpoint"] for w in self.workers().values() if w["lifecycle"] == "schedulable")

    def becomes(self, *addresses, name, seconds=10):
        want = sorted(f"http://{a}" for a in addresses)
        return tap.ok(wait_for(lambda: self.endpoints() == want, seconds), name, f"{self.endpoints()}\n{want}")

    def is_ready(self):
        return self.health.health("inference-extension") == SERVING

    def pick(self):
        """Where a new request is sent to; None = it is refused with 503."""
        s, head, _ = routed(self.proxy, COMPLETIONS, prompt(next(self.fresh), 2))
        s.reset()
        return head.destination if head.kind == "request_headers" else None if head.status == 503 else head.status

    def metric(self, name):
        text = self.call("GET", "/metrics")[1]
        return sum(float(line.split()[-1]) for line in text.splitlines()
                   if line.split(" ")[0].split("{")[0] == f"kvpick_{name}")

    def commands(self):
        """Commands that the indexer executed, once nothing changes any more."""
        last = [self.metric("indexer_command_executed_total")]
        wait_for(lambda: last.append(self.metric("indexer_command_executed_total")) or last[-1] == last[-2])
        return last[-1]


def cluster(*pods, pools=None, **kw):
    stub = KubeStub()
    for p in pools if pools is not None else [pool()]:
        stub.put("inferencepools", p)
    for p in pods:
        stub.put("pods", p)
    return stub, Cluster(stub, **kw)


def start_and_mapping():
    stub, node = cluster(pod("vllm-0", "10.0.0.1"), pod("vllm-1", "fd00::10"), pod("other", labels={"app": "db"}),
                         env={"DYN_EPP_MAX_NUM_BATCHED_TOKENS": "8192", "DYN_EPP_TOTAL_KV_BLOCKS": "1000",
                              "KVPICK_EPP_TAINT_LABELS": "zone"})
    with node:
        node.becomes("10.0.0.1:8000", "[fd00::10]:8000", name="7.5: ready pods of the pool are workers")
        tap.same(sorted(node.workers()), sorted([1943803597606491, 6550146066618770]), "7.4: ids of the pods' names")
        tap.same([worker_id("vllm-0"), worker_id("vllm-1")], [1943803597606491, 6550146066618770],
                 "7.4: as computed here")
        w = node.workers()[1943803597606491]
        tap.same({k: w[k] for k in ("model_name", "routing_group", "block_size", "data_parallel_size",
                                    "max_num_batched_tokens", "total_kv_blocks")},
                 {"model_name": MODEL, "routing_group": "default", "block_size": 4, "data_parallel_size": 1,
                  "max_num_batched_tokens": 8192, "total_kv_blocks": 1000}, "7.5: fields")
        tap.ok(wait_for(node.is_ready), "7.6: ready")
        tap.same({node.pick() for _ in range(30)}, {"10.0.0.1:8000", "[fd00::10]:8000"}, "requests go to both")
        seen = stub.seen()
        pods = [p for v, p in seen if v == "list" and p.startswith("/api/v1/namespaces/ns/pods?")]
        tap.ok(pods and all("limit=500" in p and "Selector" not in p for p in pods),
               "7.8: the pods of the namespace, in pages, without a selector", pods)
        pools = [p for v, p in seen if "inferencepools" in p]
        tap.ok(pools and all("fieldSelector=metadata.name%3Dpool" in p for p in pools),
               "7.8: the one pool by its name", pools)
        tap.ok(all("allowWatchBookmarks=true" in p and "timeoutSeconds=290" in p and "resourceVersion=1" in p
                   for v, p in seen if v == "watch"), "7.8: watches", seen)
        stub.put("pods", pod("vllm-0", "10.0.0.1", labels={"app": "engine", "zone": "b"}))
        tap.ok(wait_for(lambda: node.workers()[1943803597606491]["taints"] == ["zone=b"]), "labels that are taints")
    stub.close()


def pod_life():
    stub, node = cluster(pod("a", "10.0.0.1"), pod("b", "10.0.0.2"))
    with node:
        node.becomes("10.0.0.1:8000", "10.0.0.2:8000", name="two workers")
        stub.put("pods", pod("c", "10.0.0.3", ready=False))
        stub.put("pods", pod("d", "10.0.0.4"))
        node.becomes("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.4:8000", name="7.6: a pod that is added and ready")
        stub.put("pods", pod("c", "10.0.0.3"))
        node.becomes("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000", "10.0.0.4:8000",
                     name="7.3: one that becomes ready")
        stub.put("pods", pod("a", "10.0.0.1", ready=False))
        node.becomes("10.0.0.2:8000", "10.0.0.3:8000", "10.0.0.4:8000", name="7.3: one that no longer is")
        stub.put("pods", pod("b", "10.0.0.2", deleting=True))
        node.becomes("10.0.0.3:8000", "10.0.0.4:8000", name="7.3: one that is being deleted, though still ready")
        stub.put("pods", pod("c", "10.0.0.3", labels={"app": "other"}))
        node.becomes("10.0.0.4:8000", name="7.3: one whose label has changed")
        stub.put("pods", pod("d", "10.0.0.44"))
        node.becomes("10.0.0.44:8000", name="7.6: one whose address has changed")
        stub.put("pods", pod("d", ""))
        node.becomes(name="7.3: one without an address")
        stub.put("pods", pod("d", "host.example"))
        stub.put("pods", pod("e", "10.0.0.5"))
        node.becomes("10.0.0.5:8000", name="7.3: a name is no address")
        stub.delete("pods", "e")
        node.becomes(name="7.6: one that is deleted")
        tap.ok(node.is_ready(), "7.6: a valid pool without a worker is ready")
        tap.same(node.pick(), None, "and answers 503")
        stub.put("pods", pod("a", "10.0.0.1"))
        node.becomes("10.0.0.1:8000", name="back")
        done = node.commands()
        for i in range(20):
            p = pod("a", "10.0.0.1", labels={"app": "engine", "beat": str(i)})
            p["status"]["conditions"].append({"type": "Probed", "status": str(i)})
            stub.put("pods", p)
        stub.put("pods", pod("f", "10.0.0.6"))
        node.becomes("10.0.0.1:8000", "10.0.0.6:8000", name="and one more")
        tap.same(node.commands() - done, 1, "7.6: changes that do not matter are no commands")
        stub.put("pods", pod("a", "10.0.0.1", annotations={"inference.networking.k8s.io/active-ports": "9000"}))
        node.becomes("10.0.0.6:8000", name="7.2: a pod whose port is not active")
        stub.put("pods", pod("a", "10.0.0.1", annotations={"inference.networking.k8s.io/active-ports": "8000,9000"}))
        node.becomes("10.0.0.1:8000", "10.0.0.6:8000", name="7.2: and is again")
    stub.close()


def same_id():
    """Names with one id, found by trying: the older pod keeps it, whatever comes first; all others are left alone."""
    old, young = "pod-1a82622a5de2cd", "pod-160d2e3438f4a5"
    tap.same(worker_id(old), worker_id(young), "two names, one id")
    older = pod(old, "10.0.0.1", created="2026-01-01T00:00:00Z")
    younger = pod(young, "10.0.0.2", created="2026-01-01T00:00:01Z")
    stub, node = cluster(younger, pod("c", "10.0.0.3"), older)
    with node:
        node.becomes("10.0.0.1:8000", "10.0.0.3:8000", name="the younger of two is left out, the rest stands")
        tap.ok(wait_for(node.is_ready), "ready")
        stub.put("pods", pod(young, "10.0.0.22", created="2026-01-01T00:00:01Z"))
        stub.put("pods", pod("d", "10.0.0.4"))
        node.becomes("10.0.0.1:8000", "10.0.0.3:8000", "10.0.0.4:8000", name="and stays out while others come")
        stub.delete("pods", old)
        node.becomes("10.0.0.22:8000", "10.0.0.3:8000", "10.0.0.4:8000", name="the older one goes: the id is free")
        stub.put("pods", pod(old, "10.0.0.11", created="2026-01-02T00:00:00Z", ready=False))
        stub.put("pods", pod("d", "10.0.0.4", ready=False))
        node.becomes("10.0.0.22:8000", "10.0.0.3:8000", name="its successor is not ready: takes nothing away")
        stub.put("pods", pod(old, "10.0.0.11", created="2026-01-02T00:00:00Z"))
        stub.put("pods", pod("d", "10.0.0.4"))
        node.becomes("10.0.0.22:8000", "10.0.0.3:8000", "10.0.0.4:8000", name="nor as the younger one")
        tap.ok(node.metric("discovery_pod_id_taken_total") >= 2, "counted")
    stub.close()


def pool_life():
    stub, node = cluster(pod("a", "10.0.0.1"), pod("b", "10.0.0.2"), pod("c", "10.0.0.3", labels={"app": "new"}))
    with node:
        node.becomes("10.0.0.1:8000", "10.0.0.2:8000", name="two workers")
        tap.ok(wait_for(node.is_ready), "ready")
        lists = len(stub.seen("/pods", "list"))
        stub.put("inferencepools", pool(ports=(9000,)))
        node.becomes("10.0.0.1:9000", "10.0.0.2:9000", name="R04: another port of the pool counts", seconds=2)
        tap.same({node.pick() for _ in range(200)}, {"10.0.0.1:9000", "10.0.0.2:9000"}, "R04: 200 picks, no old port")
        stub.put("inferencepools", pool(ports=tuple(range(8000, 8008))))
        node.becomes("10.0.0.1:8000", "10.0.0.2:8000", name="eight ports: the first")
        stub.put("inferencepools", pool(ports=(8000,)))
        node.becomes("10.0.0.1:8000", "10.0.0.2:8000", name="one of them is left")
        stub.put("inferencepools", pool(labels={"app": "new"}))
        node.becomes("10.0.0.3:8000", name="7.1: another selector")
        tap.same(len(stub.seen("/pods", "list")), lists, "7.1: needs no new list of pods")
        for bad, what in ((pool(ports=(0,)), "port 0"), (pool(labels={}), "no label"),
                          (old_pool(), "the older form in the newer group"),
                          (pool(targetPorts=[]), "no port")):
            stub.put("inferencepools", bad)
            node.becomes(name=f"7.6: invalid ({what}): no workers at once", seconds=2)
            tap.ok(wait_for(lambda: not node.is_ready()), "and not ready")
            tap.same(node.pick(), None, "requests are refused")
            stub.put("inferencepools", pool(labels={"app": "new"}))
            node.becomes("10.0.0.3:8000", name="valid again")
            tap.ok(wait_for(node.is_ready), "and ready")
        stub.delete("inferencepools", "pool")
        node.becomes(name="7.6: a pool that is deleted fails closed", seconds=2)
        tap.ok(wait_for(lambda: not node.is_ready()), "and is not ready")
        stub.put("pods", pod("d", "10.0.0.4", labels={"app": "new"}))
        stub.put("inferencepools", pool(name="another"))
        time.sleep(0.2)
        tap.same(node.endpoints(), [], "pods without a pool are nothing, nor is another pool")
        stub.put("inferencepools", pool(labels={"app": "new"}))
        node.becomes("10.0.0.3:8000", "10.0.0.4:8000", name="the pool comes back: the pods of now")
        tap.ok(wait_for(node.is_ready), "ready")
        stub.forget("inferencepools", "pool")
        stub.cut_all()
        node.becomes(name="7.2: a deletion that was missed while nobody watched is noticed in the list")
        tap.ok(wait_for(lambda: not node.is_ready()), "and is not ready")
    stub.close()


def not_before_all_is_known():
    stub, node = cluster(pod("a", "10.0.0.1"))
    stub.page_max = 1
    stub.put("pods", pod("b", "10.0.0.2"))
    stub.fault("continue=", "list", times=1 << 30, status=500)
    with node:
        wait_for(lambda: len(stub.seen("continue=", "list")) >= 2)
        tap.same((node.endpoints(), node.is_ready()), ([], False), "7.6: half a list is none: no workers, not ready")
        stub.no_faults()
        node.becomes("10.0.0.1:8000", "10.0.0.2:8000", name="the whole list counts", seconds=20)
        tap.ok(wait_for(node.is_ready), "ready")
        # Later a list that does not come to its end changes nothing, and what a pool says meanwhile waits.
        stub.fault("continue=", "list", times=2, hang=0.5)
        stub.put("pods", pod("c", "10.0.0.3"))
        node.becomes("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000", name="one more")
        n = len(stub.seen("continue=", "list"))
        stub.gone_in_stream(stub.path("pods"))
        wait_for(lambda: len(stub.seen("continue=", "list")) > n)
        stub.put("inferencepools", pool(ports=(9000,)))
        node.becomes("10.0.0.1:9000", "10.0.0.2:9000", "10.0.0.3:9000", name="7.6: a pool that changed during a list",
                     seconds=20)
        stub.fault("continue=", "list", times=1 << 30, hang=0.5)
        n = len(stub.seen("continue=", "list"))
        stub.gone_in_stream(stub.path("pods"))
        wait_for(lambda: len(stub.seen("continue=", "list")) > n)
        tap.same(len(node.endpoints()), 3, "7.6: a list that does not end takes nothing away")
        stub.delete("inferencepools", "pool")
        node.becomes(name="7.6: but a pool that is gone counts also now", seconds=3)
        stub.no_faults()
        stub.put("inferencepools", pool())
        node.becomes("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000", name="and all is well in the end", seconds=20)
    stub.close()


def booked(node, wid, blocks=3):
    status, got = node.call("POST", "/select_and_reserve", {"token_ids": tokens(next(node.fresh), blocks),
                                                            "model_name": MODEL, "pinned_worker":
                                                            {"worker_id": wid, "dp_rank": 0}})
    if status != 200:
        raise RuntimeError(f"{status} {got}")
    return got["selection_id"]


def active(node, wid):
    """(requests, blocks) of a worker; None = it is not there."""
    for part in node.call("GET", "/loads")[1]:
        for r in part["loads"]:
            if r["worker_id"] == wid:
                return r["active_requests"], r["potential_decode_blocks"]
    return None


def loads_stay():
    """R28"""
    stub, node = cluster(pod("a", "10.0.0.1"), pod("b", "10.0.0.2"))
    with node:
        node.becomes("10.0.0.1:8000", "10.0.0.2:8000", name="two workers")
        wid = worker_id("a")
        for _ in range(10):
            booked(node, wid)
        want, seen, stop = active(node, wid), set(), threading.Event()
        tap.same(want[0], 10, "R28: ten bookings")

        def sample():
            while not stop.wait(0.01):
                seen.add(active(node, wid))
        sampler = threading.Thread(target=sample)
        sampler.start()
        done = node.metric("indexer_command_executed_total")
        lists = len(stub.seen("/pods", "list"))
        for i in range(100):
            stub.put("pods", pod("a", "10.0.0.1", labels={"app": "engine", "n": str(i)}))
            if i % 12 == 0:
                stub.gone_in_stream(stub.path("pods"))
                wait_for(lambda n=lists: len(stub.seen("/pods", "list")) > n)
                lists = len(stub.seen("/pods", "list"))
            if i % 10 == 0:
                stub.put("inferencepools", pool(labels={"app": "engine"}, ports=(8000,), n=i))
        stop.set()
        sampler.join()
        tap.same(seen, {want}, "R28: 100 changes of a label, 9 lists, 10 events of the pool: the load stays")
        tap.same(node.metric("indexer_command_executed_total"), done, "R28: and nothing was even sent to the indexer")
        stub.put("inferencepools", pool(ports=(8001,)))
        node.becomes("10.0.0.1:8001", "10.0.0.2:8001", name="another port")
        tap.same(active(node, wid), want, "keeps the bookings, too")
        tap.same(node.pick(), "10.0.0.2:8001", "R28: the next request goes to the other worker")
    stub.close()


def flaps():
    """R27"""
    stub, node = cluster(pod("a", "10.0.0.1"))
    with node:
        node.becomes("10.0.0.1:8000", name="one worker")
        wid = worker_id("a")
        first = booked(node, wid, 3)
        tap.same(active(node, wid)[0], 1, "R27: A is booked")
        stub.put("pods", pod("a", "10.0.0.1", ready=False))
        tap.ok(wait_for(lambda: active(node, wid) is None), "R27: the pod is not ready: its load is gone with it")
        stub.put("pods", pod("a", "10.0.0.1"))
        tap.ok(wait_for(lambda: active(node, wid) == (0, 0)), "R27: it returns with nothing", active(node, wid))
        second = booked(node, wid, 2)
        tap.same(active(node, wid), (1, 2), "R27: B is booked")
        tap.same(node.call("DELETE", f"/reservations/{first}")[0], 404, "R27: A can't be freed any more")
        tap.same(active(node, wid), (1, 2), "R27: nor does that change the load")
        node.call("DELETE", f"/reservations/{second}")
        tap.same(active(node, wid), (0, 0), "R27: B is freed, nothing is left")
        stub.put("pods", pod("a", "10.0.0.1", deleting=True))
        stub.put("pods", pod("z", "10.0.0.1"))
        tap.ok(wait_for(lambda: set(node.workers()) == {worker_id("z")}),
               "R27: the same address under another name, while the old pod is terminating", node.workers())
        tap.same(node.pick(), "10.0.0.1:8000", "R27: and requests go there")
        stub.delete("pods", "a")
        time.sleep(0.1)
        tap.same(set(node.workers()), {worker_id("z")}, "R27: the end of the old one changes nothing")
        rnd, held = random.Random(7), []
        for i in range(200):
            stub.put("pods", pod("z", "10.0.0.1", ready=bool(i % 2)))
            if rnd.random() < 0.5:
                got = node.call("POST", "/select_and_reserve", {"token_ids": tokens(next(node.fresh), 2),
                                                                "model_name": MODEL})
                held += [got[1]["selection_id"]] if got[0] == 200 else []
            if held and rnd.random() < 0.4:
                node.call("DELETE", f"/reservations/{held.pop(rnd.randrange(len(held)))}")
        tap.ok(wait_for(lambda: active(node, worker_id("z")) is not None), "R27: 200 changes later it is there")
        for r in held:
            node.call("DELETE", f"/reservations/{r}")
        tap.same(active(node, worker_id("z")), (0, 0), "R27: and nothing is left over")
    stub.close()


def events_start_anew():
    """R12"""
    engine = Engine()
    port, replay = engine.at.rsplit(":", 1)[1], engine.replay_at.rsplit(":", 1)[1]
    stub, node = cluster(pod("e", "127.0.0.1"), events=True,
                         env={"DYN_EPP_KV_EVENT_PORT": port, "DYN_EPP_KV_EVENT_REPLAY_PORT": replay})
    with node:
        node.becomes("127.0.0.1:8000", name="a worker with events")
        engine.subscribed()
        for i in range(10):
            engine.send(i, stored(5, i, i + 1))

        def overlap():
            got = node.call("POST", "/select", {"token_ids": tokens(5, 10), "model_name": MODEL})[1]
            return got["overlap"]["longest_matched"] // 4
        tap.ok(wait_for(lambda: overlap() == 10), "ten blocks are known", overlap())
        stub.put("pods", pod("e", "127.0.0.1", ready=False))
        node.becomes(name="it leaves")
        stub.put("pods", pod("e", "127.0.0.1"))
        node.becomes("127.0.0.1:8000", name="and returns")
        engine.subscribed()
        engine.send(10, stored(5, 10, 11))
        tap.same(engine.asked(1), 0, "R12: what it missed is asked for from the start")
        tap.ok(wait_for(lambda: overlap() == 10), "R12: the whole chain is known again", overlap())
    engine.close()
    stub.close()


def convergence():
    stub, node = cluster(pod("a", "10.0.0.1"), pod("b", "10.0.0.2"))
    with node:
        node.becomes("10.0.0.1:8000", "10.0.0.2:8000", name="two workers")
        a, b = worker_id("a"), worker_id("b")
        node.call("POST", "/workers", {"worker_id": 77, "endpoint": "http://10.0.0.77:1", "block_size": 4})
        node.call("DELETE", f"/workers/{a}")
        node.call("PATCH", f"/workers/{b}", {"endpoint": "http://10.9.9.9:1"})
        node.becomes("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.77:1",
                     name="7.7: what others delete or change is put right", seconds=15)
        tap.ok(node.metric("discovery_worker_strayed_total") >= 2, "and counted")
        os.kill(node.children()["kvpick-indexer"][0], signal.SIGKILL)
        stub.put("pods", pod("c", "10.0.0.3"))
        node.becomes("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000", "10.0.0.77:1",
                     name="an indexer that dies meanwhile", seconds=20)
        pid, = node.children()["kvpick-discovery"]
        os.kill(pid, signal.SIGSTOP)
        stub.delete("pods", "a")
        stub.put("pods", pod("d", "10.0.0.4"))
        os.kill(pid, signal.SIGKILL)
        node.becomes("10.0.0.2:8000", "10.0.0.3:8000", "10.0.0.4:8000", "10.0.0.77:1", seconds=20,
                     name="killed: the next process finishes its predecessor's work, and leaves others' workers alone")
        tap.ok(node.is_ready(), "ready all the time")
        # Another block size than the partition has: incomplete, asked again, and no harm to the others.
        node.call("POST", "/workers", {"worker_id": 5, "endpoint": "http://10.0.0.5:1", "block_size": 8,
                                       "model_name": MODEL})
        tap.same(node.workers()[5]["lifecycle"], "incomplete", "one of another block size")
    stub.close()


def api_away():
    stub, node = cluster(pod("a", "10.0.0.1"), pod("b", "10.0.0.2"))
    with node:
        node.becomes("10.0.0.1:8000", "10.0.0.2:8000", name="two workers")
        tap.ok(wait_for(node.is_ready), "ready")
        stub.stop()
        seconds = 300 if os.environ.get("KVP_LONG") == "1" else 2
        end, picks, unready = time.monotonic() + seconds, [], 0
        while time.monotonic() < end:
            picks.append(node.pick())
            unready += len(picks) % 50 == 0 and not node.is_ready()
            time.sleep(0.01)
        print(f"# the API server was away for {seconds} s, in which {len(picks)} requests were picked")
        tap.same(set(picks), {"10.0.0.1:8000", "10.0.0.2:8000"}, "7.6: the API server is away: routing goes on all the time")
        tap.same(unready, 0, "and at no time is it not ready")
        tap.ok(node.is_ready() and node.metric("discovery_kube_watching") == 0, "nothing is watched")
        tap.ok(node.metric("discovery_kube_trouble_total") >= 2, "what fails is counted")
        tap.ok("discovery.api" in node.log_text(), "and logged")
        stub.delete("pods", "a")
        stub.put("pods", pod("c", "10.0.0.3"))
        stub.compact()
        stub.start()
        node.becomes("10.0.0.2:8000", "10.0.0.3:8000", name="it comes back, without its history: converged", seconds=40)
        tap.ok(wait_for(lambda: node.metric("discovery_kube_watching") == 2), "watching again")
        stub.write_token("second")
        stub.tokens = {"second"}
        stub.cut_all()
        stub.put("pods", pod("d", "10.0.0.4"))
        node.becomes("10.0.0.2:8000", "10.0.0.3:8000", "10.0.0.4:8000", name="7.8: a rotated token")
        for i in range(3):
            stub.fault("pods", "watch", cut=i * 400)
            stub.cut_all()
            stub.put("pods", pod("d", f"10.0.0.{50 + i}"))
            node.becomes("10.0.0.2:8000", "10.0.0.3:8000", f"10.0.0.{50 + i}:8000", name=f"a watch that is cut, {i}")
    stub.close()


def rights():
    stub, node = cluster(pod("a", "10.0.0.1"))
    text = 'pods is forbidden: User "system:serviceaccount:ns:epp" cannot list resource "pods"'
    stub.fault("/pods", "list", times=2, status=403, message=text)
    with node:
        tap.ok(wait_for(lambda: "cannot list resource" in node.log_text()), "7.8: 403 is logged with its reason")
        tap.ok("trouble=forbidden" in node.log_text() and "lacks get, list or watch" in node.log_text(),
               "and with what to do")
        node.becomes("10.0.0.1:8000", name="and tried again", seconds=20)
        tap.ok(node.metric("discovery_kube_forbidden_total") >= 1, "counted")
    stub.close()


def older_group():
    stub, node = cluster(pod("a", "10.0.0.1"), pools=[])
    stub.served = {stub.path("pods"), stub.old_pools()}
    stub.put("inferencepools", old_pool(port=8100), at=stub.old_pools())
    with node:
        node.becomes("10.0.0.1:8100", name="a pool of the older group, where the newer one is not served")
        tap.ok(wait_for(node.is_ready), "ready")
        stub.delete("inferencepools", "pool", at=stub.old_pools())
        node.becomes(name="deleted")
        tap.ok(wait_for(lambda: not node.is_ready()), "not ready")
    stub.close()


def no_pool_yet():
    stub, node = cluster(pod("a", "10.0.0.1"), pools=[])
    with node:
        tap.ok(wait_for(lambda: "there is no such pool" in node.log_text()), "a pool that is not there is told")
        tap.same((node.is_ready(), node.endpoints(), node.pick()), (False, [], None), "and nothing is ready")
        stub.put("inferencepools", pool())
        node.becomes("10.0.0.1:8000", name="until it comes")
        tap.ok(wait_for(node.is_ready), "then it is")
    stub.close()


def wrong_settings():
    base = {"KVPICK_MODE": "epp", "DYN_MODEL_NAME": MODEL, "DYN_EPP_TOKENIZER_PROTOCOL": "vllm-render",
            "DYN_EPP_TOKENIZER_SERVICE_URL": renderer.url, "DYN_EPP_INFERENCE_POOL_NAME": "pool",
            "POD_NAMESPACE": "ns", "DYN_KV_CACHE_BLOCK_SIZE": "4", "KVPICK_EPP_PORT": str(free_port()),
            "KVPICK_EPP_HEALTH_PORT": str(free_port()), "DYN_EPP_METRICS_PORT": "0"}
    stub, node = cluster()
    cases = [({}, "KUBECONFIG", "no API server"), ({"KUBECONFIG": "/no/such/file"}, "No such file", "no such kubeconfig"),
             ({"KUBERNETES_SERVICE_HOST": "127.0.0.1"}, "service account", "no service account"),
             ({"KUBECONFIG": "x", "POD_NAMESPACE": "ns/../x"}, "POD_NAMESPACE", "a namespace that is no name"),
             ({"KUBECONFIG": "x", "DYN_EPP_INFERENCE_POOL_NAME": "p&x"}, "DYN_EPP_INFERENCE_POOL_NAME", "nor a pool"),
             ({"DYN_KUBE_DISCOVERY_MODE": "container", "KUBECONFIG": "x"}, "DYN_KUBE_DISCOVERY_MODE", "7.3: container"),
             ({"DYN_EPP_PEER_SERVICE": "epp", "KUBECONFIG": "x"}, "POD_IP", "8.1: a peer service without POD_IP")]
    for more, text, name in cases:
        env = {k: v for k, v in node.env.items() if not k.startswith(("DYN_", "KVPICK_", "POD_", "KUBE"))}
        done = subprocess.run([f"{BUILD}/kvpick", "run", *node.args], env={**env, **base, **more},
                              capture_output=True, text=True, timeout=60, check=False)
        tap.ok(done.returncode == 2 and text in done.stderr, f"a start-up error: {name}",
               (done.returncode, done.stderr[-600:]))
    node.dir.cleanup()
    stub.close()


def replicas():
    sync, dump = free_port(), free_port()
    env = {"DYN_EPP_PEER_SERVICE": "epp", "POD_IP": "127.0.0.1", "DYN_EPP_REPLICA_SYNC_PORT": str(sync)}
    stub, node = cluster(pod("a", "10.0.0.1"), env=env)
    down = subprocess.run([f"{BUILD}/kvpick", "run", *node.args], env=node.env, capture_output=True, text=True,
                          timeout=60, check=False)
    tap.ok(down.returncode == 2 and "DYN_EPP_PEER_SERVICE=epp" in down.stderr and "not found" in down.stderr,
           "8.1: without its Service the node does not start", (down.returncode, down.stderr[-600:]))
    stub.put("services", {"metadata": {"name": "epp"}, "spec": {}})
    up, down = {"ready": True}, {"ready": False}
    stub.put("endpointslices", endpoint_slice("s1", "epp", [("127.0.0.1", up), ("127.0.0.2", up), ("127.0.0.3", down)]))
    stub.put("endpointslices", endpoint_slice("s2", "epp", [("127.0.0.4", None), ("127.0.0.2", up)]))
    stub.put("endpointslices", endpoint_slice("s3", "other", [("127.0.0.9", up)]))
    stub.put("endpointslices", endpoint_slice("s4", "epp", [("::1", up)], family="IPv6"))
    stub.put("endpointslices", endpoint_slice("s5", "epp", [("a.b", up)], family="FQDN"))

    def members():
        return sorted(int(p.rsplit(":", 1)[0].rsplit(".", 1)[1]) for p in node.call("GET", "/replica_sync/peers")[1]
                      if p.endswith(f":{sync}") and p != named)
    named = f"tcp://localhost:{sync}"
    with node:
        tap.ok(wait_for(lambda: members() == [2, 3, 4]),
               "8.1: members whatever their conditions; not ourselves, not the other family, each once", members())
        stub.put("endpointslices", endpoint_slice("s1", "epp", [("127.0.0.3", {"ready": False, "terminating": True}),
                                                               ("127.0.0.5", up)]))
        tap.ok(wait_for(lambda: members() == [2, 3, 4, 5]), "8.1: one that ends stays until it leaves the slice", members())
        node.call("POST", "/replica_sync/register_peer", {"endpoint": "tcp://127.0.0.77:5"})
        stub.delete("endpointslices", "s2")
        tap.ok(wait_for(lambda: members() == [3, 5]), "8.1: with its slice a replica goes", members())
        tap.ok("tcp://127.0.0.77:5" in node.call("GET", "/replica_sync/peers")[1], "what others registered stays")
        stub.forget("endpointslices", "s1")
        stub.put("endpointslices", endpoint_slice("s6", "epp", [("127.0.0.6", up)]))
        stub.gone_in_stream(stub.path("endpointslices"))
        tap.ok(wait_for(lambda: members() == [6]), "8.1: missed changes are noticed in the list", members())
        pid, = node.children()["kvpick-discovery"]
        os.kill(pid, signal.SIGSTOP)
        node.call("POST", "/replica_sync/register_peer", {"endpoint": named})
        stub.put("endpointslices", endpoint_slice("s6", "epp", [("127.0.0.8", up)]))
        os.kill(pid, signal.SIGKILL)
        tap.ok(wait_for(lambda: members() == [8], 20), "killed: the next process drops its predecessor's members", members())
        tap.ok(named in node.call("GET", "/replica_sync/peers")[1], "and no name, which slices do not give")
        stub.delete("services", "epp")
        stub.put("endpointslices", endpoint_slice("s6", "epp", []))
        tap.ok(wait_for(lambda: members() == []), "a Service that goes later does not end the node", members())
    stub.close()


def sources():
    """Replicas that serve are asked for the index; until one has delivered, or there is none, nothing is ready."""
    sync, dump = free_port(), free_port()
    env = {"DYN_EPP_PEER_SERVICE": "epp", "POD_IP": "127.0.0.1", "DYN_EPP_REPLICA_SYNC_PORT": str(sync),
           "DYN_EPP_SELECTION_HTTP_PORT": str(dump), "DYN_EPP_KV_EVENT_PORT": str(free_port())}
    stub, node = cluster(pod("a", "127.0.0.1"), env=env, events=True)
    stub.put("services", {"metadata": {"name": "epp"}, "spec": {}})
    starting, serving = {"ready": False}, {"ready": True, "serving": True}
    ending = {"ready": True, "serving": True, "terminating": True}
    stub.put("endpointslices", endpoint_slice("s", "epp", [("127.0.0.1", serving), ("127.0.0.2", serving),
                                                          ("127.0.0.3", starting), ("127.0.0.4", ending)]))
    with node:
        tap.ok(wait_for(lambda: node.metric("discovery_peer_members") == 3), "8.2: three replicas are members")
        tap.same(node.metric("discovery_peer_sources"), 1, "8.2: of which one, that serves, is a source")
        tap.ok(wait_for(lambda: node.workers()), "workers are known")
        time.sleep(0.5)
        tap.same(node.is_ready(), False, "8.2: a source that does not deliver keeps the node from being ready")
        stub.put("endpointslices", endpoint_slice("s", "epp", [("127.0.0.1", serving), ("127.0.0.3", starting)]))
        tap.ok(wait_for(node.is_ready), "8.2: when it is gone the node begins with an empty index")
        tap.same(node.metric("discovery_peer_sources"), 0, "8.2: who only starts is no source")
    stub.close()


class Asked(http.server.ThreadingHTTPServer):
    """An engine that tells of itself. What it says can be changed."""
    daemon_threads = True

    def __init__(self, port=0):
        outer = self
        self.seen, self.size, self.blocks, self.model, self.healthy = [], 4, 1234, MODEL, True

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                outer.seen.append(self.path)
                text = {"/health": "", "/v1/models": '{"data":[{"id":"%s"}]}' % outer.model,
                        "/metrics": 'vllm:cache_config_info{block_size="%d",num_gpu_blocks="%d"} 1\n'
                                    % (outer.size, outer.blocks)}.get(self.path, "").encode()
                self.send_response(200 if outer.healthy else 503)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_):
                pass
        super().__init__(("127.0.0.1", port), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


def engines_are_asked():
    engine = Asked()
    port = engine.server_address[1]
    stub, node = cluster(pod("a", "127.0.0.1"), pools=[pool(ports=(port,))],
                         env={"KVPICK_EPP_PROBE_ENGINES": "true"})
    with node:
        a = worker_id("a")
        tap.ok(wait_for(lambda: node.workers().get(a, {}).get("total_kv_blocks") == 1234),
               "an engine is asked for its capacity", node.workers())
        tap.same(engine.seen, ["/health", "/v1/models", "/metrics"], "once")
        stub.put("pods", pod("a", "127.0.0.1", labels={"app": "engine", "x": "y"}))
        stub.gone_in_stream(stub.path("pods"))
        stub.put("pods", pod("b", "127.0.0.1"))
        tap.ok(wait_for(lambda: node.workers().get(worker_id("b"), {}).get("total_kv_blocks") == 1234), "another pod")
        tap.same(len(engine.seen), 6, "whom nothing was asked again that is known")
        engine.size, engine.model = 8, "else"
        stub.put("pods", pod("a", "127.0.0.1", ready=False))
        tap.ok(wait_for(lambda: a not in node.workers()), "gone")
        stub.put("pods", pod("a", "127.0.0.1"))
        tap.ok(wait_for(lambda: node.workers().get(a, {}).get("lifecycle") == "incomplete"),
               "R13: an engine with another block size is never chosen", node.workers())
        tap.ok("another block size" in node.log_text(), "and told")
        tap.ok(node.metric("discovery_probe_unlike_total") == 1, "and counted")
        engine.healthy = False
        stub.put("pods", pod("c", "127.0.0.1"))
        tap.ok(wait_for(lambda: node.metric("discovery_probe_failed_total") >= 1), "one that does not answer well")
        tap.same(node.workers()[worker_id("c")]["total_kv_blocks"], None, "is what the settings say")
    engine.shutdown()
    engine.server_close()
    stub.close()


def legs(node):
    """(destination, prefiller) of a new request; None = it is refused with 503."""
    s, head, _ = routed(node.proxy, COMPLETIONS, prompt(next(node.fresh), 2))
    s.reset()
    if head.kind != "request_headers":
        return None if head.status == 503 else head.status
    return head.destination, head.set.get("x-prefiller-host-port")


def two_roles():
    """Prefill and decode workers, by label and by pool: both legs of a request go where Kubernetes says."""
    role = "nvidia.com/role"
    stub, node = cluster(pod("p", "10.0.0.1", labels={"app": "engine", role: "prefill"}),
                         pod("d", "10.0.0.2", labels={"app": "engine", role: "decode"}),
                         env={"DYN_EPP_TOPOLOGY_MODE": "disaggregated"})
    with node:
        tap.ok(wait_for(node.is_ready), "ready")
        tap.same(legs(node), ("10.0.0.2:8000", "10.0.0.1:8000"), "roles by label: two legs")
        stub.put("pods", pod("p", "10.0.0.1", ready=False, labels={"app": "engine", role: "prefill"}))
        tap.ok(wait_for(lambda: legs(node) is None), "without a prefill worker requests are refused")
        tap.ok(node.is_ready(), "and the node stays ready")
        stub.put("pods", pod("q", "10.0.0.3", labels={"app": "engine", role: "prefill"}))
        tap.ok(wait_for(lambda: legs(node) == ("10.0.0.2:8000", "10.0.0.3:8000")), "another one")
        stub.put("pods", pod("d", "10.0.0.2", labels={"app": "engine", role: "prefill"}))
        stub.put("pods", pod("q", "10.0.0.3", labels={"app": "engine", role: "decode"}))
        tap.ok(wait_for(lambda: legs(node) == ("10.0.0.3:8000", "10.0.0.2:8000")), "they change their roles")
    stub.close()
    stub, node = cluster(pod("p", "10.0.0.1", labels={"kind": "p"}), pod("d", "10.0.0.2"),
                         pools=[pool(), pool("pre", ports=(9000,), labels={"kind": "p"})],
                         env={"DYN_EPP_PREFILL_INFERENCE_POOL_NAME": "pre"})
    with node:
        tap.ok(wait_for(node.is_ready), "ready")
        tap.same(legs(node), ("10.0.0.2:8000", "10.0.0.1:9000"), "roles by pool: two legs, each with its port")
        stub.delete("inferencepools", "pre")
        tap.ok(wait_for(lambda: not node.is_ready() and legs(node) is None), "without the second pool: not ready, refused")
    stub.close()


def in_a_container():
    """The system calls that a container allows are enough for discovery."""
    profile = "deploy/kubernetes/seccomp/kvpick.json"
    stub, node = cluster(pod("a", "10.0.0.1"), env={"ASAN_OPTIONS": "detect_leaks=0"})
    lib = os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib")
    node.before = [sys.executable, os.path.join(lib, "seccomp.py"), profile, ""]
    with node:
        node.becomes("10.0.0.1:8000", name="workers under the profile of system calls")
        stub.put("pods", pod("b", "10.0.0.2"))
        node.becomes("10.0.0.1:8000", "10.0.0.2:8000", name="and one more")
    stub.close()


def churn():
    """A rolling restart of all pods while requests are picked: none goes to a pod that left Ready long ago."""
    many = int(os.environ.get("KVP_KUBE_PODS", "5000" if os.environ.get("KVP_LONG") else "300"))
    names = [f"engine-{i}" for i in range(many)]

    def address(i, life):
        return f"10.{life}.{i // 250}.{i % 250}"
    stub = KubeStub()
    stub.put("inferencepools", pool())
    for i, name in enumerate(names):
        stub.put("pods", pod(name, address(i, 0)))
    node = Cluster(stub, "--max-ranks", str(2 * many))
    began = time.monotonic()
    with node:
        tap.ok(wait_for(lambda: node.metric("indexer_catalogue_schedulable") == many, 60),
               f"{many} pods are workers", node.metric("indexer_catalogue_schedulable"))
        print(f"# {many} pods: all schedulable {time.monotonic() - began:.2f} s after the start of the node")
        tap.ok(wait_for(node.is_ready), "ready")
        left, picks, stop, stale = {}, [0], threading.Event(), []

        def ask(envoy):
            while not stop.is_set():
                s, head, _ = routed(envoy, COMPLETIONS, prompt(next(node.fresh), 1))
                now = time.monotonic()
                s.reset()
                if head.kind == "request_headers":
                    picks[0] += 1
                    gone = left.get(head.destination)
                    if gone and now - gone > 1.0 * SLOW:
                        stale.append((head.destination, now - gone))
        envoys = [node.envoy() for _ in range(2)]
        threads = [threading.Thread(target=ask, args=(e,)) for e in envoys]
        for t in threads:
            t.start()
        pid, = node.children()["kvpick-discovery"]
        cpu, start = ticks(pid), time.monotonic()
        for first in range(0, many, max(many // 20, 1)):
            batch = range(first, min(first + max(many // 20, 1), many))
            for i in batch:
                stub.put("pods", pod(names[i], address(i, 0), ready=False))
                left[f"{address(i, 0)}:8000"] = time.monotonic()
            for i in batch:
                stub.put("pods", pod(names[i], address(i, 0), ready=False, deleting=True))
                stub.delete("pods", names[i])
                stub.put("pods", pod(names[i], "", ready=False))
                stub.put("pods", pod(names[i], address(i, 1)))
            time.sleep(0.05)
        want = sorted(f"http://{address(i, 1)}:8000" for i in range(many))
        tap.ok(wait_for(lambda: node.metric("indexer_catalogue_schedulable") == many and node.endpoints() == want, 60),
               "all of them were restarted, all are workers at their new addresses")
        took = time.monotonic() - start
        time.sleep(1.2)
        stop.set()
        for t in threads:
            t.join()
        tap.ok(picks[0] > 50, f"{picks[0]} requests were picked meanwhile")
        tap.same(stale, [], "none was sent to a pod that had left Ready more than 1 s before")
        with open(f"/proc/{pid}/status", encoding="ascii") as f:
            rss = next(line.split()[1] for line in f if line.startswith("VmRSS"))
        print(f"# restart of {many} pods in {took:.2f} s: kvpick-discovery used "
              f"{(ticks(pid) - cpu) / os.sysconf('SC_CLK_TCK'):.2f} s of CPU, has {int(rss) // 1024} MiB")
        for e in envoys:
            e.close()
        with stub.lock:
            for i in range(many):
                stub.put("pods", pod(names[i], address(i, 1), ready=False))
        start = time.monotonic()
        tap.ok(wait_for(lambda: not node.metric("indexer_catalogue_schedulable"), 60), "all leave Ready at once: none is left")
        print(f"# {many} pods not ready at once: none is a worker after {time.monotonic() - start:.2f} s")
    stub.close()


def ticks(pid):
    with open(f"/proc/{pid}/stat", encoding="ascii") as f:
        part = f.read().rsplit(")", 1)[1].split()
    return int(part[11]) + int(part[12])


TESTS = (start_and_mapping, pod_life, same_id, pool_life, not_before_all_is_known, loads_stay, flaps, events_start_anew,
         convergence, api_away, rights, older_group, no_pool_yet, wrong_settings, replicas, sources, engines_are_asked, two_roles, in_a_container, churn)
chosen = sys.argv[1:]
for test in TESTS:
    if chosen and test.__name__ not in chosen:
        continue
    begin = time.monotonic()
    test()
    print(f"# {test.__name__}: {time.monotonic() - begin:.1f} s")
sys.exit(tap.done())
