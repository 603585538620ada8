"""Programs of a node with the places of include/kvpick/point.h, of which single processes are killed at one."""
import os
import shutil
import tempfile

import node

# The next process takes the first place that is left; those that find none live. $1 tells the verbs of kvpickctl.
SCRIPT = """#!/bin/sh
[ -z "{verb}" ] || [ "$1" = "{verb}" ] || exec {program} "$@"
for at in {dir}/{name}.at.*; do
	! mv "$at" "{dir}/taken" 2>/dev/null || export KVP_CRASH_AT=$(cat {dir}/taken)
	break
done
exec {program} "$@"
"""


class Points:
    """While it is entered, nodes run with programs of its own: names={program: verb or None}."""

    def __init__(self, **names):
        self.names = {name.replace("_", "-"): verb or "" for name, verb in names.items()}
        self.cnt = 0

    def arm(self, name, *places):
        """One process of that name after the other is killed at one of the places: "name:n", its n-th hit."""
        for place in places:
            self.cnt += 1
            with open(f"{self.dir.name}/new", "w", encoding="ascii") as f:
                f.write(place)
            os.rename(f"{self.dir.name}/new", f"{self.dir.name}/{name}.at.{self.cnt:03}")

    def __enter__(self):
        self.dir, self.before = tempfile.TemporaryDirectory(prefix="kvp-points"), node.BUILD
        build, d = os.path.abspath(node.BUILD), self.dir.name
        for name in os.listdir(build):
            if name == "kvpick":
                shutil.copy(f"{build}/{name}", d)  # it starts what is beside its own program file
            elif name in self.names:
                with open(f"{d}/{name}", "w", encoding="ascii") as f:
                    f.write(SCRIPT.format(dir=d, name=name, verb=self.names[name],
                                          program=f"{build}/tests/points/{name}"))
                os.chmod(f"{d}/{name}", 0o755)
            elif name.startswith("kvpick"):
                os.symlink(f"{build}/{name}", f"{d}/{name}")
        node.BUILD = d
        return self

    def __exit__(self, *exc):
        node.BUILD = self.before
        self.dir.cleanup()
