"""Lets etcd3 0.12.0 be imported beside protobuf 4 and newer.

The classes in its `kv_pb2`, `auth_pb2` and `rpc_pb2` were generated for protobuf 3; today's runtime refuses to run them
("Descriptors cannot be created directly"). Each of those files holds its description as one literal, `serialized_pb`.
The bridge reads that literal without running the file, builds the classes from it in a descriptor pool of its own, and
puts three modules of these names into `sys.modules`, before etcd3 asks for them:

    serialized_pb -> private DescriptorPool -> message classes -> etcd3.etcdrpc.{kv,auth,rpc}_pb2 -> import etcd3

The pool is private because other etcd clients describe files and messages of the same names. Only version 0.12.0 is
known; another one has to work by itself.

    from nsqha.election.etcd_bridge import rpc      messages and stubs, as etcd3.etcdrpc has them
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import nsqha.grpc_env  # noqa: F401

# isort: split
import google.protobuf
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.internal import api_implementation, enum_type_wrapper

from nsqha.errors import ConfigError

KNOWN_VERSION = "0.12.0"
_FILES = ("kv", "auth", "rpc")  # in the order in which they import each other


def load() -> Any:
    """`etcd3.etcdrpc`, through the bridge where it is needed. ConfigError: not installed, or a version nobody tried."""
    try:
        version = importlib.metadata.version("etcd3")
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(f"a cluster needs the package etcd3 {KNOWN_VERSION}; install it") from error
    # Trying the plain import first would be simpler, but its failure leaves names behind in protobuf's shared pool.
    if version == KNOWN_VERSION and _refuses_old_code() and "etcd3" not in sys.modules:
        sys.modules.update(_modules(_folder()))
    try:
        return importlib.import_module("etcd3.etcdrpc")
    except TypeError as error:
        raise ConfigError(
            f"etcd3 {version} does not run beside protobuf {google.protobuf.__version__}; install etcd3 {KNOWN_VERSION}"
        ) from error


def _refuses_old_code() -> bool:
    return int(google.protobuf.__version__.split(".")[0]) >= 4 and api_implementation.Type() != "python"


def _folder() -> Path:
    spec = importlib.util.find_spec("etcd3")  # does not run it
    assert spec is not None and spec.origin is not None, "importlib.metadata knows etcd3"
    return Path(spec.origin).parent / "etcdrpc"


def _modules(folder: Path) -> dict[str, ModuleType]:
    pool = descriptor_pool.DescriptorPool()
    modules = {}
    for file in _FILES:
        name = f"etcd3.etcdrpc.{file}_pb2"
        serialized = serialized_pb((folder / f"{file}_pb2.py").read_text(encoding="utf-8"))
        pool.AddSerializedFile(serialized)
        modules[name] = _module(name, pool.FindFileByName(f"{file}.proto"))
    return modules


def _module(name: str, described: Any) -> ModuleType:
    """What the generated module would have offered: classes, enums, and the values of enums."""
    module = ModuleType(name)
    contents: dict[str, Any] = {"DESCRIPTOR": described}
    for message, descriptor in described.message_types_by_name.items():
        contents[message] = message_factory.GetMessageClass(descriptor)
    for enum, descriptor in described.enum_types_by_name.items():
        contents[enum] = enum_type_wrapper.EnumTypeWrapper(descriptor)
        contents |= {value.name: value.number for value in descriptor.values}
    vars(module).update(contents)
    return module


def serialized_pb(source: str) -> bytes:
    """The description of a proto file, out of the text of its generated module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg == "serialized_pb":
            # b'...', or _b('...') with a latin-1 text, as python 2 and 3 could both read it.
            for part in ast.walk(node.value):
                if isinstance(part, ast.Constant) and isinstance(part.value, bytes):
                    return part.value
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    return part.value.encode("latin-1")
    raise ConfigError("the installed etcd3 is not as it was published; install it again")


rpc: Any = load()
