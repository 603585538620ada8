#!/usr/bin/env python3
"""The README says what the programs say: its settings table is the one that the code prints, its files exist,
its make targets are targets."""
import os
import re
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from node import BUILD, Tap

BEGIN, END = "<!-- settings: printed by `kvpick help settings` -->\n", "<!-- end of settings -->\n"


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
    return tap.done()


sys.exit(main())
