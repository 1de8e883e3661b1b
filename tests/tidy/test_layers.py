"""An import may only go down (ARCHITECTURE.md, "Layers"), and only the shell knows about loops and networks."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# The longest prefix that matches decides.
LAYERS = {
    "nsqha": 0,
    "nsqha.access": 1,
    "nsqha.wire": 1,
    "nsqha.cursor": 1,
    "nsqha.replication": 1,
    "nsqha.election": 1,
    "lookupd.registry": 1,
    "lookupd.lookup_v1": 1,
    "nsqha.commitlog": 2,
    "nsqha.cursor.cache": 2,
    "nsqha.election.embedded": 2,
    "nsqha.election.etcd": 2,
    "nsqha.pb": 2,
    "nsqha.server": 3,
    "nsqha.admin": 3,
    "lookupd": 3,
    "nsqha.cli": 4,
    "nsqha.__main__": 4,
    "lookupd.__main__": 4,
    "pyspark_nsqha": 4,
}
FOR_SPARK = ("nsqha.commitlog", "nsqha.pb")
"""What pyspark_nsqha may import beside itself and L0: it runs in workers, beside no broker."""
SPARKS_CALLERS = ("pyspark_nsqha", "nsqha.cli")
SHELL_ONLY = {"asyncio", "uvloop", "grpc", "aiohttp", "socket", "ssl", "selectors", "threading", "concurrent"}
IMPURE = SHELL_ONLY | {"os", "time", "lmdb", "etcd3", "random", "fcntl"}
# Module -> what it alone may import although its layer may not, and why.
ALLOWED = {
    "nsqha.clock": {"time"},  # the one reader of clocks
    "nsqha.hot": {"os"},  # NSQHA_NO_EXT
    "nsqha.hot._syncing_py": {"os", "threading"},  # the threads that sync what storage has opened
    "nsqha.grpc_channels": {"grpc", "asyncio", "threading", "socket"},  # the one maker of channels, for all layers
    "nsqha.cluster_secret": {"os"},  # draws nonces
    "nsqha.private_file": {"os"},  # the one reader of files with secrets
    "nsqha.grpc_env": {"os"},  # what gRPC has to find in the environment before it is imported
    "nsqha.commitlog.storage": {"os", "fcntl"},  # the one user of files,
    "nsqha.commitlog.readonce": {"os"},  # with its variant for the scrub
    "nsqha.cursor.cache.lmdb_tables": {"lmdb", "os"},  # the one user of lmdb
    "nsqha.cursor.cache.lmdb_proof": {"os"},
    "nsqha.election.etcd.binary": {"os"},
    "nsqha.election.etcd.client": {"grpc", "threading", "ssl"},  # the one user of etcd, with threads of its own:
    "nsqha.election.etcd.lease": {"grpc", "threading"},
    "nsqha.election.etcd.many_topics": {"threading"},
    "nsqha.election.etcd.session": {"threading"},
    "nsqha.election.etcd.watch": {"grpc", "threading"},
    "nsqha.options": {"os"},  # NSQD_*, NSQLOOKUPD_* and the host name
    "nsqha.goflags": {"os"},
    "nsqha.nsqlog": {"time"},
    "nsqha.log_writer": {"os", "threading", "time"},  # the one writer of standard error
}


def modules() -> list[tuple[str, Path]]:
    found = []
    for package in ("nsqha", "lookupd", "pyspark_nsqha"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if "pb" in path.relative_to(ROOT).parts:
                continue
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            found.append((name, path))
    return found


def layer(module: str) -> int:
    parts = module.split(".")
    for n in range(len(parts), 0, -1):
        prefix = ".".join(parts[:n])
        if prefix in LAYERS:
            return LAYERS[prefix]
    raise AssertionError(f"{module} has no layer")


def imports(path: Path, module: str) -> set[str]:
    tree = ast.parse(path.read_text())
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{module}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names


@pytest.mark.parametrize(("module", "path"), modules(), ids=lambda value: value if isinstance(value, str) else "")
def test_imports_only_go_down(module: str, path: Path) -> None:
    mine = layer(module)
    for name in imports(path, module):
        if name.split(".")[0] in ("nsqha", "lookupd", "pyspark_nsqha"):
            assert layer(name) <= mine, f"{module} (L{mine}) imports {name} (L{layer(name)})"
    if module.startswith("nsqha.") and mine <= 2:
        assert not any(name.split(".")[0] == "lookupd" for name in imports(path, module))


@pytest.mark.parametrize(("module", "path"), modules(), ids=lambda value: value if isinstance(value, str) else "")
def test_the_spark_side_and_the_broker_share_the_format_only(module: str, path: Path) -> None:
    found = imports(path, module)
    if not module.startswith(SPARKS_CALLERS):
        assert not any(name.split(".")[0] == "pyspark_nsqha" for name in found)
    if module.startswith("pyspark_nsqha"):
        brokers = {name for name in found if name.split(".")[0] in ("nsqha", "lookupd")}
        assert not {name for name in brokers if layer(name) > 0 and not name.startswith(FOR_SPARK)}


def test_grpc_channels_are_made_in_one_place() -> None:
    makers = {module for module, path in modules() if "secure_channel(" in path.read_text()}
    assert makers == {"nsqha.grpc_channels"}


TASK_MAKERS = {
    "nsqha.server.runtime.tasks",
    # A command of one process: its tasks end in the function that makes them.
    "nsqha.cli.dev.children",
    "nsqha.cli.dev.cluster",
}


def test_tasks_begin_in_one_place() -> None:
    """There every task has an owner (`TaskGroup`) or a caller that keeps it."""
    makers = ("create_task(", "ensure_future(", "asyncio.TaskGroup(", "asyncio.Task(")
    found = {module for module, path in modules() if any(maker in path.read_text() for maker in makers)}
    assert found == TASK_MAKERS


def test_what_spark_imports_in_every_application_is_light() -> None:
    """Whoever has pyspark_nsqha installed pays for its import in each application that looks up a data source."""
    for name, modules in (("__init__", set()), ("source", {"pyspark.sql.datasource"})):
        tree = ast.parse((ROOT / "pyspark_nsqha" / f"{name}.py").read_text())
        found = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
        assert found == {"__future__", "typing", *modules}
        assert not [node for node in tree.body if isinstance(node, ast.Import)]


@pytest.mark.parametrize(("module", "path"), modules(), ids=lambda value: value if isinstance(value, str) else "")
def test_only_the_shell_knows_loops_networks_and_clocks(module: str, path: Path) -> None:
    if layer(module) >= 3:
        return
    used = {name.split(".")[0] for name in imports(path, module)}
    forbidden = (IMPURE - {"random"}) - ALLOWED.get(module, set())
    assert not used & forbidden, f"{module} imports {sorted(used & forbidden)}"
    if "random" in used:
        tree = ast.parse(path.read_text())
        attributes = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random"
        }
        assert attributes <= {"Random"}, f"{module} uses the global random generator"


@pytest.mark.parametrize(("module", "path"), modules(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_module_opens_with_its_idea(module: str, path: Path) -> None:
    doc = ast.get_docstring(ast.parse(path.read_text()))
    assert doc, f"{module} has no docstring"
