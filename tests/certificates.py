"""Certificates of a cluster, made by openssl."""

import shutil
import subprocess
from pathlib import Path

import pytest

from ctl.base.cluster_access import ClusterAccess

needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="makes its certificates with openssl"
)
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)


class Authority:
    """Signs certificates; all files are in `folder`, which is made."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.certificate, self._key = folder / "ca.crt", folder / "ca.key"
        _openssl(
            "req", "-x509", *_NEW_KEY, "-days", "2", "-subj", "/CN=authority",
            "-keyout", self._key, "-out", self.certificate,
        )  # fmt: skip

    def sign(self, certificate: Path, key: Path, name: str = "epserve") -> None:
        """A new pair for the DNS name, put in the place of an older one."""
        request, extensions = self.folder / "request", self.folder / "extensions"
        extensions.write_text(f"subjectAltName=DNS:{name}")
        _openssl("req", *_NEW_KEY, "-subj", "/CN=process", "-keyout", key, "-out", request)
        _openssl(
            "x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self._key,
            "-CAcreateserial", "-days", "2", "-extfile", extensions, "-out", certificate,
        )  # fmt: skip

    def access(self, name: str = "epserve", signs_as: str = "") -> ClusterAccess:
        """Of a process that has a certificate for `signs_as`, and calls those of `name`."""
        certificate, key = self.folder / "tls.crt", self.folder / "tls.key"
        self.sign(certificate, key, signs_as or name)
        return ClusterAccess(
            cluster_tls_cert=certificate,
            cluster_tls_key=key,
            cluster_tls_ca=self.certificate,
            cluster_tls_name=name,
        )
