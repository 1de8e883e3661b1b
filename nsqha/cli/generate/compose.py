"""The container image and Compose files: deploy/Dockerfile, deploy/compose.

    one-node.yaml   a broker and a lookup daemon
    cluster.yaml    three brokers, two lookup daemons, three etcds; with --profile monitoring Prometheus and Grafana
"""

from __future__ import annotations

from collections.abc import Mapping

from nsqha.cli.generate.topology import (
    BROKER_PORTS,
    DATA_PATH,
    ETCD_PEER_PORT,
    ETCD_PORT,
    IMAGE,
    LOOKUPD_PORTS,
    STARTUP_PERIOD_SECONDS,
    UID,
    port,
    started_periods,
    stop_seconds,
    variables,
)
from nsqha.options import LookupdOptions, Options

FOLDER = "deploy/compose"
PYTHON = "3.13"
ETCD_IMAGE = "quay.io/coreos/etcd:v3.5.24"
PROMETHEUS_IMAGE = "prom/prometheus:v3.5.0"
GRAFANA_IMAGE = "grafana/grafana:12.1.1"
BROKERS, LOOKUPDS, ETCDS = 3, 2, 3
SECRET = "/run/secrets/nsqha-cluster"
WRITTEN = "# Written by `nsqha generate compose`; put changes into a file of your own, which Compose merges.\n"


def files() -> dict[str, str]:
    return {
        "deploy/Dockerfile": _dockerfile(),
        f"{FOLDER}/one-node.yaml": _one_node(),
        f"{FOLDER}/cluster.yaml": _cluster(),
        f"{FOLDER}/prometheus.yml": _prometheus(),
        f"{FOLDER}/grafana-datasource.yml": _GRAFANA,
        f"{FOLDER}/grafana-dashboards.yml": _DASHBOARDS,
    }


# ---- the image


def _dockerfile() -> str:
    ports = " ".join(str(p.number) for p in (*BROKER_PORTS, *LOOKUPD_PORTS))
    return f"""\
# Written by `nsqha generate compose`. One image for all roles; from the root of the repository:
#   docker build -t {IMAGE} -f deploy/Dockerfile .
FROM python:{PYTHON}-bookworm AS build
WORKDIR /src
COPY CHANGELOG.md LICENSE MANIFEST.in README.md pyproject.toml setup.py ./
COPY nsqha nsqha
COPY lookupd lookupd
COPY pyspark_nsqha pyspark_nsqha
ENV NSQHA_EXTENSIONS=required
RUN python -m venv /opt/nsqha \\
    && /opt/nsqha/bin/python -m pip install --no-cache-dir . \\
    && /opt/nsqha/bin/nsqd --version \\
    && mkdir /data

FROM python:{PYTHON}-slim-bookworm
LABEL org.opencontainers.image.title="nsqha" org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/nsqha /opt/nsqha
# The only place that is written to: run it with a read-only root.
COPY --from=build --chown={UID}:{UID} /data {DATA_PATH}
ENV PATH=/opt/nsqha/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 GRPC_VERBOSITY=ERROR
USER {UID}:{UID}
WORKDIR {DATA_PATH}
VOLUME {DATA_PATH}
EXPOSE {ports}
# SIGTERM hands leaderships over and marks the stop clean: give it {stop_seconds()} s.
STOPSIGNAL SIGTERM
# Of a broker; NSQHA_ADDRESS says where another daemon listens. A start may have a large log to read.
HEALTHCHECK --interval=10s --timeout=5s --retries=6 --start-period={_start_seconds()}s \\
    CMD ["nsqha", "check", "node", "--live"]
CMD ["nsqd", "--data-path={DATA_PATH}"]
"""


def _start_seconds() -> int:
    return started_periods() * STARTUP_PERIOD_SECONDS


# ---- services


def _one_node() -> str:
    broker = variables(
        Options,
        data_path=DATA_PATH,
        broadcast_address="broker",
        nsqlookupd_tcp_addresses=f"lookup:{port(LOOKUPD_PORTS, 'tcp')}",
    )
    lookup = variables(LookupdOptions, broadcast_address="lookup") | _checked_at(port(LOOKUPD_PORTS, "http"))
    services = [
        _service("broker", ["nsqd"], broker, ports=[(p.number, p.number) for p in BROKER_PORTS[:2]], data="data"),
        _service("lookup", ["nsqlookupd"], lookup, ports=[(p.number, p.number) for p in LOOKUPD_PORTS]),
    ]
    return f"""\
{WRITTEN}# A broker and a lookup daemon: docker compose -f deploy/compose/one-node.yaml up -d --build
name: nsqha
services:
{chr(10).join(services)}
volumes:
  data: {{}}
"""


def _cluster() -> str:
    brokers = [f"broker{n}" for n in range(1, BROKERS + 1)]
    etcds = [f"etcd{n}" for n in range(1, ETCDS + 1)]
    services = [_etcd(name, etcds) for name in etcds]
    endpoints = ",".join(f"{name}:{ETCD_PORT}" for name in etcds)
    for n in range(1, LOOKUPDS + 1):
        name, http = f"lookup{n}", port(LOOKUPD_PORTS, "http")
        given = variables(
            LookupdOptions, etcd_endpoints=endpoints, broadcast_address=name, cluster_secret_file=SECRET
        ) | _checked_at(http)
        services.append(
            _service(name, ["nsqha", "lookupd"], given, ports=[(http + 100 * (n - 1), http)], after=etcds, secret=True)
        )
    for n, name in enumerate(brokers):
        given = variables(
            Options,
            etcd_endpoints=endpoints,
            data_path=DATA_PATH,
            broadcast_address=name,
            node_name=name,
            grpc_address=f"0.0.0.0:{port(BROKER_PORTS, 'grpc')}",
            peer_address=f"0.0.0.0:{port(BROKER_PORTS, 'peer')}",
            cluster_secret_file=SECRET,
        )
        shown = [(p.number + 100 * n, p.number) for p in BROKER_PORTS if not p.inside]
        services.append(
            _service(name, ["nsqha", "broker"], given, ports=shown, data=f"{name}-data", after=etcds, secret=True)
        )
    volumes = "".join(f"  {name}-data: {{}}\n" for name in (*etcds, *brokers, "prometheus", "grafana"))
    return f"""\
{WRITTEN}# Three brokers, two lookup daemons, three etcds on one machine. They show one secret to each other, which is
# for the image's user only:
#   openssl rand -hex 32 | sudo install -m 400 -o {UID} /dev/stdin deploy/compose/cluster-secret
#   docker compose -f deploy/compose/cluster.yaml up -d --build
# Clients are told the names of the services: they run in the same network. With --profile monitoring there are
# Prometheus (9090) and Grafana (3000), too.
name: nsqha-cluster
services:
{chr(10).join(services)}
{_MONITORING}
secrets:
  nsqha-cluster:
    file: ./cluster-secret
volumes:
{volumes}"""


def _checked_at(http: int) -> dict[str, str]:
    """The image's HEALTHCHECK looks there and not where a broker is."""
    return {"NSQHA_ADDRESS": f"127.0.0.1:{http}"}


def _service(
    name: str,
    command: list[str],
    environment: Mapping[str, str],
    *,
    ports: list[tuple[int, int]],
    data: str = "",
    after: list[str] | None = None,
    secret: bool = False,
) -> str:
    lines = [
        f"  {name}:",
        f"    image: ${{NSQHA_IMAGE:-{IMAGE}}}",
        "    build: {context: ../.., dockerfile: deploy/Dockerfile}",
        f"    command: [{', '.join(command)}]",
        "    environment:",
        *(f'      {variable}: "{value}"' for variable, value in environment.items()),
        f"    hostname: {name}",
        "    restart: unless-stopped",
        f"    stop_grace_period: {stop_seconds()}s",
        "    read_only: true",
        "    tmpfs: [/tmp]",
        "    cap_drop: [ALL]",
        '    security_opt: ["no-new-privileges:true"]',
        "    ulimits: {nofile: 1048576}",
        "    ports:",
        *(f'      - "127.0.0.1:{outside}:{inside}"' for outside, inside in ports),
    ]
    if data:
        lines += ["    volumes:", f"      - {data}:{DATA_PATH}"]
    if secret:
        lines += ["    secrets: [nsqha-cluster]"]
    if after:
        lines += ["    depends_on:", *(f"      {other}: {{condition: service_healthy}}" for other in after)]
    return "\n".join(lines)


def _etcd(name: str, all_of_them: list[str]) -> str:
    members = ",".join(f"{other}=http://{other}:{ETCD_PEER_PORT}" for other in all_of_them)
    return f"""\
  {name}:
    image: {ETCD_IMAGE}
    command:
      - etcd
      - --name={name}
      - --data-dir=/etcd-data
      - --listen-client-urls=http://0.0.0.0:{ETCD_PORT}
      - --advertise-client-urls=http://{name}:{ETCD_PORT}
      - --listen-peer-urls=http://0.0.0.0:{ETCD_PEER_PORT}
      - --initial-advertise-peer-urls=http://{name}:{ETCD_PEER_PORT}
      - --initial-cluster={members}
      - --initial-cluster-token=nsqha
      - --auto-compaction-retention=1h
    hostname: {name}
    restart: unless-stopped
    volumes:
      - {name}-data:/etcd-data
    healthcheck:
      test: [CMD, etcdctl, endpoint, health]
      interval: 5s
      timeout: 5s
      retries: 12"""


# ---- monitoring

_MONITORING = f"""\
  prometheus:
    profiles: [monitoring]
    image: {PROMETHEUS_IMAGE}
    restart: unless-stopped
    volumes:
      - ./prometheus.yml:/etc/prometheus/prometheus.yml:ro
      - ../prometheus/nsqha.rules.yml:/etc/prometheus/nsqha.rules.yml:ro
      - prometheus-data:/prometheus
    ports:
      - "127.0.0.1:9090:9090"
  grafana:
    profiles: [monitoring]
    image: {GRAFANA_IMAGE}
    restart: unless-stopped
    volumes:
      - ./grafana-datasource.yml:/etc/grafana/provisioning/datasources/nsqha.yml:ro
      - ./grafana-dashboards.yml:/etc/grafana/provisioning/dashboards/nsqha.yml:ro
      - ../grafana/dashboards:/var/lib/nsqha-dashboards:ro
      - grafana-data:/var/lib/grafana
    ports:
      - "127.0.0.1:3000:3000\""""


def _prometheus() -> str:
    def targets(kind: str, count: int, at: int) -> str:
        return ", ".join(f'"{kind}{n}:{at}"' for n in range(1, count + 1))

    return f"""\
{WRITTEN}global:
  scrape_interval: 15s
rule_files: [/etc/prometheus/nsqha.rules.yml]
scrape_configs:
  - job_name: nsqha-broker
    static_configs:
      - targets: [{targets("broker", BROKERS, port(BROKER_PORTS, "http"))}]
  - job_name: nsqha-lookupd
    static_configs:
      - targets: [{targets("lookup", LOOKUPDS, port(LOOKUPD_PORTS, "http"))}]
"""


_GRAFANA = f"""\
{WRITTEN}apiVersion: 1
datasources:
  - name: Prometheus
    type: prometheus
    access: proxy
    url: http://prometheus:9090
    isDefault: true
"""

_DASHBOARDS = f"""\
{WRITTEN}apiVersion: 1
providers:
  - name: nsqha
    options:
      path: /var/lib/nsqha-dashboards
"""
