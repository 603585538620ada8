#!/usr/bin/env python3
"""The supervisor with small children in place of indexer and httpd: start order, second instance, restart, sweep,
corruption, stuck children, drain, exit codes, stale run directory. Every wait is for an event with a deadline."""
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

BUILD = os.path.abspath(os.environ.get("KVP_BUILD_DIR", "build/release"))
SMALL = ["--max-ranks", "64", "--index-ranks", "64", "--max-blocks", "10000", "--max-reservations", "64",
         "--max-active-blocks", "1024"]
# Sanitizers need more time and address space than a plain build; nothing below asserts a time.
DEADLINE_S = 30
count = failed = 0
if BUILD.endswith("tsan"):
    print("1..0 # SKIP a node is several processes, of which ThreadSanitizer sees one")
    sys.exit(0)


def ok(cond, claim):
    global count, failed
    count += 1
    failed += not cond
    print(f"{'' if cond else 'not '}ok {count} - {claim}", flush=True)
    return cond


def eventually(test, what):
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        got = test()
        if got:
            return got
        time.sleep(0.01)
    print(f"# gave up waiting for: {what}", flush=True)
    return None


class Node:
    """A node in a directory of its own: programs, run directory, log."""

    def __init__(self, bin_dir, name):
        self.bin, self.run = bin_dir, tempfile.mkdtemp(prefix="kvp-" + name)
        os.chmod(self.run, 0o700)
        self.log = os.path.join(self.run, "log")
        self.proc = None

    def start(self, *flags):
        with open(self.log, "ab") as log:
            self.proc = subprocess.Popen([self.bin + "/kvpick", "run", "--run-dir", self.run, *SMALL, *flags],
                                         stderr=log, stdout=log, env=clean_env())
        return self

    def ctl(self, *args):
        p = subprocess.run([self.bin + "/kvpickctl", "--run-dir", self.run, *args], capture_output=True, text=True,
                           env=clean_env(), timeout=DEADLINE_S)
        return p

    def slots(self):
        p = self.ctl("--json", "slots")
        return json.loads(p.stdout)["slots"] if p.returncode == 0 else []

    def child(self, role, instance=0):
        for s in self.slots():
            if s["role"] == role and s["instance"] == instance and s["control"] == "RUN" and s["alive"] == "yes":
                return s
        return None

    def running(self, role, instance=0, other_than=None):
        def test():
            s = self.child(role, instance)
            return s if s and (not other_than or s["pid"] != other_than["pid"]) else None
        got = eventually(test, f"{role}[{instance}] runs")
        if not got:
            raise TimeoutError(f"{role}[{instance}] does not run")
        return got

    def order(self, role, word, instance=0):
        with open(os.path.join(self.run, f"{role}.{instance}.do"), "w") as f:
            f.write(word)

    def wait(self):
        try:
            return self.proc.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.proc.kill()
            self.proc.wait()
            return None

    def stop(self, sig=signal.SIGTERM):
        self.proc.send_signal(sig)
        return self.wait()

    def text(self):
        with open(self.log, errors="replace") as f:
            return f.read()

    def generation(self):
        p = self.ctl("--json", "gen")
        return json.loads(p.stdout)["generation"] if p.returncode == 0 else None

    def clean(self):
        if self.proc and self.proc.poll() is None:
            self.proc.kill()
            self.proc.wait()
        shutil.rmtree(self.run, ignore_errors=True)


def clean_env():
    return {k: v for k, v in os.environ.items() if not k.startswith(("KVPICK_", "DYN_"))}


def gone(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def starts_and_stops(n):
    n.start("--httpd-processes", "2")
    i, h0, h1 = n.running("indexer"), n.running("httpd", 0), n.running("httpd", 1)
    ok(i and h0 and h1, "indexer and two httpd run")
    log = n.text()
    ok(log.index("child.running role=indexer") < log.index("child.started role=httpd"),
       "httpd is started only when the indexer runs")
    ok(oct(os.stat(n.run + "/default.sock").st_mode)[-3:] == "600", "the control socket has mode 0600")
    p = subprocess.run([n.bin + "/kvpick", "run", "--run-dir", n.run, *SMALL], capture_output=True, text=True,
                       env=clean_env(), timeout=DEADLINE_S)
    ok(p.returncode == 75 and "already runs" in p.stderr and str(n.proc.pid) in p.stderr,
       "a second instance is refused with code 75 and names the first")
    other = Node(n.bin, "other")
    other.run_saved, other.run = other.run, n.run
    other.log = os.path.join(other.run_saved, "log")
    other.start("--instance", "two")
    ok(eventually(lambda: "child.running role=httpd" in other.text(), "second instance"),
       "another instance name runs beside it")
    ok(other.stop() == 0, "and stops")
    other.run = other.run_saved
    other.clean()
    n.proc.send_signal(signal.SIGHUP)
    ok(eventually(lambda: "node.sighup" in n.text(), "SIGHUP"), "SIGHUP is logged and ignored")
    ok(n.stop() == 0, "SIGTERM ends the node with code 0")
    log = n.text()
    ok(log.count("drained") == 3 and log.rindex("boot_child: httpd") < log.rindex("boot_child: indexer"),
       "children were asked to drain, the indexer last")
    ok(not os.path.exists(n.run + "/default.sock"), "the socket's name is gone")
    ok(n.ctl("-t", "0", "slots").returncode == 75, "kvpickctl says that there is no node")


def child_comes_back(n):
    n.order("httpd", "claim")
    n.start()
    h, i = n.running("httpd"), n.running("indexer")
    os.kill(h["pid"], signal.SIGKILL)
    h2 = n.running("httpd", other_than=h)
    ok(h2 and h2["generation"] == h["generation"] + 1, "a killed httpd comes back in the same slot, next generation")
    ok("commands=1" in n.text(), "its claimed command was swept in between")
    os.kill(i["pid"], signal.SIGKILL)
    i2 = n.running("indexer", other_than=i)
    ok(i2 and n.child("httpd")["pid"] == h2["pid"], "a killed indexer comes back, httpd is left alone")
    errors = json.loads(n.ctl("--json", "errors").stdout)["errors"]
    ok([e["count"] for e in errors if "killed by a signal" in e["text"]] == [2], "both are in the error log")
    ok(n.ctl("check").returncode == 0, "kvpickctl check finds no faults")
    top = json.loads(n.ctl("--json", "top", "-1", "-u", "10").stdout)
    total = {c["counter"]: c["total"] for c in top["counters"]}
    ok(total["supervisor.child.restarted"] == 2 and total["supervisor.child.swept"] == 2,
       "restarts and sweeps are counted")
    for verb in (["workers"], ["resv"], ["radix", "--stats"], ["gen"], ["slots"], ["errors"], ["check"], ["top", "-1",
                 "-u", "1"]):
        text, js = n.ctl(*verb), n.ctl("--json", *verb)
        ok(text.returncode == 0 and js.returncode == 0 and isinstance(json.loads(js.stdout), dict),
           f"kvpickctl {verb[0]} prints text and JSON")
    ok(n.ctl("nonsense").returncode == 2, "an unknown verb is refused with code 2")
    ok(n.ctl("--help").returncode == 0, "--help")
    ok(n.stop() == 0, "stops")


def corruption(n):
    n.start()
    n.running("httpd")
    gen = n.generation()
    n.order("httpd", "corrupt")
    os.kill(n.child("httpd")["pid"], signal.SIGKILL)
    eventually(lambda: n.generation() not in (gen, None), "another generation")
    ok(n.running("httpd") and n.running("indexer"), "exit code 70: everything was started again")
    ok(n.generation() != gen, "in a region of another generation")
    archived = [f for f in os.listdir(n.run) if f.startswith("default.errors.")]
    text = open(os.path.join(n.run, archived[0])).read() if archived else ""
    ok("told to find corruption" in text, "the old error log is in a file")
    ok(n.stop() == 0, "stops")


SWEEPER = '''#!/bin/sh
[ "$1" = sweep ] || exec {real} "$@"
left=$(cat {dir}/sweep.do 2>/dev/null)
echo "$$ $*" >>{dir}/sweep.saw
case "$left" in
kill*) echo "${{left#kill}}" >{dir}/sweep.do; kill -9 $$ ;;
again*) echo "${{left#again}}" >{dir}/sweep.do; exit 75 ;;
esac
exec {real} "$@"
'''


def sweeper_killed(n):
    """A helper that is killed, or can't join, is started again: the region stays. The third in a row is not."""
    real = n.bin
    n.bin = tempfile.mkdtemp(prefix="kvp-sweep", dir=n.run)
    for name in os.listdir(real):
        shutil.copy(f"{real}/{name}", n.bin)
    os.rename(n.bin + "/kvpickctl", n.bin + "/real")
    with open(n.bin + "/kvpickctl", "w") as f:
        f.write(SWEEPER.format(real=n.bin + "/real", dir=n.run))
    os.chmod(n.bin + "/kvpickctl", 0o755)
    n.order("httpd", "claim")
    n.start()
    h, gen = n.running("httpd"), n.generation()
    for turn, how in enumerate(("kill", "again", "killagain")):
        with open(n.run + "/sweep.do", "w") as f:
            f.write(how)
        os.kill(h["pid"], signal.SIGKILL)
        h = n.running("httpd", other_than=h)
        ok(h and n.generation() == gen, f"a sweep that ends by {how} is begun again, the region stays")
        if turn == 0:
            ok("commands=1" in n.text(), "what the dead process held was swept by the second")
    with open(n.run + "/sweep.saw") as f:
        saw = [line.split() for line in f]
    owners = [[line[i + 1] for i, w in enumerate(line) if w == "--lost"] for line in saw]
    ok([len(o) for o in owners] == [0, 1, 0, 1, 0, 1, 2] and len(set(owners[-1])) == 2,
       "each knows the killed ones before it, by their owner words")
    said = [line.split("pid=")[1].split()[0] for line in n.text().splitlines() if "child.ended role=ctl" in line]
    ok(said == [saw[i][0] for i in (0, 2, 4, 5)], "and the log names the processes that ended so")
    top = json.loads(n.ctl("--json", "top", "-1", "-u", "10").stdout)
    total = {c["counter"]: c["total"] for c in top["counters"]}
    ok(total["supervisor.sweep.again"] == 4 and total["supervisor.child.swept"] == 3, "both kinds are counted")
    ok(n.ctl("check").returncode == 0, "kvpickctl check finds no faults")
    with open(n.run + "/sweep.do", "w") as f:
        f.write("killagainkill")
    os.kill(h["pid"], signal.SIGKILL)
    eventually(lambda: n.generation() not in (gen, None), "another generation")
    ok("node.corrupt why=\"the sweep of a dead process failed\"" in n.text(),
       "the third helper in a row that is killed: the region is taken for broken")
    ok(n.running("httpd", other_than=h) and n.stop() == 0, "and the node works in another one")
    n.bin = real


def bad_child(n):
    n.order("httpd", "exit2")
    n.start()
    ok(n.wait() == 2, "a child with exit code 2 ends the node with code 2")
    os.unlink(n.run + "/httpd.0.do")
    ok("child.started role=httpd instance=0 slot=2" in n.text() and n.text().count("started role=httpd") == 1,
       "and it was not started again")


def stuck_and_deaf(n):
    n.order("httpd", "still")
    n.start("--slot-beat-ms", "10", "--slot-stuck-ms", "100")
    ok(eventually(lambda: "child.stuck role=httpd" in n.text(), "stuck"), "a child without heartbeat is reported")
    ok(eventually(lambda: "child.kill role=httpd" in n.text(), "kill"), "and killed after ten times that long")
    n.order("httpd", "deaf")
    eventually(lambda: n.text().count("child.running role=httpd") >= 2, "restart")
    n.proc.send_signal(signal.SIGTERM)
    eventually(lambda: "node.stopping" in n.text(), "stopping")
    n.proc.send_signal(signal.SIGTERM)
    ok(n.wait() == 0, "a second SIGTERM cuts the drain of a child that does not listen short")
    n.start("--drain-timeout-ms", "50")
    n.running("httpd")
    ok(n.stop() == 0 and "node.drain_timeout" in n.text(), "and so does the drain time-out")


def stale_directory(n):
    n.start()
    h, i = n.running("httpd"), n.running("indexer")
    n.proc.kill()
    n.proc.wait()
    ok(eventually(lambda: gone(h["pid"]) and gone(i["pid"]), "children die"), "children die with the supervisor")
    ok(os.path.exists(n.run + "/default.sock") and os.path.exists(n.run + "/default.lock"), "names stay behind")
    n.start()
    ok(n.running("httpd", other_than=h), "the next start works")
    os.kill(n.child("indexer")["pid"], signal.SIGSTOP)
    ok(n.stop(signal.SIGKILL) == -9, "the supervisor is killed again, one child being stopped")
    n.start()
    ok(n.running("httpd"), "and the next start works again")
    ok(n.stop() == 0, "stops")
    os.chmod(n.run, 0o777)
    n.start()
    ok(n.wait() == 2 and "others may write" in n.text(), "a run directory where others may write is refused")


def command_line(n):
    def run(*args):
        return subprocess.run([n.bin + "/kvpick", *args], capture_output=True, text=True, env=clean_env(),
                              timeout=DEADLINE_S)
    p = run()
    ok(p.returncode == 0 and "kvpick run" in p.stdout, "without arguments: help")
    ok(run("help", "run").returncode == 0 and run("version").returncode == 0, "help run, version")
    ok(run("check-config", "--port", "8093").returncode == 0, "check-config of a good configuration answers 0")
    ok(run("check-config", "--no-such-flag").returncode == 2, "of a bad one 2")
    ok(run("run", "--no-such-flag", "--run-dir", n.run).returncode == 2, "run with a bad configuration answers 2")
    ok(run("dance").returncode == 2, "an unknown verb is refused with code 2")
    ok(run("run", "--mode", "selection", "--run-dir", "/nonexistent/a/b").returncode in (2, 69),
       "a run directory that cannot be made is refused")
    lonely = tempfile.mkdtemp(prefix="kvp-lonely")
    shutil.copy(n.bin + "/kvpick", lonely)
    p = subprocess.run([lonely + "/kvpick", "run", "--run-dir", n.run], capture_output=True, text=True,
                       env=clean_env(), timeout=DEADLINE_S)
    ok(p.returncode == 69 and "kvpick-indexer" in p.stderr, "a missing sibling program is named, code 69")
    shutil.rmtree(lonely)


def main():
    bin_dir = tempfile.mkdtemp(prefix="kvp-bin")
    for program in ("kvpick", "kvpickctl"):
        shutil.copy(f"{BUILD}/{program}", bin_dir)
    for role in ("indexer", "httpd"):
        shutil.copy(f"{BUILD}/tests/helpers/boot_child", f"{bin_dir}/kvpick-{role}")
    only = sys.argv[1:]
    for scene in (command_line, starts_and_stops, child_comes_back, corruption, sweeper_killed, bad_child,
                  stuck_and_deaf, stale_directory):
        if only and scene.__name__ not in only:
            continue
        n = Node(bin_dir, scene.__name__)
        before = failed
        try:
            scene(n)
        except Exception as e:  # a broken scene is a failed test, the others still run
            ok(False, f"{scene.__name__}: {type(e).__name__}: {e}")
        if failed > before and os.path.exists(n.log):
            print("".join("# " + line for line in n.text().splitlines(True)[-60:]), flush=True)
        n.clean()
    shutil.rmtree(bin_dir)
    print(f"1..{count}")
    return 1 if failed else 0


sys.exit(main())
