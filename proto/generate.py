"""Generate `nsqha/pb` from `proto/`: messages with typed stubs, and the gRPC classes.

The result is committed; `tests/tidy/test_proto_fresh.py` runs this into a temporary folder and compares.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def generate(target: Path) -> None:
    """Write the package `nsqha.pb` below `target`."""
    from grpc_tools import protoc

    target.mkdir(parents=True, exist_ok=True)
    files = sorted(str(path.relative_to(HERE)) for path in HERE.rglob("*.proto"))
    outputs = [f"--{kind}_out={target}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    status = protoc.main(["protoc", f"-I{HERE}", *outputs, *files])
    if status:
        raise SystemExit(status)
    # protoc places modules by the path of the .proto; ours live in nsqha/pb, so imports of each other move there.
    for path in target.rglob("*.py*"):
        path.write_text(re.sub(r"\bnsqha\.v1(?= import|\.\w+_pb2)", "nsqha.pb.v1", path.read_text()))


def main() -> None:
    import tempfile

    package = HERE.parent / "nsqha" / "pb"
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        install(Path(folder), package)
    print(f"wrote {package}", file=sys.stderr)


def install(generated: Path, package: Path) -> None:
    """Lay the generated modules out as the package `nsqha.pb`."""
    version = package / "v1"
    version.mkdir(parents=True, exist_ok=True)
    for path in sorted((generated / "nsqha" / "v1").iterdir()):
        (version / path.name).write_text(path.read_text())
    (package / "__init__.py").write_text('"""Generated from proto/ by `make proto`; do not edit."""\n')
    (version / "__init__.py").write_text('"""Generated from proto/nsqha/v1 by `make proto`; do not edit."""\n')


if __name__ == "__main__":
    main()
