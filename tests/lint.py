#!/usr/bin/env python3
"""make lint: the rules that a compiler does not check. Prints every finding; exit 1 when there is one."""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LINE_MAX, FILE_MAX, FUNCTION_MAX = 110, 900, 80
BANNED = re.compile(r"(?<![\w.>])(strcpy|strcat|sprintf|vsprintf|strtok|gets|atoi|atol|alloca|rand|srand)\s*\(")
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
LOCKS = re.compile(r"\b(pthread_mutex_lock|pthread_rwlock\w*|ck_spinlock\w*|ck_epoch\w*|ck_ht_\w*|ck_hs_\w*)\b")
CONTRACT = {"shm": ("Shape", "Truth", "Writers", "Ordering", "Crash"), "ipc": ("Shape", "Crash")}
PURE_HEADERS = {"obj.h", "score.h"}
# Which first components a file under a folder may include from our own tree.
ARROWS = {
    "include": {"kvpick"},
    "shm": {"kvpick", "shm"},
    "ipc": {"kvpick", "ipc"},
    "daemons/common": {"kvpick", "shm", "ipc", "daemons/common"},
}
LINKED = {"shm", "ipc", "daemons/common", "daemons/extproc", "daemons/peer", "daemons/discovery", "daemons/sidecar"}
# Settings of which only the default is legal.
REFUSED = {"tracking_hash", "tracking_key_file", "tracking_key_id", "prefill_load_model", "shared_cache_type",
           "use_remote_indexer", "kube_discovery_mode"}
LIBRARY_BAN = {
    "shm": re.compile(r"#include <(zmq|grpc|protobuf|liburing|msgpack|simdjson|http_parser)"),
}
found = []
named = {}  # function -> the file that defines it


def report(path, line, text):
    found.append(f"{path.relative_to(ROOT)}:{line}: {text}")


def files():
    for path in sorted(ROOT.rglob("*")):
        inside = path.relative_to(ROOT).parts[0]
        if inside not in {"build", ".git"} and path.suffix in {".c", ".h", ".cc", ".def"} and path.is_file():
            yield path


def folder_of(rel):
    parts = rel.split("/")
    if parts[0] == "daemons":
        return "/".join(parts[:2])
    return parts[0]


def component(include):
    if include.startswith("daemons/"):
        return "/".join(include.split("/")[:2])
    return include.split("/")[0]


def check_includes(path, rel, lines):
    folder = folder_of(rel)
    if folder in {"tests", "bench"}:
        return
    allowed = ARROWS.get(folder, {"kvpick", "shm", "ipc", "daemons/common", folder})
    for i, text in enumerate(lines, 1):
        own = re.match(r'#include "([^"]+)"', text) or re.match(r"#include <(kvpick/[^>]+)>", text)
        if own and component(own.group(1)) not in allowed:
            report(path, i, f"{folder} must not include {own.group(1)}")
        ban = LIBRARY_BAN.get(folder)
        if ban and ban.match(text):
            report(path, i, f"{folder} must not include a network library")


def strip_comments(text):
    """Blanks comments and string contents, keeping line numbers."""
    def blank(m):
        return re.sub(r"[^\n]", " ", m.group(0))
    return re.sub(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', blank, text, flags=re.S)


def check_functions(path, code):
    start = None
    for i, text in enumerate(code.split("\n"), 1):
        if text.startswith("{"):
            start = i
        elif text.startswith("}") and start is not None:
            if i - start - 1 > FUNCTION_MAX:
                report(path, start, f"function of {i - start - 1} lines (at most {FUNCTION_MAX})")
            start = None


def check_names(path, rel, code):
    """Tests link all libraries into one program, which `make all` does not: a global name must be there once."""
    if folder_of(rel) not in LINKED or path.suffix != ".c":
        return
    for m in re.finditer(r"^(?!static\b)[a-z][^;{}()=]*?[ *](\w+)\([^;{}]*\)\s*\n\{", code, re.M):
        other = named.setdefault(m.group(1), path)
        if other != path and m.group(1) != "main":
            report(path, code[:m.start()].count("\n") + 1, f"{m.group(1)} is in {other.relative_to(ROOT)}, too")


def check_contract(path, rel, text):
    folder = rel.split("/")[0]
    if path.suffix != ".h" or folder not in CONTRACT or path.name in PURE_HEADERS or path.name.endswith("_priv.h"):
        return
    head = text[:6000]
    if not head.startswith(f"/* {rel}"):
        report(path, 1, f"header does not open with '/* {rel} - purpose'")
    for word in CONTRACT[folder]:
        if not re.search(rf"^ \* {word}\b", head, re.M):
            report(path, 1, f"header contract lacks the line '{word}'")


def check_file(path):
    rel = str(path.relative_to(ROOT))
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")
    code = strip_comments(text)
    if len(lines) > FILE_MAX:
        report(path, 1, f"{len(lines)} lines (at most {FILE_MAX}): two ideas in one file?")
    for i, line in enumerate(lines, 1):
        if len(line.expandtabs(8)) > LINE_MAX:
            report(path, i, f"line of {len(line.expandtabs(8))} columns (at most {LINE_MAX})")
        if line != line.rstrip() and not path.suffix == ".def":
            report(path, i, "trailing white space")
        if re.match(r" {8}", line) and not line.endswith("\\"):
            report(path, i, "indented with spaces")
    for i, line in enumerate(code.split("\n"), 1):
        ban = BANNED.search(line)
        if ban:
            report(path, i, f"banned call: {ban.group(1)}")
        if rel.startswith("shm/") and LOCKS.search(line):
            report(path, i, f"lock or pointer-holding structure in shared memory: {LOCKS.search(line).group(1)}")
    for i, line in enumerate(lines, 1):
        if UNFINISHED.search(line):
            report(path, i, "unfinished place")
    check_includes(path, rel, lines)
    check_functions(path, code)
    check_names(path, rel, code)
    check_contract(path, rel, text)


def check_used():
    """Settings that nobody reads, counters that nobody writes."""
    files = [p for p in sorted(ROOT.rglob("*.[ch]")) if p.relative_to(ROOT).parts[0] in {"shm", "ipc", "daemons"}]
    words = set(re.findall(r"(?:->|\.)\w+|\b[A-Z]\w+", "\n".join(strip_comments(p.read_text(encoding="utf-8")) for p in files)))
    table = ROOT / "daemons/common/config_settings.def"
    for field in re.findall(r"^(?:BOOL|INT|FLT|STR|WORD)\((\w+),", table.read_text(encoding="utf-8"), re.M):
        if field not in REFUSED and not words & {f"->{field}", f".{field}", f"KVP_CFG_{field}"}:
            report(table, 1, f"nobody reads the setting {field}")
    table = ROOT / "include/kvpick/counters.def"
    for name in re.findall(r"^\tX\((\w+), \"", table.read_text(encoding="utf-8"), re.M):
        if not words & {name, f"KVP_CTR_{name}", f"KVP_HIST_{name}"}:
            report(table, 1, f"nobody counts {name}")


def main():
    count = 0
    for path in files():
        check_file(path)
        count += 1
    check_used()
    for line in found:
        print(line)
    print(f"lint: {count} files, {len(found)} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
