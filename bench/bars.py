#!/usr/bin/env python3
"""The performance bars, one line a quantity, from the benchmark programs of this build.

  bench/bars.py [--raw] [--scale] [--trace FILE] [--only PROGRAM,...]

--raw also prints the programs' own lines, --scale measures 1 to 3 readers over trees of 1, 10 and 20 million
blocks instead of the bars. KVP_BUILD_DIR names the build (build/release). Programs run one at a time on two
processors. Nothing is written to files.

  bar=N what=NAME value=V limit=<=L unit=U ok|short|not_measured reason=TEXT

Limits in M (a dependent random load) and H (a step of the key chain) use the M and H of this run. Bars on
lookups mean the walk with given keys, which copies them (0.6 ns a block); what the lookup takes with its keys
computed inside, and what the walk takes with everything in the near cache, stand in reason."""
import argparse
import os
import re
import shutil
import subprocess
import sys

BUILD = os.environ.get("KVP_BUILD_DIR", "build/release")
DEPTHS = (32, 512, 4096)
parser = argparse.ArgumentParser()
parser.add_argument("--raw", action="store_true")
parser.add_argument("--scale", action="store_true")
parser.add_argument("--trace", default="bench/load/trace_small.jsonl")
parser.add_argument("--only", default="radix,book,torture,events,restart,trace,dump")
args = parser.parse_args()
only = set(args.only.split(","))


def commit():
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def cpus():
    return ",".join(str(c) for c in sorted(os.sched_getaffinity(0))[:2])


def run(path, *argv, env=None, show=None):
    """Output lines of a program; [] if it fails, which stderr then says."""
    command = [f"{BUILD}/{path}", *map(str, argv)]
    if shutil.which("taskset"):
        command = ["taskset", "-c", cpus(), *command]
    full = dict(os.environ, KVP_BENCH_COMMIT=commit(), KVP_BUILD_DIR=BUILD, **(env or {}))
    try:
        done = subprocess.run(command, env=full, stdout=subprocess.PIPE, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        print(f"bars: {path}: {e}", file=sys.stderr)
        return []
    lines = done.stdout.splitlines()
    if args.raw if show is None else show:
        print("\n".join(lines), flush=True)
    if done.returncode:
        print(f"bars: {path}: exit {done.returncode}", file=sys.stderr)
        return []
    return lines


def parse(lines):
    """[{name: value}] of bench= lines."""
    out = []
    for line in lines:
        if line.startswith("bench="):
            pairs = [word.split("=", 1) for word in line.split() if "=" in word]
            out.append({k: float(v) if re.fullmatch(r"-?[\d.]+", v) else v for k, v in pairs})
    return out


class Missing(Exception):
    pass


def get(rows, name, key, **where):
    for row in rows:
        if row["bench"] == name and all(row.get(k) == v for k, v in where.items()):
            if key in row:
                return row[key]
    raise Missing(f"no {name} {where or ''}".strip())


def bar(n, what, value, limit, unit, note="", sense="<="):
    """value: a function, so that what could not be measured says so."""
    try:
        v, top = value(), limit() if callable(limit) else limit
    except (Missing, ZeroDivisionError) as e:
        print(f"bar={n} what={what} value=- limit={sense}- unit={unit} not_measured reason={e}", flush=True)
        return
    good = v <= top if sense == "<=" else v >= top
    why = note() if callable(note) else note
    if not good:
        why = f"{v / top:.2f}x_of_limit" + (" " + why if why else "")
    print(f"bar={n} what={what} value={v:.4g} limit={sense}{top:.4g} unit={unit} {'ok' if good else 'short'} "
          f"reason={why or '-'}", flush=True)


def million(blocks):
    return f"{blocks // 1000000}M"


def tree_bars(rows, blocks, m, h):
    """Bars 1 to 9 and 18 on one tree with 64 slots."""
    at = million(blocks)

    def find(depth, key="p50_ns", kind="full", form="given", bench="radix.find"):
        return get(rows, bench, key, depth=depth, kind=kind, form=form)

    def computed(depth, key="p50_ns"):
        return lambda: (f"keys_computed={find(depth, key, form='computed'):.0f}ns "
                        f"hot_with_keys_given={get(rows, 'radix.hot', 'ns', depth=depth, form='given'):.0f}ns")

    def beside(key):
        return lambda: max(find(d, key, bench="radix.beside") / find(d, key) for d in DEPTHS)

    def rate(depth, readers, key, form="given"):
        return get(rows, "radix.rate", key, depth=depth, readers=readers, form=form)

    for depth, runs, ms in zip(DEPTHS, (2, 5, 9), (2.5, 4, 6)):
        bar(1, f"full_{depth}_{at}", lambda: find(depth), min(m * runs + 300, ms * m), "ns", computed(depth))
    for depth, p50, p99 in zip(DEPTHS, (1200, 1800, 3000), (3000, 4000, 7000)):
        bar(2, f"p50_{depth}_{at}", lambda: find(depth), p50, "ns", computed(depth))
        bar(2, f"p99_{depth}_{at}", lambda: find(depth, "p99_ns"), p99, "ns", computed(depth, "p99_ns"))
    for depth, ns, more in ((512, 4, 3), (4096, 1, 1)):
        bar(3, f"keys_given_{depth}_{at}", lambda: find(depth) / depth, ns, "ns/block")
        bar(3, f"keys_computed_{depth}_{at}", lambda: find(depth, form="computed") / depth, h + more, "ns/block")
    bar(4, f"miss_{at}", lambda: max(find(d, kind="miss") for d in DEPTHS), 1.5 * m, "ns")
    bar(4, f"miss_4096_over_512_{at}",
        lambda: find(4096, kind="miss", form="computed") / find(512, kind="miss", form="computed"), 1.25, "ratio")
    bar(5, f"runs_of_32_{at}", lambda: get(rows, "radix.runs32", "p50_ns", form="given"), 12000, "ns",
        lambda: f"keys_computed={get(rows, 'radix.runs32', 'p50_ns', form='computed'):.0f}ns")
    for other, times in (("node_walk", 100), ("hash_walk", 30), ("jump64", 2)):
        bar(6, f"{other}_over_tree_{at}", lambda: get(rows, "radix.others", other + "_ns") / find(4096), times,
            "ratio", computed(4096), ">=")
    for depth, least in zip(DEPTHS, (0.9e6, 0.6e6, 0.35e6)):
        bar(7, f"lookups_{depth}_{at}", lambda: rate(depth, 1, "lookups_cpu_s"), least, "1/s",
            lambda: f"keys_computed={rate(depth, 1, 'lookups_cpu_s', 'computed'):.0f}", ">=")
    bar(7, f"two_readers_{at}", lambda: min(rate(d, 2, "scaling") for d in DEPTHS), 1.8, "ratio",
        lambda: f"keys_computed={min(rate(d, 2, 'scaling', 'computed') for d in DEPTHS)}", sense=">=")
    bar(8, f"batches_of_32_{at}", lambda: get(rows, "radix.churn", "blk_cpu_s", batch=32), 10e6, "blocks/s",
        sense=">=")
    bar(8, f"single_block_events_{at}", lambda: get(rows, "radix.churn", "events_cpu_s", batch=1), 3e6, "1/s",
        sense=">=")
    bar(8, f"join_{at}", lambda: get(rows, "radix.build", "join_ns_blk"), 15, "ns/block")
    bar(8, f"new_block_{at}", lambda: get(rows, "radix.build", "new_ns_blk"), 90, "ns/block")
    bar(9, f"reader_p50_beside_writer_{at}", beside("p50_ns"), 1.15, "ratio")
    bar(9, f"reader_p99_beside_writer_{at}", beside("p99_ns"), 1.5, "ratio")
    bar(9, f"writer_beside_reader_{at}", lambda: get(rows, "radix.churn_beside", "blk_cpu_s")
        / get(rows, "radix.churn", "blk_cpu_s", batch=32), 0.8, "ratio", sense=">=")
    bar(9, f"retried_lookups_{at}", lambda: get(rows, "radix.contended", "retried_percent"), 0.5, "percent")
    bar(18, f"block_operations_{at}", lambda: get(rows, "radix.mixed", "block_ops_cpu_s", form="given"), 300e6,
        "1/s", lambda: f"keys_computed={get(rows, 'radix.mixed', 'block_ops_cpu_s', form='computed'):.0f}", ">=")


def size_bars(rows64, rows, rows20):
    """Bars 2, 10 and 11: 256 slots, 10 and 20 million blocks."""
    def given(r, depth):
        return get(r, "radix.find", "p50_ns", depth=depth, kind="full", form="given")

    bar(2, "slots_256_over_64_10M", lambda: max(given(rows, d) / given(rows64, d) for d in DEPTHS), 1.9, "ratio")
    bar(10, "lookup_20M_over_10M", lambda: max(given(rows20, d) / given(rows, d) for d in DEPTHS), 1.3, "ratio")
    bar(10, "writer_20M_over_10M", lambda: get(rows20, "radix.churn", "blk_cpu_s", batch=32)
        / get(rows, "radix.churn", "blk_cpu_s", batch=32), 0.6, "ratio", sense=">=")
    bar(11, "region_256_slots_10M", lambda: get(rows, "radix.memory", "region_bytes_blk"), 20, "bytes/block",
        lambda: f"pages_touched={get(rows, 'radix.memory', 'touched_bytes_blk'):.1f}")
    bar(11, "writer_private_10M", lambda: get(rows, "radix.memory", "private_bytes_blk"), 66, "bytes/block")


def book_bars(rows):
    def cycle(key, ranks, procs):
        return get(rows, "book.cycle", key, ranks=ranks, blocks=0, procs=procs)

    for ranks, p50, p99 in ((64, 400, 1200), (1024, 1000, 2500)):
        bar(12, f"select_reserve_p50_{ranks}", lambda: cycle("select_reserve_p50_ns", ranks, 1), p50, "ns")
        bar(12, f"select_reserve_p99_{ranks}", lambda: cycle("select_reserve_p99_ns", ranks, 1), p99, "ns")
    bar(13, "cycles_one_process", lambda: cycle("cycles_cpu_s", 64, 1), 1.4e6, "1/s", sense=">=")
    bar(13, "cycles_two_processes", lambda: cycle("cycles_cpu_s", 64, 2), 2.2e6, "1/s", sense=">=")
    bar(13, "scan_64", lambda: get(rows, "book.scan", "scan_ns_rank", ranks=64), 0.7, "ns/rank")
    bar(13, "scan_1024", lambda: get(rows, "book.scan", "scan_ns_rank", ranks=1024), 0.7, "ns/rank")
    bar(14, "booking_over_scan_and_add", lambda: cycle("select_reserve_p50_ns", 64, 1)
        / get(rows, "book.scan", "scan_faa_ns", ranks=64), 6, "ratio")
    bar(15, "active_blocks_book", lambda: get(rows, "book.blocks", "book_ns_block"), 30, "ns/block")
    bar(15, "active_blocks_free", lambda: get(rows, "book.blocks", "free_ns_block"), 30, "ns/block")
    bar(15, "active_blocks_512", lambda: get(rows, "book.blocks", "book_ns_block") * 512 / 1000, 2, "us")


def soak():
    """{what: figure} of a thousand kills of everybody (tests/torture/x_kills.c)."""
    text = "\n".join(run("tests/torture/x_kills", env={"KVP_KILLS": "1000"}))
    kills = re.search(r"kills: (\d+) writer, (\d+) reader, (\d+) booker", text)
    times = dict(re.findall(r"# (\w+ (?:without|with kills)):.* longest .*?processor (\d+) us", text))
    if not kills or len(times) != 4:
        raise Missing("x_kills failed or gave no result: see --raw")
    return dict(zip(("writer", "reader", "booker"), map(int, kills.groups())), **{k: int(v) for k, v in times.items()})


def soak_bars(restart):
    """Bar 16. By the processor's clock: on shared cores the wall's is the scheduler's."""
    try:
        got = soak()
    except Missing as e:
        print(f"bars: {e}", file=sys.stderr)
        got = {}
    rows = [dict(got, bench="soak")]
    for role in ("writer", "reader", "booker"):
        bar(16, f"{role}_kills_without_fault", lambda: get(rows, "soak", role), 300, "kills", sense=">=")
    for role in ("reader", "booker"):
        bar(16, f"longest_{role}_call_beside_kills", lambda: get(rows, "soak", f"{role} with kills"), 1000, "us",
            lambda: f"of_processor_without_kills={get(rows, 'soak', f'{role} without')}us")
    bar(16, "slowest_lookup_over_a_kill", lambda: get(restart, "restart.killed", "read_max_us"), 1000, "us",
        "real_node_indexer_killed")


def scale():
    for blocks in (1000000, 10000000, 20000000):
        rows = parse(run("bench/b_radix", blocks, 256, 3, "lookup"))
        try:
            memory = {k: get(rows, "radix.memory", k) for k in ("region_bytes_blk", "private_bytes_blk")}
            for depth in DEPTHS:
                for readers in (1, 2, 3):
                    cpu, wall = (get(rows, "radix.rate", k, depth=depth, readers=readers, form="computed")
                                 for k in ("lookups_cpu_s", "lookups_wall_s"))
                    print(f"scale blocks={blocks} slots=256 depth={depth} readers={readers} "
                          f"lookups_cpu_s={cpu:.0f} lookups_wall_s={wall:.0f} "
                          f"p50_ns={get(rows, 'radix.find', 'p50_ns', depth=depth, kind='full', form='computed'):.0f} "
                          f"churn_blk_cpu_s={get(rows, 'radix.churn', 'blk_cpu_s', batch=32):.0f} "
                          f"region_bytes_blk={memory['region_bytes_blk']} "
                          f"private_bytes_blk={memory['private_bytes_blk']}", flush=True)
        except Missing as e:
            print(f"scale blocks={blocks} not_measured reason={e}", flush=True)


def main():
    calib = parse(run("bench/b_calib", show=True))
    if not calib:
        return 1
    m, h = (get(calib, "calib", k) for k in ("M_ns", "H_ns"))
    if args.scale:
        scale()
        return 0
    small = big = wide = wide20 = book = restart = []
    if "radix" in only:
        small = parse(run("bench/b_radix", 1000000, 64, 2))
        big = parse(run("bench/b_radix", 10000000, 64, 2))
        wide = parse(run("bench/b_radix", 10000000, 256, 2, "lookup"))
        wide20 = parse(run("bench/b_radix", 20000000, 256, 2, "lookup"))
    if "book" in only:
        book = parse(run("bench/b_book"))
    if "restart" in only:
        restart = parse(run("bench/b_restart"))
    if args.raw and "events" in only:
        run("bench/b_events")
    if args.raw and "dump" in only:
        run("bench/b_dump")
    if args.raw and "trace" in only:
        run("bench/b_trace", "--trace", args.trace)
    if "radix" in only:
        tree_bars(small, 1000000, m, h)
        tree_bars(big, 10000000, m, h)
        size_bars(big, wide, wide20)
    if "book" in only:
        book_bars(book)
    if "torture" in only:
        soak_bars(restart)
    return 0


sys.exit(main())
