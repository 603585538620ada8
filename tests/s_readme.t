#!/usr/bin/env python3
"""The README says what the programs say: its settings table is the one that the code prints, its files exist, its make
targets are targets, its verbs are verbs, and the settings and counters that it names are there."""
import os
import re
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from node import BUILD, Tap

BEGIN, END = "<!-- settings: printed by `kvpick help settings` -->\n", "<!-- end of settings -->\n"
# Variables that are no settings of kvpick's programs.
OTHERS = {"KVPICK_LOOP"}


def commands(text):
    """What stands in code: blocks and words."""
    parts = text.split("```")
    return parts[1::2] + [word + " " for prose in parts[::2] for word in prose.split("`")[1::2]]


def main():
    tap = Tap()
    with open("README.md", encoding="utf-8") as f:
        text = f.read()
    table = subprocess.run([f"{BUILD}/kvpick", "help", "settings"], capture_output=True, text=True, check=True).stdout
    if "--write" in sys.argv:
        head, rest = text.split(BEGIN)
        with open("README.md", "w", encoding="utf-8") as f:
            f.write(head + BEGIN + table + END + rest.split(END)[1])
        return 0
    shown = text.split(BEGIN)[1].split(END)[0] if BEGIN in text and END in text else ""
    tap.ok(shown == table, "the settings table is what the code prints (tests/s_readme.t --write renews it)")
    for path in sorted(set(re.findall(r"`((?:include|shm|ipc|daemons|tests|bench|deploy)/[\w./]*)`", text))):
        tap.ok(os.path.exists(path), f"{path} exists")
    with open("Makefile", encoding="utf-8") as f:
        targets = set(" ".join(re.findall(r"^([\w -]+):", f.read(), re.M)).split())
    for target in sorted(set(re.findall(r"\bmake ([a-z][\w-]+)", text))):
        tap.ok(target in targets, f"make {target} is a target")
    for program in ("kvpick", "kvpickctl"):
        said = subprocess.run([f"{BUILD}/{program}", "help"], capture_output=True, text=True, check=True).stdout
        verbs = set(re.findall(rf"^  (?:{program} )?([a-z-]+) ", said, re.M)) | {"help"}
        # "-u kvpick kvpickctl": a user, not a program
        for verb in sorted(set(re.findall(rf"(?<![\w.-]){program} ([a-z][a-z-]*)\s", "\n".join(commands(text)))) - {"kvpickctl"}):
            tap.ok(verb in verbs, f"{program} {verb} is a verb", verbs)
    prose = text.replace(shown, "")
    settings = set(re.findall(r"^\| `(\w+)`", table, re.M))
    for name in sorted(set(re.findall(r"\b(?:KVPICK|DYN)_[A-Z0-9_]*[A-Z0-9]\b(?!_)", prose)) - OTHERS):
        tap.ok(name in settings, f"{name} is a setting")
    with open("include/kvpick/counters.def", encoding="utf-8") as f:
        counters = set(re.findall(r'"(\w+\.\w+\.\w+)"', f.read()))
    for name in sorted(set(re.findall(r"`((?:any|indexer|httpd|extproc|peer|discovery)\.\w+\.\w+)`", prose))):
        tap.ok(name in counters, f"{name} is a counter")
    return tap.done()


sys.exit(main())
