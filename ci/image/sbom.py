"""Prints what is in this root as SPDX 2.3: python3 sbom.py

It runs inside the image that it describes, at the end of the build, with the image's own Python and nothing else.
Debian's packages come from dpkg's list, Python's from their metadata. The GPU image's rdma-core is built from source
and listed by the version of its library.
"""

from __future__ import annotations

import json
import os
import re
import sys
import uuid
from importlib import metadata
from pathlib import Path
from typing import Any

_NAMESPACE = uuid.UUID("6f0f5a4e-6c1c-4c0e-9f3a-0d8e3a6d1b11")


def debian_packages(status: Path = Path("/var/lib/dpkg/status")) -> list[tuple[str, str, str]]:
    """(name, version, package URL) of what dpkg has installed."""
    found = []
    for block in status.read_text(errors="replace").split("\n\n"):
        fields = dict(re.findall(r"^(Package|Version|Architecture|Status): (.*)$", block, re.M))
        if fields.get("Status") == "install ok installed":
            name, version, arch = fields["Package"], fields["Version"], fields["Architecture"]
            found.append((name, version, f"pkg:deb/debian/{name}@{version.replace(':', '%3A')}?arch={arch}"))
    return found


def python_packages() -> list[tuple[str, str, str]]:
    """(name, version, package URL) of Python's distributions that Debian did not bring."""
    found = {}
    for distribution in metadata.distributions():
        name, version = distribution.metadata["Name"], distribution.version
        if name and "/usr/lib/python3" not in str(distribution.locate_file("")):
            plain = re.sub(r"[-_.]+", "-", name).lower()
            found[plain] = (name, version, f"pkg:pypi/{plain}@{version.replace('+', '%2B')}")
    return [found[name] for name in sorted(found)]


def rdma_core(folder: Path = Path("/usr/local/lib")) -> list[tuple[str, str, str]]:
    """The one that was built from source: libibverbs.so.1.14.60.1 is of rdma-core 60.1."""
    for library in sorted(folder.glob("libibverbs.so.1.*")):
        version = ".".join(library.name.removeprefix("libibverbs.so.").split(".")[2:])
        return [("rdma-core", version, f"pkg:github/linux-rdma/rdma-core@v{version}")]
    return []


def document(packages: list[tuple[str, str, str]], created: str) -> dict[str, Any]:
    """The SPDX document; the same packages give the same one."""
    listed = sorted(packages, key=lambda package: package[2])
    unique = uuid.uuid5(_NAMESPACE, "\n".join(url for _, _, url in listed))
    entries = [
        {
            "SPDXID": f"SPDXRef-Package-{idx}",
            "name": name,
            "versionInfo": version,
            "downloadLocation": "NOASSERTION",
            "filesAnalyzed": False,
            "licenseConcluded": "NOASSERTION",
            "licenseDeclared": "NOASSERTION",
            "copyrightText": "NOASSERTION",
            "externalRefs": [
                {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": url}
            ],
        }
        for idx, (name, version, url) in enumerate(listed)
    ]
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": "hybrid-ep",
        "documentNamespace": f"urn:uuid:{unique}",
        "creationInfo": {"created": created, "creators": ["Tool: hybrid-ep-sbom"]},
        "packages": entries,
        "relationships": [
            {
                "spdxElementId": "SPDXRef-DOCUMENT",
                "relationshipType": "DESCRIBES",
                "relatedSpdxElement": entry["SPDXID"],
            }
            for entry in entries
        ],
    }


def main() -> None:
    """Prints the document; its time is the image's, where the build says it."""
    packages = [*debian_packages(), *python_packages(), *rdma_core()]
    created = os.environ.get("CREATED") or "1970-01-01T00:00:00Z"
    json.dump(document(packages, created), sys.stdout, indent=1)


if __name__ == "__main__":
    main()
