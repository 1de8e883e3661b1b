"""Certificates for tests, made with the openssl program: CAs, and what they sign.

folder = Certificates(tmp_path)                      # with one CA, "ca"
folder.issue("n1", "IP:127.0.0.1", "URI:nsqha:node/00000000000000ab")
folder.cert("n1"), folder.key("n1"), folder.cert("ca")
"""

from __future__ import annotations

import subprocess
from pathlib import Path


class Certificates:
    """`NAME.crt` and `NAME.key` in one folder."""

    def __init__(self, folder: Path, *authorities: str) -> None:
        self.folder = folder
        for name in ("ca", *authorities):
            self.authority(name)

    def authority(self, name: str) -> None:
        self._openssl("req", "-x509", *_NEW_KEY, "-keyout", f"{name}.key", "-out", f"{name}.crt", "-days", "2",
                      "-subj", f"/CN={name}")  # fmt: skip

    def issue(self, name: str, *names: str, ca: str = "ca", days: int = 2) -> None:
        """A certificate for `names` (DNS:.., IP:.., URI:..; none: it has only the common name), of that CA."""
        self._openssl("req", *_NEW_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (self.folder / f"{name}.ext").write_text(f"subjectAltName={','.join(names)}\n" if names else "")
        self._openssl("x509", "-req", "-in", f"{name}.csr", "-CA", f"{ca}.crt", "-CAkey", f"{ca}.key",
                      "-CAcreateserial", "-out", f"{name}.crt", "-days", f"{days}",
                      "-extfile", f"{name}.ext")  # fmt: skip

    def cert(self, name: str) -> str:
        return str(self.folder / f"{name}.crt")

    def key(self, name: str) -> str:
        return str(self.folder / f"{name}.key")

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True)


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
