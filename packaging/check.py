"""Reads the files of this folder that other programs will read, and says what is wrong in them:
names that lead nowhere, selectors that select nothing. Called by a test (tests/it/packaging.rs).
"""

import sys
from pathlib import Path

import yaml

HERE = Path(__file__).parent
wrong = []


def expect(condition, what):
    if not condition:
        wrong.append(what)


def check_compose(path):
    told = yaml.safe_load(path.read_text())
    expect(set(told) <= {"services", "volumes"}, f"{path}: {set(told)}")
    for name, service in told["services"].items():
        expect("image" in service or "build" in service, f"{name} has no image")
        for port in service.get("ports", []):
            expect(port.startswith("127.0.0.1:"), f"{name} is open to all: {port}")
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            expect(source.startswith("./") or source in told["volumes"], f"no volume {source}")
        expect(all(isinstance(word, str) for word in service["command"]), "words that are no text")


def check_objects(path):
    objects = list(yaml.safe_load_all(path.read_text()))
    named = {(its["kind"], its["metadata"]["name"]): its for its in objects}
    expect(len(named) == len(objects), f"{path}: a name twice")
    for its in objects:
        expect("apiVersion" in its, f"{its['kind']} has no apiVersion")
    sets = [its for its in objects if its["kind"] == "StatefulSet"]
    expect(len(sets) == 1, f"{path}: {len(sets)} sets")
    for its in sets:
        check_set(its["spec"], named)


def check_set(spec, named):
    labels = spec["template"]["metadata"]["labels"]
    expect(spec["selector"]["matchLabels"] == labels, "the set does not select its pods")
    service = named.get(("Service", spec["serviceName"]))
    expect(service and service["spec"]["selector"] == labels, "the service does not select them")
    pod = spec["template"]["spec"]
    volumes = {its["name"] for its in pod["volumes"]}
    volumes |= {its["metadata"]["name"] for its in spec["volumeClaimTemplates"]}
    for its in pod["volumes"]:
        for kind, name in (("configMap", "name"), ("secret", "secretName")):
            if kind in its:
                key = (kind[0].upper() + kind[1:], its[kind][name])
                expect(key in named, f"volume {its['name']}: no {key}")
    for container in pod["initContainers"] + pod["containers"]:
        expect("image" in container, f"{container['name']} has no image")
        for mount in container["volumeMounts"]:
            expect(mount["name"] in volumes, f"{container['name']}: no volume {mount['name']}")
    mounted = [{mount["name"]: mount["mountPath"] for mount in its["volumeMounts"]}
               for its in (pod["initContainers"][0], pod["containers"][0])]
    expect(mounted[0]["modules"] == mounted[1]["modules"], "the module is copied elsewhere")


check_compose(HERE / "container/compose.yaml")
check_objects(HERE / "kubernetes/redis.yaml")
sys.exit("\n".join(wrong) or 0)
