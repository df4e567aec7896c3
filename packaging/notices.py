"""Writes what a package says of the parts that others wrote, from what cargo knows of them:

    THIRD-PARTY.txt  which crates are in it, and the text of each of their licences, once
    sbom.cdx.json    the same for programs: a list of parts in CycloneDX 1.5

    notices.py TRIPLE ZIG FOLDER

ZIG is the folder of the compiler that links: a part of its runtime is in the files. Fails if a
crate has no licence text that it could take. Called by scripts/dist; the files depend on the
sources alone, with SOURCE_DATE_EPOCH for the time.
"""

import json
import os
import re
import subprocess
import sys
import uuid
from datetime import datetime, timezone
from pathlib import Path

OURS = ["rlock-module", "rlock-cli"]
TEXTS = re.compile(r"^(licen[sc]e|copying|unlicense|notice|copyright)", re.IGNORECASE)


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def linked_crates(triple):
    """The (name, version) of what is compiled in, with the features of this build."""
    found = set()
    # Each by itself: what the one needs is no matter of the other's.
    for package in OURS:
        tree = run("cargo", "tree", "--locked", "-p", package, "-e", "normal",
                   "--target", triple, "--prefix", "none", "-f", "{p}")
        for line in tree.splitlines():
            name, version = line.split()[:2]
            found.add((name, version.removeprefix("v")))
    return found


def packages(triple):
    metadata = json.loads(run("cargo", "metadata", "--locked", "--format-version", "1",
                              "--filter-platform", triple))
    linked = linked_crates(triple)
    chosen = {package["id"]: package for package in metadata["packages"]
              if (package["name"], package["version"]) in linked}
    edges = {}
    for node in metadata["resolve"]["nodes"]:
        if node["id"] in chosen:
            edges[node["id"]] = sorted(
                dep["pkg"] for dep in node["deps"]
                if dep["pkg"] in chosen and any(kind["kind"] is None for kind in dep["dep_kinds"]))
    return chosen, edges, metadata["packages"]


def texts_in(folder):
    files = [path for path in folder.iterdir() if TEXTS.match(path.name)]
    files += [path for path in folder.glob("third_party/**/*") if TEXTS.match(path.name)]
    return [path.read_text(errors="replace").strip() for path in sorted(files) if path.is_file()]


def texts_of(package, every):
    """Its licence texts, or those of another crate from the same repository and licence."""
    own = texts_in(Path(package["manifest_path"]).parent)
    if own:
        return own
    for other in every:
        same = [other[key] == package[key] for key in ("repository", "license")]
        if all(same) and package["repository"]:
            texts = texts_in(Path(other["manifest_path"]).parent)
            if texts:
                return texts
    sys.exit(f"notices.py: {package['name']} {package['version']} has no licence text")


def checksums():
    """SHA-256 of each crate's archive, from Cargo.lock."""
    entry = re.compile(r'name = "(.*)"\nversion = "(.*)"\nsource = .*\nchecksum = "(.*)"')
    return {(name, version): sum for name, version, sum in
            entry.findall(Path("Cargo.lock").read_text())}


def expression(package):
    # The old way to write OR, which SPDX does not know.
    return package["license"].replace("/", " OR ")


def runtimes(zig):
    """What compiler and linker add of their own: name, version, licence, text."""
    rustc = run("rustc", "-vV")
    release = re.search(r"^release: (.*)$", rustc, re.MULTILINE)[1]
    version = run(f"{zig}/zig", "version").strip()
    unwind = (Path(zig) / "lib/libunwind/LICENSE.TXT").read_text().strip()
    return [
        ("rust-std", release, "MIT OR Apache-2.0",
         "The texts are in THIRD-PARTY-rust.html, as the compiler brings them."),
        ("llvm-libunwind", f"zig-{version}", "Apache-2.0 WITH LLVM-exception", unwind),
        ("zig", version, "MIT", (Path(zig) / "LICENSE").read_text().strip()),
    ]


def third_party(foreign, every, extra):
    lines = ["librlock.so and rlock contain these works of others, each under the licence that",
             "stands beside it. Their texts follow.", ""]
    users = {}
    for package in foreign:
        title = f"{package['name']} {package['version']}"
        lines.append(f"{title:40} {expression(package)}")
        for text in texts_of(package, every):
            users.setdefault(text, []).append(title)
    for name, version, licence, text in extra:
        lines.append(f"{name + ' ' + version:40} {licence}")
        users.setdefault(text, []).append(f"{name} {version}")
    for text, titles in users.items():
        lines += ["", "=" * 80, "Of " + ", ".join(titles) + ":", "", text]
    return "\n".join(lines) + "\n"


def purl_of(package):
    return f"pkg:cargo/{package['name']}@{package['version']}"


def component(package, sums):
    name, version = package["name"], package["version"]
    purl = purl_of(package)
    told = {"type": "library", "bom-ref": purl, "name": name, "version": version,
            "scope": "required"}
    if (name, version) in sums:
        told["hashes"] = [{"alg": "SHA-256", "content": sums[name, version]}]
    told["licenses"] = [{"expression": expression(package)}]
    told["purl"] = purl
    if package["repository"]:
        told["externalReferences"] = [{"type": "vcs", "url": package["repository"]}]
    return told


def bill(triple, chosen, edges, extra):
    sums = checksums()
    version = next(package["version"] for package in chosen.values() if package["name"] == OURS[0])
    ref = f"rlock-{version}-{triple}"
    seconds = int(os.environ["SOURCE_DATE_EPOCH"])
    purls = {id: purl_of(package) for id, package in chosen.items()}
    ours = [id for id, package in chosen.items() if package["name"] in OURS]
    components = [component(package, sums) for package in chosen.values()]
    for name, its, licence, _ in extra:
        components.append({"type": "library", "bom-ref": f"{name}@{its}", "name": name,
                           "version": its, "scope": "required",
                           "licenses": [{"expression": licence}]})
    depends = [{"ref": purls[id], "dependsOn": sorted(purls[to] for to in tos)}
               for id, tos in edges.items()]
    depends.append({"ref": ref, "dependsOn": sorted(
        [purls[id] for id in ours] + [f"{name}@{its}" for name, its, _, _ in extra])})
    stamp = datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        # The same parts at the same time are the same list.
        "serialNumber": "urn:uuid:" + str(uuid.uuid5(uuid.NAMESPACE_URL, f"{ref} {seconds}")),
        "version": 1,
        "metadata": {
            "timestamp": stamp,
            "component": {"type": "application", "bom-ref": ref, "name": "rlock",
                          "version": version, "licenses": [{"license": {"id": "MIT"}}]},
        },
        "components": sorted(components, key=lambda told: told["bom-ref"]),
        "dependencies": sorted(depends, key=lambda told: told["ref"]),
    }


def main():
    triple, zig, folder = sys.argv[1:]
    chosen, edges, every = packages(triple)
    foreign = [package for package in chosen.values() if package["source"]]
    foreign.sort(key=lambda package: (package["name"], package["version"]))
    extra = runtimes(zig)
    folder = Path(folder)
    (folder / "THIRD-PARTY.txt").write_text(third_party(foreign, every, extra))
    told = bill(triple, chosen, edges, extra)
    (folder / "sbom.cdx.json").write_text(json.dumps(told, indent=1) + "\n")


main()
