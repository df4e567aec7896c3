"""Writes the zip that Redis Software takes as a custom module: librlock.so and module.json.

    redis-software.py MODULE MACHINE VERSION ZIP

The commands are those that the server on the path tells of the module of this machine, which is in
the environment as RLOCK_MODULE. Called by scripts/dist. Two zips of one module are equal.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path


def ask(socket, *command):
    told = subprocess.run(["redis-cli", "-s", socket, "--json", *command],
                          check=True, capture_output=True, text=True)
    return json.loads(told.stdout)


def wait_for(server, socket):
    until = time.monotonic() + 20
    while subprocess.run(["redis-cli", "-s", socket, "PING"], capture_output=True).returncode != 0:
        if server.poll() is not None or time.monotonic() > until:
            sys.exit("redis-software.py: the server did not start with the module")
        time.sleep(0.05)


def commands(module):
    with tempfile.TemporaryDirectory() as folder:
        socket = f"{folder}/socket"
        server = subprocess.Popen(
            ["redis-server", "--port", "0", "--unixsocket", socket, "--dir", folder, "--save", "",
             "--loadmodule", module], stdout=subprocess.DEVNULL)
        try:
            wait_for(server, socket)
            names = sorted(ask(socket, "COMMAND", "LIST", "FILTERBY", "MODULE", "rlock"))
            told = ask(socket, "COMMAND", "INFO", *names)
            number = next(its for its in ask(socket, "MODULE", "LIST") if its["name"] == "rlock")
        finally:
            server.terminate()
            server.wait()
    described = [{
        "command_name": name,
        "command_arity": arity,
        "flags": sorted(flags),
        "first_key": first,
        "last_key": last,
        "step": step,
    } for name, arity, flags, first, last, step, *_ in told]
    return described, number["ver"]


def main():
    module, machine, version, zip = sys.argv[1:]
    described, number = commands(os.environ["RLOCK_MODULE"])
    content = Path(module).read_bytes()
    told = {
        "module_name": "rlock",
        "module_file": "librlock.so",
        "display_name": "RLOCK",
        "description": "Distributed locks",
        "author": "the RLOCK authors",
        "license": "MIT",
        "version": number,
        "semantic_version": version,
        "ramp_format_version": 1,
        "os": "Linux",
        "architecture": machine,
        "sha256": hashlib.sha256(content).hexdigest(),
        "min_redis_version": "7.0",
        "min_redis_pack_version": "7.0",
        "compatible_redis_version": "7.0",
        "command_line_args": "",
        "config_command": "",
        "dependencies": {},
        # Only what is tested on open servers. Not crdb: locks cannot be merged.
        "capabilities": ["types", "clustering", "replica_of", "failover_migrate", "persistence_aof",
                         "persistence_rdb", "backup_restore", "eviction_expiry", "resp3"],
        "commands": described,
    }
    date = time.gmtime(int(os.environ["SOURCE_DATE_EPOCH"]))[:6]
    with zipfile.ZipFile(zip, "w") as archive:
        for name, its in [("librlock.so", content),
                          ("module.json", json.dumps(told, indent=1, sort_keys=True) + "\n")]:
            entry = zipfile.ZipInfo(name, date)
            entry.external_attr = (0o755 if name.endswith(".so") else 0o644) << 16
            entry.create_system = 3  # as on Linux, which the rights above are of
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, its)


main()
