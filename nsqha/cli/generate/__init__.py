"""`nsqha generate`: files that say what the code says, so that neither drifts from the other.

Each generator is a module with `files`, which returns `path -> text`; paths are relative to the folder of --to. What
begins with deploy/ or docs/ is committed, and a test compares it with what the generator writes now.

Downwards:

    command     the verb, and the table of generators
    man         man pages, from the parsers
    completions completion for shells, from the parsers
    systemd     units and settings for systemd
    compose     the container image, and Compose files
    k8s         manifests for Kubernetes
    alerts      rules for Prometheus, and the page that says what to do about each
    dashboards  for Grafana
    metrics_page  docs/metrics.md
    configuration  docs/configuration.md
    errors      docs/errors.md
    topology    ports, probes and times that deployments have in common
    writing     what is there already: differences, and --force
"""
