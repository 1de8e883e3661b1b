"""etcd's messages and stubs, from the package etcd3 0.12.0, for protobuf 4 and newer.

The classes in its `kv_pb2`, `auth_pb2` and `rpc_pb2` were generated for protobuf 3; today's runtime refuses to run them
("Descriptors cannot be created directly"). Each of those files holds its description as one literal, `serialized_pb`.
The bridge reads that literal without running the file, builds the classes from it in a descriptor pool of its own, and
puts three modules of these names into `sys.modules`, before etcd3's stubs ask for them:

    serialized_pb -> private DescriptorPool -> message classes -> etcd3.etcdrpc.{kv,auth,rpc}_pb2 -> etcd3.etcdrpc

The pool is private because other etcd clients describe files and messages of the same names. Of etcd3 only `etcdrpc`
is run: its client, locks and watch, and what they import, would cost every command 60 ms of CPU for nothing. Code that
imports etcd3 later gets all of it, with these classes.

    from nsqha.election.etcd.bridge import rpc      messages and stubs, as etcd3.etcdrpc has them
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import nsqha.grpc_env  # noqa: F401

# isort: split
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.internal import enum_type_wrapper

from nsqha.errors import ConfigError

KNOWN_VERSION = "0.12.0"
_FILES = ("kv", "auth", "rpc")  # in the order in which they import each other

# b'...', or _b('...') with a latin-1 text, as python 2 and 3 could both read it. Only this literal is parsed: the file
# of `rpc` has four thousand lines, which take `ast` 100 ms.
_LITERAL = re.compile(r"""\bserialized_pb=(?:_b\()?(b?'(?:[^'\\\n]|\\.)*')""")


def load() -> Any:
    """Load `etcd3.etcdrpc`. ConfigError: it is not installed, or a version with other files."""
    if (loaded := sys.modules.get("etcd3.etcdrpc")) is not None:
        return loaded
    spec = importlib.util.find_spec("etcd3")  # does not run it
    if spec is None or spec.origin is None:
        raise ConfigError(f"a cluster needs the package etcd3 {KNOWN_VERSION}; install it")
    folder = Path(spec.origin).parent
    sys.modules.update(_modules(folder / "etcdrpc"))
    package = ModuleType("etcd3")  # a placeholder for the real one, so that its submodules can be imported
    package.__path__ = [str(folder)]
    sys.modules["etcd3"] = package
    try:
        return importlib.import_module("etcd3.etcdrpc")
    finally:
        del sys.modules["etcd3"]


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
    """Make a module with the contents of the generated one: classes, enums, and the values of enums."""
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
    """Extract the description of a proto file from the text of its generated module."""
    found = _LITERAL.search(source)
    if found is None:
        raise ConfigError(f"the installed etcd3 is not {KNOWN_VERSION} as it was published; install that")
    value: bytes | str = ast.literal_eval(found[1])
    return value.encode("latin-1") if isinstance(value, str) else value


rpc: Any = load()
