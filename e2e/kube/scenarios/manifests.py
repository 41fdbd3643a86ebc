"""What users apply, as text."""

ZONE = "topology.kubernetes.io/zone"


def claim(name: str, storage_class: str, mode: str = "ReadWriteMany", size: str = "1Gi") -> str:
    return f"""\
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: {name}}}
spec:
  accessModes: [{mode}]
  storageClassName: {storage_class}
  resources: {{requests: {{storage: {size}}}}}
"""


def readers(image: str, claim_name: str, count: int = 3) -> str:
    """A pod in each zone that mounts the same claim."""
    return f"""\
apiVersion: v1
kind: Service
metadata: {{name: pods}}
spec:
  clusterIP: None
  selector: {{app: pods}}
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {{name: pods}}
spec:
  serviceName: pods
  replicas: {count}
  podManagementPolicy: Parallel
  selector: {{matchLabels: {{app: pods}}}}
  template:
    metadata: {{labels: {{app: pods}}}}
    spec:
      terminationGracePeriodSeconds: 1
      tolerations:
      - {{key: node.kubernetes.io/unreachable, operator: Exists, effect: NoExecute}}
      - {{key: node.kubernetes.io/not-ready, operator: Exists, effect: NoExecute}}
      topologySpreadConstraints:
      - maxSkew: 1
        topologyKey: {ZONE}
        whenUnsatisfiable: DoNotSchedule
        labelSelector: {{matchLabels: {{app: pods}}}}
      containers:
      - name: main
        image: {image}
        imagePullPolicy: IfNotPresent
        command: [sleep, infinity]
        volumeMounts: [{{name: data, mountPath: /data}}]
      volumes:
      - name: data
        persistentVolumeClaim: {{claimName: {claim_name}}}
"""


def pod(name: str, image: str, claim_name: str, node: str = "") -> str:
    fixed = f"  nodeName: {node}\n" if node else ""
    return f"""\
apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
{fixed}  terminationGracePeriodSeconds: 1
  containers:
  - name: main
    image: {image}
    imagePullPolicy: IfNotPresent
    command: [sleep, infinity]
    volumeMounts: [{{name: data, mountPath: /data}}]
  volumes:
  - name: data
    persistentVolumeClaim: {{claimName: {claim_name}}}
"""


def movable(name: str, image: str, claim_name: str, zone: str) -> str:
    """A Deployment of one pod that would rather be in a zone, and runs elsewhere when it cannot."""
    return f"""\
apiVersion: apps/v1
kind: Deployment
metadata: {{name: {name}}}
spec:
  selector: {{matchLabels: {{app: {name}}}}}
  template:
    metadata: {{labels: {{app: {name}}}}}
    spec:
      terminationGracePeriodSeconds: 1
      affinity:
        nodeAffinity:
          preferredDuringSchedulingIgnoredDuringExecution:
          - weight: 100
            preference:
              matchExpressions: [{{key: {ZONE}, operator: In, values: [{zone}]}}]
      containers:
      - name: main
        image: {image}
        imagePullPolicy: IfNotPresent
        command: [sleep, infinity]
        volumeMounts: [{{name: data, mountPath: /data}}]
      volumes:
      - name: data
        persistentVolumeClaim: {{claimName: {claim_name}}}
"""


def attributes_class(name: str, parameters: str) -> str:
    return f"""\
apiVersion: storage.k8s.io/v1
kind: VolumeAttributesClass
metadata: {{name: {name}}}
driverName: csi.hither.dev
parameters: {{{parameters}}}
"""
