"""Manifests for Kubernetes, for `kubectl apply -k deploy/k8s`: brokers, lookup daemons, an etcd, and who may talk to
whom. What differs between installations (namespace, image, sizes) is for a kustomization of one's own."""

from __future__ import annotations

from nsqha.cli.generate.topology import (
    BROKER_PORTS,
    DATA_PATH,
    ETCD_PEER_PORT,
    ETCD_PORT,
    IMAGE,
    LIVE_PATH,
    LOOKUPD_PORTS,
    SECRET_FILE,
    STARTED_PATH,
    UID,
    DaemonPort,
    HttpProbe,
    port,
    probes,
    stop_seconds,
    variables,
)
from nsqha.options import LookupdOptions, Options

FOLDER = "deploy/k8s"
ETCD_IMAGE = "quay.io/coreos/etcd:v3.5.24"
BROKERS, LOOKUPDS, ETCDS = 3, 2, 3
PROBE_TIMEOUT_SECONDS = 5
WRITTEN = "# Written by `nsqha generate k8s`; changes go into a kustomization of your own, with this as a resource.\n"
POD_SECURITY = f"""\
      securityContext:
        runAsNonRoot: true
        runAsUser: {UID}
        runAsGroup: {UID}
        fsGroup: {UID}
        fsGroupChangePolicy: OnRootMismatch
        seccompProfile:
          type: RuntimeDefault
"""
CONTAINER_SECURITY = """\
          securityContext:
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities: {drop: [ALL]}
"""
ENDPOINTS = ",".join(f"nsqha-etcd-{n}.nsqha-etcd:{ETCD_PORT}" for n in range(ETCDS))


def files() -> dict[str, str]:
    parts = {
        "broker.yaml": _broker(),
        "lookupd.yaml": _lookupd(),
        "etcd.yaml": _etcd(),
        "services.yaml": _services(),
        "disruption.yaml": "---\n".join(_budget(name) for name in ("broker", "lookupd", "etcd")),
        "network.yaml": _network(),
    }
    resources = "".join(f"  - {name}\n" for name in parts)
    kustomization = f"""\
{WRITTEN}#   openssl rand -hex 32 | kubectl create secret generic nsqha-cluster --from-file=secret=/dev/stdin
#   kubectl apply -k deploy/k8s
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources:
{resources}images:
  - name: {IMAGE}
    newName: {IMAGE}
    newTag: latest
"""
    texts = {name: WRITTEN + text for name, text in parts.items()} | {"kustomization.yaml": kustomization}
    return {f"{FOLDER}/{name}": text for name, text in texts.items()}


# ---- pods


def _broker() -> str:
    given = variables(
        Options,
        etcd_endpoints=ENDPOINTS,
        data_path=DATA_PATH,
        # The name of the pod, which stays; its address does not.
        broadcast_address="$(POD_NAME).nsqha-broker.$(POD_NAMESPACE).svc",
        node_name="$(POD_NAME)",
        host="$(HOST_NAME)",
        grpc_address=f"0.0.0.0:{port(BROKER_PORTS, 'grpc')}",
        peer_address=f"0.0.0.0:{port(BROKER_PORTS, 'peer')}",
        cluster_secret_file=SECRET_FILE,
    )
    ports = tuple(p for p in BROKER_PORTS if p.name != "segments")  # which asks for certificates
    volume = f"""\
            - {{name: data, mountPath: {DATA_PATH}}}
"""
    claims = """\
  volumeClaimTemplates:
    - metadata:
        name: data
      spec:
        accessModes: [ReadWriteOnce]
        resources:
          requests:
            storage: 100Gi
"""
    return _stateful_set("broker", BROKERS, ["nsqha", "broker"], given, ports, STARTED_PATH, volume, claims)


def _lookupd() -> str:
    given = variables(
        LookupdOptions,
        etcd_endpoints=ENDPOINTS,
        broadcast_address="$(POD_NAME).nsqha-lookupd.$(POD_NAMESPACE).svc",
        cluster_secret_file=SECRET_FILE,
    )
    return _stateful_set("lookupd", LOOKUPDS, ["nsqha", "lookupd"], given, LOOKUPD_PORTS, LIVE_PATH, "", "")


def _stateful_set(
    name: str,
    replicas: int,
    command: list[str],
    environment: dict[str, str],
    ports: tuple[DaemonPort, ...],
    started: str,
    volume: str,
    claims: str,
) -> str:
    env = "".join(f'            - {{name: {variable}, value: "{value}"}}\n' for variable, value in environment.items())
    shown = "".join(f"            - {{name: {p.name}, containerPort: {p.number}}}\n" for p in ports)
    return f"""\
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: nsqha-{name}
  labels: {_labels(name)}
spec:
  serviceName: nsqha-{name}
  replicas: {replicas}
  # All at once: partitions need several of them, and none waits for another.
  podManagementPolicy: Parallel
  # One at a time, and the next when this one is ready, which means in sync.
  updateStrategy:
    type: RollingUpdate
  minReadySeconds: 5
  selector:
    matchLabels: {_selector(name)}
  template:
    metadata:
      labels: {_labels(name)}
      annotations:
        prometheus.io/scrape: "true"
        prometheus.io/port: "{port(ports, "http")}"
    spec:
      # Above what a stop may take: hand over, answer what is under way, write.
      terminationGracePeriodSeconds: {stop_seconds()}
      # They would be variables of the daemon: NSQD_PORT, and so on.
      enableServiceLinks: false
      automountServiceAccountToken: false
{POD_SECURITY}\
      topologySpreadConstraints:
{_spread(name)}\
      containers:
        - name: {name}
          image: {IMAGE}
          command: [{", ".join(command)}]
          env:
            - {{name: POD_NAME, valueFrom: {{fieldRef: {{fieldPath: metadata.name}}}}}}
            - {{name: POD_NAMESPACE, valueFrom: {{fieldRef: {{fieldPath: metadata.namespace}}}}}}
            - {{name: HOST_NAME, valueFrom: {{fieldRef: {{fieldPath: spec.nodeName}}}}}}
{env}          ports:
{shown}{''.join(map(_probe, probes(started)))}\
          resources:
            requests: {{cpu: 500m, memory: 1Gi}}
            limits: {{memory: 4Gi}}
{CONTAINER_SECURITY}\
          volumeMounts:
{volume}            - {{name: secret, mountPath: {SECRET_FILE.rpartition("/")[0]}, readOnly: true}}
            - {{name: tmp, mountPath: /tmp}}
      volumes:
        - name: secret
          secret: {{secretName: nsqha-cluster, defaultMode: 288}}
        - name: tmp
          emptyDir: {{}}
{claims}"""


def _probe(probe: HttpProbe) -> str:
    why = f"          # {probe.why}\n" if probe.why else ""
    failures = f"            failureThreshold: {probe.failures}\n" if probe.failures else ""
    return f"""\
{why}          {probe.kind}Probe:
            httpGet: {{path: {probe.path}, port: {probe.port}}}
            periodSeconds: {probe.period_seconds}
            timeoutSeconds: {PROBE_TIMEOUT_SECONDS}
{failures}"""


def _labels(name: str) -> str:
    return f"{{app.kubernetes.io/name: nsqha, app.kubernetes.io/component: {name}, app.kubernetes.io/part-of: nsqha}}"


def _selector(name: str) -> str:
    return f"{{app.kubernetes.io/name: nsqha, app.kubernetes.io/component: {name}}}"


def _spread(name: str) -> str:
    """Over zones where there are some; never two on one machine, which would not hold what they are there for."""
    return "".join(
        f"""\
        - maxSkew: 1
          topologyKey: {key}
          whenUnsatisfiable: {otherwise}
          labelSelector:
            matchLabels: {_selector(name)}
"""
        for key, otherwise in (
            ("topology.kubernetes.io/zone", "ScheduleAnyway"),
            ("kubernetes.io/hostname", "DoNotSchedule"),
        )
    )


def _etcd() -> str:
    members = ",".join(f"nsqha-etcd-{n}=http://nsqha-etcd-{n}.nsqha-etcd:{ETCD_PEER_PORT}" for n in range(ETCDS))
    return f"""\
# An etcd of its own. Where there is one, leave this file out, and say in a patch where it is and how to get in.
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: nsqha-etcd
  labels: {_labels("etcd")}
spec:
  serviceName: nsqha-etcd
  replicas: {ETCDS}
  podManagementPolicy: Parallel
  selector:
    matchLabels: {_selector("etcd")}
  template:
    metadata:
      labels: {_labels("etcd")}
    spec:
      enableServiceLinks: false
      automountServiceAccountToken: false
{POD_SECURITY}\
      topologySpreadConstraints:
{_spread("etcd")}\
      containers:
        - name: etcd
          image: {ETCD_IMAGE}
          env:
            - {{name: POD_NAME, valueFrom: {{fieldRef: {{fieldPath: metadata.name}}}}}}
          command:
            - etcd
            - --name=$(POD_NAME)
            - --data-dir=/etcd-data/data
            - --listen-client-urls=http://0.0.0.0:{ETCD_PORT}
            - --advertise-client-urls=http://$(POD_NAME).nsqha-etcd:{ETCD_PORT}
            - --listen-peer-urls=http://0.0.0.0:{ETCD_PEER_PORT}
            - --initial-advertise-peer-urls=http://$(POD_NAME).nsqha-etcd:{ETCD_PEER_PORT}
            - --initial-cluster={members}
            - --initial-cluster-token=nsqha
            - --auto-compaction-retention=1h
          ports:
            - {{name: client, containerPort: {ETCD_PORT}}}
            - {{name: peer, containerPort: {ETCD_PEER_PORT}}}
{_probe(HttpProbe("readiness", "/health", 5, port="client"))}\
          resources:
            requests: {{cpu: 200m, memory: 256Mi}}
            limits: {{memory: 1Gi}}
{CONTAINER_SECURITY}\
          volumeMounts:
            - {{name: data, mountPath: /etcd-data}}
  volumeClaimTemplates:
    - metadata:
        name: data
      spec:
        accessModes: [ReadWriteOnce]
        resources:
          requests:
            storage: 10Gi
"""


# ---- what is around them


def _services() -> str:
    headless = [
        ("broker", tuple(p for p in BROKER_PORTS if p.name != "segments")),
        ("lookupd", LOOKUPD_PORTS),
        ("etcd", (DaemonPort("client", ETCD_PORT), DaemonPort("peer", ETCD_PEER_PORT))),
    ]
    texts = [_service(f"nsqha-{name}", name, ports, headless=True) for name, ports in headless]
    texts.append(_service("nsqd", "broker", tuple(p for p in BROKER_PORTS if not p.inside), headless=False))
    texts.append(_service("nsqlookupd", "lookupd", LOOKUPD_PORTS, headless=False))
    return "---\n".join(texts)


def _service(name: str, component: str, ports: tuple[DaemonPort, ...], *, headless: bool) -> str:
    shown = "".join(f"    - {{name: {p.name}, port: {p.number}, targetPort: {p.name}}}\n" for p in ports)
    kind = (
        # Nodes find each other before they are ready, and to become so.
        "  clusterIP: None\n  publishNotReadyAddresses: true\n"
        if headless
        else ""
    )
    return f"""\
apiVersion: v1
kind: Service
metadata:
  name: {name}
  labels: {_labels(component)}
spec:
{kind}  selector: {_selector(component)}
  ports:
{shown}"""


def _budget(name: str) -> str:
    return f"""\
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: nsqha-{name}
  labels: {_labels(name)}
spec:
  maxUnavailable: 1
  selector:
    matchLabels: {_selector(name)}
"""


def _network() -> str:
    ours = "        - podSelector:\n            matchLabels: {app.kubernetes.io/part-of: nsqha}\n"
    texts = []
    for name, open_ports, closed in (
        ("broker", [p.number for p in BROKER_PORTS if not p.inside], [port(BROKER_PORTS, n) for n in ("grpc", "peer")]),
        ("lookupd", [p.number for p in LOOKUPD_PORTS], []),
        ("etcd", [], [ETCD_PORT, ETCD_PEER_PORT]),
    ):
        rules = ""
        if open_ports:
            rules += f"    - ports:\n{_tcp(open_ports)}"
        if closed:
            rules += f"    - from:\n{ours}      ports:\n{_tcp(closed)}"
        texts.append(f"""\
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: nsqha-{name}
  labels: {_labels(name)}
spec:
  podSelector:
    matchLabels: {_selector(name)}
  policyTypes: [Ingress]
  # What nodes, lookup daemons and operators use is for pods with the label part-of: nsqha.
  ingress:
{rules}""")
    return "---\n".join(texts)


def _tcp(ports: list[int]) -> str:
    return "".join(f"        - {{protocol: TCP, port: {number}}}\n" for number in ports)
