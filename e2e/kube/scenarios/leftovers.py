"""What keeps custom resources, and so their definitions, from going."""

from cluster.kubectl import Kubectl

KINDS = ("hitherclusters.hither.dev", "chunkserverpools.hither.dev", "chunkstorageclasses.hither.dev")


def in_the_way(kubectl: Kubectl) -> str:
    """A line for each object of Hither, in any namespace."""
    return "\n".join(described(one) for kind in KINDS
                     for one in kubectl.json(kind, "--all-namespaces")["items"])


def described(one: dict) -> str:
    """An object as somebody has to know it who wants it to go."""
    metadata = one["metadata"]
    parts = [f"{one['kind']} {metadata['name']} in namespace {metadata['namespace']}"]
    if "deletionTimestamp" in metadata:
        parts.append(f"going since {metadata['deletionTimestamp']}")
    if metadata.get("finalizers"):
        parts.append(f"kept by {', '.join(metadata['finalizers'])}")
    parts += [condition["message"] for condition in one.get("status", {}).get("conditions", [])
              if condition["type"] == "DeletionBlocked" and condition["status"] == "True"]
    return "; ".join(parts)
