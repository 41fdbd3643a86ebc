"""What users apply. Every function returns text for kubectl; several can be joined by `together`."""

import json

ZONE = "topology.kubernetes.io/zone"
HOST = "kubernetes.io/hostname"


def together(*objects: dict | str) -> str:
    texts = (one if isinstance(one, str) else json.dumps(one, indent=1) for one in objects)
    return "\n---\n".join(texts)


def namespace(name: str, label: str) -> str:
    made = thing("v1", "Namespace", name)
    made["metadata"]["labels"] = {label: ""}
    return together(made)


def claim(name: str, storage_class: str, mode: str = "ReadWriteMany", size: str = "1Gi") -> str:
    spec = {"storageClassName": storage_class, **claim_spec(mode, size)}
    return together(thing("v1", "PersistentVolumeClaim", name, spec=spec))


def pod(name: str, image: str, claim_name: str, node: str = "", below: str = "") -> str:
    """A pod that mounts a claim or a directory of it, on a node if one is named."""
    spec = with_claim(sleeper(image), claim_name, below)
    return together(thing("v1", "Pod", name, spec={**spec, **({"nodeName": node} if node else {})}))


def readers(image: str, claim_name: str, count: int = 3) -> str:
    """A pod in each zone that mounts the same claim."""
    spec = with_claim(sleeper(image), claim_name)
    # A zone that is cut off keeps its pod.
    spec["tolerations"] = [
        {"key": f"node.kubernetes.io/{why}", "operator": "Exists", "effect": "NoExecute"}
        for why in ("unreachable", "not-ready")
    ]
    return together(headless("pods", "pods"), one_in_each_zone("pods", "pods", count, spec))


def movable(name: str, image: str, claim_name: str, zone: str) -> str:
    """A Deployment of one pod that would rather be in a zone, and runs elsewhere when it cannot."""
    spec = with_claim(sleeper(image), claim_name)
    there = {"matchExpressions": [{"key": ZONE, "operator": "In", "values": [zone]}]}
    spec["affinity"] = {"nodeAffinity": {
        "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "preference": there}],
    }}
    return together(thing("apps/v1", "Deployment", name, spec=replicated(name, spec)))


def attributes_class(name: str, **parameters: str) -> str:
    return together({**thing("storage.k8s.io/v1", "VolumeAttributesClass", name),
                     "driverName": "csi.hither.dev", "parameters": parameters})


# Parts of them.

def thing(version: str, kind: str, name: str, **more: object) -> dict:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **more}


def container(image: str, *command: str, **more: object) -> dict:
    return {"name": "main", "image": image, "imagePullPolicy": "IfNotPresent",
            "command": list(command), **more}


def sleeper(image: str, **more: object) -> dict:
    """Spec of a pod that does nothing and ends at once."""
    return {"terminationGracePeriodSeconds": 1,
            "containers": [container(image, "sleep", "infinity", **more)]}


def with_claim(spec: dict, claim_name: str, below: str = "") -> dict:
    """The pod with a claim, or a directory of it, at /data."""
    mount = {"name": "data", "mountPath": "/data", **({"subPath": below} if below else {})}
    only = {**spec["containers"][0], "volumeMounts": [mount]}
    volume = {"name": "data", "persistentVolumeClaim": {"claimName": claim_name}}
    return {**spec, "containers": [only], "volumes": [volume]}


def claim_spec(mode: str, size: str) -> dict:
    return {"accessModes": [mode], "resources": {"requests": {"storage": size}}}


def replicated(app: str, spec: dict, **more: object) -> dict:
    """What Deployments and StatefulSets say of their pods."""
    return {"selector": {"matchLabels": {"app": app}},
            "template": {"metadata": {"labels": {"app": app}}, "spec": spec}, **more}


def one_in_each_zone(app: str, service: str, count: int, spec: dict, **more: object) -> dict:
    """A StatefulSet whose pods are in zones of their own."""
    spread = {"maxSkew": 1, "topologyKey": ZONE, "whenUnsatisfiable": "DoNotSchedule",
              "labelSelector": {"matchLabels": {"app": app}}}
    pods = replicated(app, {**spec, "topologySpreadConstraints": [spread]})
    return thing("apps/v1", "StatefulSet", app, spec={
        "serviceName": service, "replicas": count, "podManagementPolicy": "Parallel", **pods, **more,
    })


def service(name: str, app: str, port: int, **more: object) -> dict:
    return thing("v1", "Service", name,
                 spec={"selector": {"app": app}, "ports": [{"port": port}], **more})


def headless(name: str, app: str) -> dict:
    return thing("v1", "Service", name, spec={"clusterIP": "None", "selector": {"app": app}})
