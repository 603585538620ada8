#!/usr/bin/env python3
"""The sidecar as a plain proxy: latency that it adds, streamed tokens a second of a core, 1000 streams at once, memory
of a stream. Beside it a plain nginx in the same run, and no proxy at all.

  bench/bars_sidecar.py [--streams N]

Engine, clients (bench/b_sidecar) and proxy share the machine; so what counts of throughput is the processor time of
the proxy: tokens a second of a core = tokens / its seconds of processor time. nginx: one worker, no buffering of
answers, kept connections to the engine; fetched as a Debian package into build/ and not installed; without it that row
is left out. KVP_BUILD_DIR names the build.

  bench=sidecar what=latency via=direct|sidecar|nginx connections=N p50_us=V p99_us=V requests_s=V cpu_us=V
  bench=sidecar what=prefill_decode bytes=N ...: vLLM's protocol, both legs at the same engine, a prompt of N bytes
  bench=sidecar what=streams via=... streams=N gap_us=G tokens_s=V per_core_s=V late_p50_us=V late_p99_us=V
    first_p99_us=V kb_stream=V errors=N

cpu_us: processor time of the proxy a request, by the clock of the scheduler. late: arrival of a token behind its
sending by the engine. kb_stream: growth of the proxy's resident memory with all streams open, divided by their number
(the kernel's socket buffers are not in it)."""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "lib"))
from node import BUILD, free_port, wait_for
from pd import Client, Sidecar

parser = argparse.ArgumentParser()
parser.add_argument("--streams", type=int, default=1000)
parser.add_argument("--requests", type=int, default=10000)
parser.add_argument("--repeats", type=int, default=3)
args = parser.parse_args()
BENCH = f"{BUILD}/bench/b_sidecar"
CONF = """daemon off; worker_processes 1; pid {dir}/pid; error_log {dir}/error; worker_rlimit_nofile 20000;
events {{ worker_connections 10000; }}
http {{ access_log off; client_body_temp_path {dir}/b; proxy_temp_path {dir}/p; fastcgi_temp_path {dir}/f;
  uwsgi_temp_path {dir}/u; scgi_temp_path {dir}/s; keepalive_requests 1000000000;
  upstream engine {{ server 127.0.0.1:{engine}; keepalive 256; keepalive_requests 1000000000; }}
  server {{ listen 127.0.0.1:{port} backlog=4096; client_max_body_size 0; location / {{ proxy_pass http://engine;
    proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; proxy_request_buffering off; }} }} }}
"""


def fetch_nginx():
    """A plain nginx: the installed one, or the one of the Debian package, unpacked."""
    found = shutil.which("nginx")
    if found:
        return found
    where = os.path.abspath("build/nginx")
    binary = f"{where}/usr/sbin/nginx"
    if not os.path.exists(binary):
        os.makedirs(where, exist_ok=True)
        got = subprocess.run(
            "apt-get download -qq nginx >/dev/null 2>&1 && dpkg-deb -x nginx_*.deb .",
            shell=True,
            cwd=where,
            check=False,
        )
        if got.returncode or not os.path.exists(binary):
            return None
    return binary if subprocess.run([binary, "-v"], capture_output=True, check=False).returncode == 0 else None


class Nginx:
    def __init__(self, binary, engine):
        self.dir = tempfile.TemporaryDirectory()
        self.port = free_port()
        with open(f"{self.dir.name}/conf", "w", encoding="ascii") as f:
            f.write(CONF.format(dir=self.dir.name, engine=engine, port=self.port))
        self.proc = subprocess.Popen(
            [binary, "-c", f"{self.dir.name}/conf", "-p", self.dir.name], stderr=subprocess.DEVNULL
        )
        if not wait_for(self.up, 5):
            raise RuntimeError("nginx does not start")
        with open(f"/proc/{self.proc.pid}/task/{self.proc.pid}/children", encoding="ascii") as f:
            self.pid = int(f.read().split()[0])

    def up(self):
        try:
            with Client(self.port) as c:
                return c.ask("GET", "/").status
        except OSError:
            return False

    def stop(self):
        self.proc.send_signal(signal.SIGTERM)
        self.proc.wait()
        self.dir.cleanup()


def cpu_s(pid):
    """By the scheduler's clock: ticks are too coarse for what takes some 100 ms. Both proxies run one thread."""
    with open(f"/proc/{pid}/schedstat", encoding="ascii") as f:
        return int(f.read().split()[0]) / 1e9


def rss_kb(pid):
    with open(f"/proc/{pid}/status", encoding="ascii") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("VmRSS"))


def values(line):
    return dict(x.split("=") for x in line.split())


def latency(via, port, pid, connections, prefill=(), requests=None):
    requests = requests or args.requests
    rows = []
    for _ in range(args.repeats):
        before = cpu_s(pid) if pid else 0
        out = subprocess.run(
            [BENCH, "latency", str(port), str(requests), str(connections), *map(str, prefill)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        v = values(out)
        v["cpu_us"] = (cpu_s(pid) - before) / (requests * 1.1) * 1e6 if pid else 0
        rows.append(v)
    v = sorted(rows, key=lambda r: float(r["p50_us"]))[len(rows) // 2]
    what = f"prefill_decode bytes={prefill[1]}" if prefill else "latency"
    print(
        f"bench=sidecar what={what} via={via} connections={connections} p50_us={v['p50_us']} p99_us={v['p99_us']} "
        f"requests_s={v['requests_s']} cpu_us={v['cpu_us']:.1f} errors={v['errors']}",
        flush=True,
    )
    return float(v["p50_us"]), float(v["p99_us"])


def streams(via, port, pid, gap_us, tokens):
    base = rss_kb(pid) if pid else 0
    before = cpu_s(pid) if pid else 0
    proc = subprocess.Popen(
        [BENCH, "streams", str(port), str(args.streams), str(tokens), str(gap_us)], stdout=subprocess.PIPE, text=True
    )
    assert proc.stdout.readline() == "open\n"
    grown = (rss_kb(pid) - base) / args.streams if pid else 0
    v = values(proc.stdout.readline())
    proc.wait()
    used = cpu_s(pid) - before if pid else 0
    core = f"{int(v['tokens']) / used:.0f}" if used else "-"
    print(
        f"bench=sidecar what=streams via={via} streams={args.streams} gap_us={gap_us} "
        f"tokens_s={int(v['tokens']) / float(v['seconds']):.0f} per_core_s={core} late_p50_us={v['late_p50_us']} "
        f"late_p99_us={v['late_p99_us']} first_p99_us={v['first_p99_us']} kb_stream={grown:.1f} errors={v['errors']}",
        flush=True,
    )


def main():
    engine_port = free_port()
    engine = subprocess.Popen([BENCH, "engine", str(engine_port)], stdout=subprocess.PIPE, text=True)
    assert engine.stdout.readline() == "ready\n"
    binary = fetch_nginx()
    if not binary:
        print("# nginx: neither installed nor to be fetched; its rows are left out")
    made = {"direct": None, "sidecar": Sidecar(engine_port)}
    if binary:
        made["nginx"] = Nginx(binary, engine_port)
    try:
        for connections in (1, 32):
            base = None
            for via, proxy in made.items():
                pid = getattr(proxy, "pid", None) or (proxy and proxy.proc.pid)
                got = latency(via, proxy.port if proxy else engine_port, pid, connections)
                base = base or got
                if proxy:
                    print(
                        f"bench=sidecar what=added via={via} connections={connections} p50_us={got[0] - base[0]:.0f} "
                        f"p99_us={got[1] - base[1]:.0f}",
                        flush=True,
                    )
        pair = Sidecar(engine_port, "vllm_nixl")
        for size, requests in ((1000, args.requests), (200_000, args.requests // 10)):
            latency("sidecar", pair.port, pair.proc.pid, 1, (engine_port, size), requests)
        pair.stop()
        for gap_us, tokens in ((50000, 100), (20000, 200)):
            for via, proxy in made.items():
                pid = getattr(proxy, "pid", None) or (proxy and proxy.proc.pid)
                streams(via, proxy.port if proxy else engine_port, pid, gap_us, tokens)
                time.sleep(0.2)
    finally:
        for proxy in made.values():
            if proxy:
                proxy.stop()
        engine.terminate()
        engine.wait()


main()
