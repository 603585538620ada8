#!/usr/bin/env python3
"""Lists and watches against an API server that misbehaves: pages, bookmarks, 410, cuts, drips, repeated and late
events, rotated tokens, refusals. What the reflector holds is compared with what the server holds, after each."""
import json
import os
import queue
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from kube_stub import KubeStub  # noqa: E402
from node import BUILD, SLOW, Tap, wait_for  # noqa: E402

tap = Tap()


def thing(name, v="", **spec):
    return {"metadata": {"name": name}, "spec": dict({"v": v}, **spec)}


class Reflector:
    """h_kube under our eyes: `now` is what it holds, put together from its changes only."""

    def __init__(self, stub, **args):
        args = {"url": stub.url, "account": stub.account, "path": stub.path("pods"), "backoff_ms": 20,
                "backoff_max_ms": 200, "gap_ms": 1000, **args}
        self.proc = subprocess.Popen([f"{BUILD}/tests/helpers/h_kube", *(f"{k}={v}" for k, v in args.items()
                                                                        if v is not None)],
                                     stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.now, self.said, self.troubles, self.synced, self.answers = {}, [], [], 0, queue.Queue()
        self.wrong = []
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.proc.stdout:
            what, a, b, c = (json.loads(line) + [None] * 3)[:4]
            if what == "change":
                if self.now.get(a) != b:
                    self.wrong.append((a, b, self.now.get(a)))
                if c is None:
                    del self.now[a]
                else:
                    self.now[a] = c
                self.said.append((a, b, c))
            elif what == "synced":
                self.synced += 1
                if int(a) != len(self.now):
                    self.wrong.append(("synced", a, len(self.now)))
            elif what == "trouble":
                self.troubles.append((a, b, c))
            else:
                self.answers.put((what, a, b, c))

    def tell(self, text):
        self.proc.stdin.write(text + "\n")
        self.proc.stdin.flush()

    def stat(self):
        self.tell("stat")
        return self.answers.get(timeout=20 * SLOW)[1]

    def has(self, want, name):
        tap.ok(wait_for(lambda: self.now == want), name, f"got {self.now}\nwant {want}")

    def watches(self):
        return wait_for(lambda: self.stat()["watching"])

    def trouble(self, kind):
        return [t for t in self.troubles if t[0] == kind]

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.tell("quit")
        code = self.proc.wait(20 * SLOW)
        tap.ok(code == 0 and not self.wrong, "it ends well, and every change named what was there before",
               (code, self.wrong))


def held(stub, kind="pods"):
    return {n: o["spec"]["v"] for n, o in stub.objects.get(stub.path(kind), {}).items()}


def list_and_watch():
    stub = KubeStub()
    for i in range(7):
        stub.put("pods", thing(f"p{i}", str(i)))
    with Reflector(stub, page=3) as r:
        r.has(held(stub), "pages of a list come together to the whole")
        tap.same(len(stub.seen("limit=3", "list")), 3, "seven objects are three pages of three")
        tap.ok(r.watches(), "the watch is open")
        _, path = stub.seen(verb="watch")[-1]
        for part in ("allowWatchBookmarks=true", "timeoutSeconds=290", f"resourceVersion={stub.rv}"):
            tap.ok(part in path, f"the watch asks for {part}", path)
        stub.put("pods", thing("p8", "new"))
        stub.put("pods", thing("p0", "changed"))
        stub.delete("pods", "p1")
        r.has(held(stub), "added, modified, deleted")
        said = len(r.said)
        stub.put("pods", thing("p0", "changed"))
        stub.put("pods", thing("p9", "last"))
        r.has(held(stub), "and one more")
        tap.same(r.said[said:], [("p9", None, "last")], "an equal object is no change")
        stub.put("pods", thing("bad", "x", bad=1))
        stub.put("pods", thing("p9", "again"))
        want = held(stub)
        del want["bad"]
        r.has(want, "an object that can't be used is as good as none")
        stub.put("pods", thing("p9", "x", bad=1))
        del want["p9"]
        r.has(want, "one that becomes so goes")
    stub.close()


def partial_pages():
    stub = KubeStub()
    for i in range(10):
        stub.put("pods", thing(f"p{i}", "a" * 500))
    with Reflector(stub, page=4) as r:
        r.has(held(stub), "complete at first")
        for what, fault in (("cut in the middle", {"cut": 700}), ("of which the second is an error",
                            {"status": 500}), ("that is no list", {"body": b'{"kind":"Status"}'}),
                           ("without items", {"body": b'{"kind":"PodList","metadata":{"resourceVersion":"9"}}'}),
                           ("that is half an object", {"body": b'{"kind":"PodList","items":['}),
                           ("that is empty", {"body": b""}), ("that is an empty object", {"body": b"{}"})):
            synced, said = r.synced, len(r.said)
            stub.fault("continue=", "list", **fault)
            r.tell("relist")
            tap.ok(wait_for(lambda s=synced: r.synced == s + 1), f"a page {what}: listed anew")
            tap.same(r.said[said:], [], f"a page {what}: nothing reached the user")
        stub.fault("limit=", "list", body=b'{"kind":"PodList","metadata":{"resourceVersion":"2000"},"items":null}')
        r.tell("relist")
        tap.ok(wait_for(lambda: not r.now), "a list whose items are null is an empty one")
        r.tell("relist")
        r.has(held(stub), "and the next has them all")
    stub.close()


def too_old():
    stub = KubeStub()
    for i in range(9):
        stub.put("pods", thing(f"p{i}", str(i)))
    with Reflector(stub, page=4) as r:
        r.has(held(stub), "listed")
        tap.ok(r.watches(), "watching")
        stub.forget("pods", "p3")
        stub.put("pods", thing("p1", "while nobody looked"))
        stub.gone_in_stream(stub.path("pods"))
        r.has(held(stub), "410 in the stream: listed anew, what is missing from the list is deleted")
        tap.ok(r.watches(), "watching")
        stub.forget("pods", "p4")
        stub.cut_all()
        r.has(held(stub), "410 as the answer to a watch: the same")
        tap.ok(r.stat()["gone"] >= 2, "both are counted", r.stat())
        stub.fault("continue=", "list", status=410)
        r.tell("relist")
        n = r.synced
        tap.ok(wait_for(lambda: r.synced > n), "410 between two pages: listed from the start")
        stub.fault("continue=", "list", times=3, status=410)
        n = r.synced
        r.tell("relist")
        tap.ok(wait_for(lambda: r.synced > n), "again and again: at last without pages")
        r.has(held(stub), "and nothing is lost")
        stub.fault("watch=true", "watch", error=410)
        stub.cut_all()
        tap.ok(r.watches() and r.stat()["gone"], "an ERROR event as the first thing of a watch")
        stub.fault("watch=true", "watch", error=500)
        stub.cut_all()
        tap.ok(wait_for(lambda: any("as asked for" in (t[2] or "") for t in r.trouble("status"))),
               "another error in a stream is told", r.troubles)
        stub.put("pods", thing("p1", "after it"))
        r.has(held(stub), "and watching goes on from where it was")
    stub.close()


def versions():
    stub = KubeStub()
    stub.put("pods", thing("a", "1"))
    with Reflector(stub) as r:
        r.has(held(stub), "listed")
        tap.ok(r.watches(), "watching")
        stub.compact()  # the list's version is too old now, the bookmark's is not
        stub.bookmark("pods")
        tap.ok(wait_for(lambda: r.stat()["bookmarks"] == 1), "a bookmark")
        lists = r.stat()["lists"]
        stub.cut_all()
        stub.put("pods", thing("b", "2"))
        r.has(held(stub), "after a cut it goes on from the bookmark")
        tap.same(r.stat()["lists"], lists, "without a list")
        tap.ok(f"resourceVersion={stub.rv - 1}&" in stub.seen(verb="watch")[-1][1], "at the version it named",
               stub.seen(verb="watch")[-1])
        stub.watch_limit_s = 0.05
        stub.cut_all()
        for i in range(4):
            stub.put("pods", thing("b", f"short {i}"))
            r.has(held(stub), f"watches that the server ends soon, {i}")
        stub.watch_limit_s = None
        n = len(stub.seen())
        tap.ok(n < 60, "do not make it ask without a pause", n)
    stub.close()


def twice_and_late():
    stub = KubeStub()
    path = stub.path("pods")
    stub.put("pods", thing("a", "1"))
    with Reflector(stub) as r:
        r.has(held(stub), "listed")
        tap.ok(r.watches(), "watching")
        stub.put("pods", thing("a", "2"))
        stub.put("pods", thing("b", "1"))
        r.has(held(stub), "two events")
        said = len(r.said)
        obj = dict(stub.objects[path]["b"])
        stub.send_raw(path, {"type": "ADDED", "object": obj})
        stub.send_raw(path, {"type": "MODIFIED", "object": obj})
        stub.put("pods", thing("c", "1"))
        r.has(held(stub), "the last event twice more")
        tap.same((r.said[said:], r.stat()["repeated"]), ([("c", None, "1")], 2), "is no change and counted")
        stub.delete("pods", "b")
        r.has(held(stub), "deleted")
        said, lists = len(r.said), r.stat()["lists"]
        stub.send_raw(path, {"type": "MODIFIED", "object": obj})  # it had been overtaken
        tap.ok(wait_for(lambda: r.stat()["late"] == 1), "an event that comes after a newer one is late")
        stub.put("pods", thing("d", "1"))
        r.has(held(stub), "it does not bring the deleted object back")
        tap.same(r.said[said:], [("d", None, "1")], "not for a moment")
        tap.ok(wait_for(lambda: r.stat()["lists"] == lists + 1, 15), "in doubt everything is listed anew", r.stat())
        tap.ok(r.watches(), "watching")
        stub.send_raw(path, b'{"type":"ADDED","object":{"metadata":{"name":"x"}}}\n')
        tap.ok(wait_for(lambda: r.stat()["lists"] == lists + 2), "an event without a version: listed anew")
        tap.ok(r.watches(), "watching")
        stub.send_raw(path, b"this is no JSON\n")
        tap.ok(wait_for(lambda: r.stat()["lists"] == lists + 3), "a line that is none: listed anew")
        tap.ok(r.watches(), "watching")
        stub.send_raw(path, b"\n\r\n")
        stub.put("pods", thing("e", "1"))
        r.has(held(stub), "empty lines are nothing")
        tap.same(len(r.trouble("garbled")), 2, "both were told")
    stub.close()


def broken_streams():
    stub = KubeStub()
    stub.put("pods", thing("a", "x" * 300))
    with Reflector(stub, event_bytes=4000, page_bytes=60000) as r:
        r.has(held(stub), "listed")
        for cut in (0, 1, 100, 350, 700):
            stub.fault("watch=true", "watch", cut=cut)
            stub.cut_all()
            wait_for(lambda: not any(f.times for f in stub.faults))
            stub.put("pods", thing("a", "y" * 300 + str(cut)))
            stub.put("pods", thing("b", str(cut)))
            r.has(held(stub), f"a watch cut after {cut} bytes loses nothing")
        tap.same(r.stat()["lists"], 1, "nor needs a list")
        stub.fault("watch=true", "watch", drip=0.002)
        stub.cut_all()
        wait_for(lambda: not any(f.times for f in stub.faults))
        stub.put("pods", thing("a", "drop by drop"))
        r.has(held(stub), "an event that comes byte by byte")
        stub.cut_all()
        tap.ok(r.watches(), "watching")
        stub.put("pods", thing("big", "z" * 5000))
        stub.put("pods", thing("c", "1"))
        r.has(held(stub), "an event over the limit: listed anew, nothing lost")
        tap.ok(r.trouble("garbled") and r.stat()["lists"] == 2, "and told", r.troubles)
        for i in range(40):
            stub.put("pods", thing(f"q{i}", "w" * 2500))
        tap.ok(wait_for(lambda: r.now == held(stub)), "forty of 2500 bytes")
        said, lists = len(r.said), r.stat()["lists"]
        r.tell("relist")
        tap.ok(wait_for(lambda: r.stat()["lists"] == lists + 1), "a page over the limit is asked for in smaller ones")
        tap.ok(stub.seen("limit=15&continue", "list"), "which are told apart", stub.seen(verb="list")[-4:])
        tap.same(r.said[said:], [], "and nothing changed by it")
    stub.close()


def idle():
    stub = KubeStub()
    stub.put("pods", thing("a", "1"))
    with Reflector(stub, idle_ms=300) as r:
        r.has(held(stub), "listed")
        tap.ok(wait_for(lambda: r.trouble("idle")), "a watch without a byte is given up")
        tap.ok(wait_for(lambda: len(stub.seen(verb="watch")) >= 3), "and made anew")
        tap.same(r.stat()["lists"], 1, "from where it was")
    stub.bookmark_s = 0.1
    with Reflector(stub, idle_ms=2000) as r:
        tap.ok(wait_for(lambda: r.stat()["bookmarks"] >= 30), "bookmarks for longer than that")
        tap.same(len(r.trouble("idle")), 0, "keep it")
        stub.put("pods", thing("b", "1"))
        r.has(held(stub), "and it hears what happens")
    stub.close()


def refusals():
    stub = KubeStub()
    stub.put("pods", thing("a", "1"))
    stub.fault("pods", "list", times=2, status=403, message='pods is forbidden: User "x" cannot list resource "pods"')
    with Reflector(stub) as r:
        r.has(held(stub), "403: tried again, with success in the end")
        tap.ok("cannot list resource" in r.trouble("forbidden")[0][2], "and told what is forbidden", r.troubles)
        began = time.monotonic()
        stub.fault("watch=true", "watch", status=429, headers={"Retry-After": 1})
        stub.cut_all()
        wait_for(lambda: r.trouble("status"))
        stub.put("pods", thing("b", "1"))
        r.has(held(stub), "429: tried again")
        tap.ok(time.monotonic() - began >= 0.9, "not before Retry-After", time.monotonic() - began)
        stub.fault("watch=true", "watch", times=3, status=503)
        stub.cut_all()
        stub.put("pods", thing("b", "2"))
        r.has(held(stub), "503: tried again from the same version")
        tap.same(r.stat()["lists"], 1, "without a list")
        stub.fault("pods", status=500, times=4)
        stub.fault("pods", hang=0.05, times=2)
        stub.cut_all()
        stub.put("pods", thing("b", "3"))
        r.has(held(stub), "errors and connections that end without an answer")
    stub.close()


def tokens():
    stub = KubeStub(token="first")
    stub.put("pods", thing("a", "1"))
    with Reflector(stub, backoff_ms=30000, backoff_max_ms=30000) as r:
        r.has(held(stub), "listed with the first token")
        tap.ok(r.watches(), "watching")
        stub.write_token("second")
        stub.tokens = {"second"}
        time.sleep(1.1)  # the watch was worth its connection
        stub.cut_all()
        stub.put("pods", thing("a", "2"))
        r.has(held(stub), "a rotated token is read before the next request")
        tap.same(r.trouble("unauthorized"), [], "which is not refused")
        tap.ok(r.watches(), "watching")
        time.sleep(1.1)
        stub.tokens = {"third"}
        stub.fault("watch=true", "watch", status=401)
        stub.write_token("third")
        stub.cut_all()
        stub.put("pods", thing("a", "3"))
        r.has(held(stub), "401: read and tried again at once, not after a back-off of 30 s")
        tap.same(len(r.trouble("unauthorized")), 1, "told once")
    stub.close()


def away():
    stub = KubeStub()
    stub.put("pods", thing("a", "1"))
    stub.put("pods", thing("b", "1"))
    with Reflector(stub, backoff_max_ms=100) as r:
        r.has(held(stub), "listed")
        stub.stop()
        tap.ok(wait_for(lambda: len(r.trouble("connection")) >= 4), "the server is away: tried again and again")
        tap.same(r.now, held(stub), "what is known stays")
        stub.forget("pods", "a")
        stub.put("pods", thing("c", "1"))
        stub.start()
        r.has(held(stub), "it comes back without its history: everything is right again")
        stub.stop()
        stub.put("pods", thing("d", "1"))
        stub.start()
        r.has(held(stub), "and with it")
    stub.close()


def other_group():
    stub = KubeStub()
    new, old = stub.path("inferencepools"), stub.old_pools()
    stub.served = {stub.path("pods"), old}
    stub.put("inferencepools", thing("p", "old"), at=old)
    with Reflector(stub, path=new, path2=old, query="fieldSelector=metadata.name%3Dp") as r:
        tap.ok(wait_for(lambda: r.now == {"p": "old"}), "what is not served is looked for in the older group", r.now)
        tap.ok(r.watches(), "and watched there")
        stub.put("inferencepools", thing("other", "x"), at=old)
        stub.put("inferencepools", thing("p", "old 2"), at=old)
        tap.ok(wait_for(lambda: r.now == {"p": "old 2"}), "the selector goes with it", r.now)
        stub.put("inferencepools", thing("p", "new"))
        stub.served = {stub.path("pods"), new}
        r.tell("relist")
        tap.ok(wait_for(lambda: r.now == {"p": "new"}), "the newer group is preferred when it is served")
        stub.served = {stub.path("pods")}
        r.tell("relist")
        tap.ok(wait_for(lambda: r.trouble("not_served")), "neither: told, and what is known stays")
        tap.same(r.now, {"p": "new"}, "an API that is gone for a moment is no deletion")
    stub.close()


def access():
    stub = KubeStub()
    stub.put("pods", thing("a", "1"))
    none = {"url": None, "account": None}
    with Reflector(stub, **none, kubeconfig=stub.kubeconfig(token="first")) as r:
        r.has(held(stub), "kubeconfig with a token")
    with open(os.path.join(stub.folder.name, "tok"), "w", encoding="ascii") as f:
        f.write("first\n")
    with Reflector(stub, **none, kubeconfig=stub.kubeconfig(tokenFile="tok") + ":/nowhere") as r:
        r.has(held(stub), "with a token's file beside it")
        r.tell("get /api/v1/namespaces/ns/pods/a")
        got = r.answers.get(timeout=20)
        tap.ok(got[:2] == ("got", "200") and '"name": "a"' in got[2], "a single object", got)
        r.tell("get /api/v1/namespaces/ns/pods/z")
        tap.same(r.answers.get(timeout=20)[1:3], ("404", 'HTTP 404: "z" not found'), "one that is not there")
    with Reflector(stub, url=None, host="127.0.0.1", port=stub.port) as r:
        r.has(held(stub), "in a pod: service account")
    other = KubeStub()
    with Reflector(stub, account=other.account) as r:
        tap.ok(wait_for(lambda: any("certificate" in (t[2] or "") for t in r.trouble("connection"))),
               "a server with a certificate of another CA is not believed", r.troubles)
        tap.same((r.now, stub.tokens), ({}, {"first"}), "nor told the token")
    other.close()
    stub.stop()
    stub.client_cert, stub.tokens = True, set()
    stub.start()
    with Reflector(stub, **none, kubeconfig=stub.kubeconfig(**{"client-certificate": "cli.crt",
                                                              "client-key": "cli.key"})) as r:
        r.has(held(stub), "with a client certificate")
    stub.close()
    plain = KubeStub(tls=False)
    plain.tokens = set()
    plain.put("pods", thing("a", "1"))
    with Reflector(plain) as r:
        r.has(held(plain), "an address without TLS")
    plain.close()


def random_life():
    """Whatever happens, in the end both hold the same."""
    import random
    seed = int(os.environ.get("KVP_SEED", "0")) or int(time.time())
    print(f"# seed {seed}")
    rnd = random.Random(seed)
    stub = KubeStub()
    stub.bookmark_s = 0.05
    with Reflector(stub, page=5, idle_ms=400) as r:
        for step in range(250):
            names = list(stub.objects.get(stub.path("pods"), {}))
            what = rnd.randrange(20)
            if what < 9 or not names:
                stub.put("pods", thing(f"p{rnd.randrange(30)}", str(step)))
            elif what < 13:
                stub.delete("pods", rnd.choice(names))
            elif what == 13:
                stub.forget("pods", rnd.choice(names))
                stub.gone_in_stream(stub.path("pods"))
            elif what == 14:
                stub.compact()
                stub.cut_all()
            elif what == 15:
                stub.cut_all()
            elif what == 16:
                stub.fault("pods", rnd.choice(("list", "watch")), cut=rnd.randrange(2000))
            elif what == 17:
                stub.fault("pods", rnd.choice(("list", "watch")), status=rnd.choice((410, 500, 503)))
            elif what == 18:
                stub.send_raw(stub.path("pods"), rnd.choice((b"{", b"[]\n", b'{"type":"ADDED"}\n')))
            else:
                time.sleep(rnd.random() * 0.05)
        stub.no_faults()
        r.tell("relist") if rnd.random() < 0.3 else None
        r.has(held(stub), "after 250 random events and faults")
    stub.close()


for test in (list_and_watch, partial_pages, too_old, versions, twice_and_late, broken_streams, idle, refusals,
             tokens, away, other_group, access, random_life):
    began = time.monotonic()
    test()
    print(f"# {test.__name__}: {time.monotonic() - began:.1f} s")
sys.exit(tap.done())
