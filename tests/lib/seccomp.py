"""Puts a seccomp profile, in the form that container runtimes read, before a command: for tests of what a container
forbids. x86-64 only."""
import ctypes
import json
import re
import struct

LD_W_ABS, JEQ, ALU_AND, RET = 0x20, 0x15, 0x54, 0x06
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
ARCH_X86_64 = 0xC000003E
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, FILTER = 22, 38, 2


def numbers():
    with open("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", encoding="ascii") as f:
        return {name: int(n) for name, n in re.findall(r"#define __NR_(\w+) (\d+)", f.read())}


def verdict(action, errno):
    return ALLOW if action == "SCMP_ACT_ALLOW" else ERRNO | errno


def program(profile, deny=()):
    """The filter as BPF instructions. Calls in deny fail with EPERM, whatever the profile says. Answers (code, unknown
    names)."""
    code = [(LD_W_ABS, 0, 0, 4), (JEQ, 1, 0, ARCH_X86_64), (RET, 0, 0, KILL), (LD_W_ABS, 0, 0, 0)]
    nr, unknown = numbers(), []
    for name in deny:
        code += [(JEQ, 0, 1, nr[name]), (RET, 0, 0, ERRNO | 1)]
    for rule in profile["syscalls"]:
        for name in rule["names"]:
            if name not in nr:
                unknown.append(name)
                continue
            out = (RET, 0, 0, verdict(rule["action"], rule.get("errnoRet", 1)))
            if not rule.get("args"):
                code += [(JEQ, 0, 1, nr[name]), out]
                continue
            (arg,) = rule["args"]
            assert arg["op"] == "SCMP_CMP_MASKED_EQ" and arg["value"] < 1 << 32
            code += [(JEQ, 0, 5, nr[name]), (LD_W_ABS, 0, 0, 16 + 8 * arg["index"]), (ALU_AND, 0, 0, arg["value"]),
                     (JEQ, 0, 1, arg.get("valueTwo", 0)), out, (LD_W_ABS, 0, 0, 0)]
    code.append((RET, 0, 0, verdict(profile["defaultAction"], profile.get("defaultErrnoRet", 1))))
    return code, unknown


def install(code):
    """For preexec_fn: forbids in this process and all that come from it."""
    raw = b"".join(struct.pack("HBBI", *c) for c in code)
    data = ctypes.create_string_buffer(raw, len(raw))
    prog = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(data))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(PR_SET_SECCOMP, FILTER, prog, 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


def load(path):
    with open(path, encoding="utf-8") as f:
        return json.load(f)


if __name__ == "__main__":
    # seccomp.py PROFILE DENIED,CALLS COMMAND...: runs the command under it.
    import os
    import sys
    install(program(load(sys.argv[1]), [x for x in sys.argv[2].split(",") if x])[0])
    os.execvp(sys.argv[3], sys.argv[3:])
