"""Speaks to the API server as any Pod may: by its service account's token, over TLS, one JSON request at a time."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_ep import env
from hybrid_ep.errors import ConfigError, HybridEPError

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_REQUEST_S = 30.0


class NodeError(HybridEPError):
    """The node could not be examined, or the API server could not be reached or refused."""


class ConflictError(NodeError):
    """The object was changed by somebody else after it was read."""


@dataclass(frozen=True)
class ApiServer:
    """Where and how to reach the API server.

    Attributes:
        url: without a path.
        token: of the service account.
        context: knows the cluster's certificate authority; None for plain http.
    """

    url: str
    token: str
    context: ssl.SSLContext | None = None

    @classmethod
    def of_this_pod(cls) -> ApiServer:
        """From what Kubernetes gives every Pod.

        Raises:
            ConfigError: this is no Pod, or it has no service account.
        """
        host, port = env.KUBERNETES_HOST.get(), env.KUBERNETES_PORT.get()
        if not host or not (_ACCOUNT / "token").is_file():
            raise ConfigError(
                f"{env.KUBERNETES_HOST.name}={host!r} and {_ACCOUNT}/token do not say where the cluster is; "
                "allowed: in a Pod with a service account"
            )
        address = f"[{host}]" if ":" in host else host
        context = ssl.create_default_context(cafile=str(_ACCOUNT / "ca.crt"))
        return cls(f"https://{address}:{port}", (_ACCOUNT / "token").read_text().strip(), context)

    def request(self, method: str, path: str, body: object = None, kind: str = "application/json") -> Any:
        """Sends one request and returns the parsed answer.

        Raises:
            ConflictError: the object has another version than the request says.
            NodeError: it could not be reached, or refused.
        """
        headers = {"Authorization": f"Bearer {self.token}", "Accept": "application/json", "Content-Type": kind}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=_REQUEST_S, context=self.context) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            said = error.read(500).decode(errors="replace")
            kind_of_error = ConflictError if error.code == 409 else NodeError
            raise kind_of_error(f"{method} {path}: {error.code} {error.reason}: {said}") from error
        except (OSError, ValueError) as error:
            raise NodeError(f"{method} {self.url}{path}: {error}") from error
