"""The controller's half of the module hybrid_ep_doctor: keeps the report as a file, from within the node's own fork.

So a thousand reports are neither sent back to a node nor held in the controller's memory, and a node that cannot be
reached leaves a result like any other. A profile of the site lies on the controller, too: the node's doctor is handed
its content, so that nothing is copied there and nothing mounted into a container.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail, AnsibleConnectionFailure
from ansible.plugins.action import ActionBase

from hybrid_ep.cluster.doctor.profile import is_profile_file, load_profile
from hybrid_ep.errors import ConfigError


class ActionModule(ActionBase):
    """Runs the module on the node and, with `results`, writes nodes/HOST.json on the controller."""

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Returns the module's answer, without the report where that was written."""
        super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        results = arguments.pop("results", None)
        if is_profile_file(arguments.get("profile", "")):
            try:
                arguments["profile"] = load_profile(arguments["profile"]).to_text()
            except ConfigError as error:
                raise AnsibleActionFail(str(error)) from error
        if results is None:
            return self._ask(arguments, task_vars)
        place = Path(results, "nodes", f"{(task_vars or {})['inventory_hostname']}.json")
        try:
            answer = self._ask(arguments, task_vars)
        except AnsibleConnectionFailure as error:
            self._write(place, {"unreachable": f"no connection: {error.message}"})
            raise
        if "report" in answer:
            self._write(place, answer.pop("report"))
            return answer
        said = [str(answer[key]).strip() for key in ("msg", "module_stderr", "stderr") if answer.get(key)]
        reason = ": ".join(said) or "no answer"
        self._write(place, {"unreachable": reason})
        return {"changed": False, "answered": False, "msg": reason}

    def _ask(self, arguments: dict[str, Any], task_vars: dict[str, Any] | None) -> dict[str, Any]:
        """The module's answer. Question and arrival enclose the report in time, so that `compare` knows the clock."""
        answer: dict[str, Any] = self._execute_module(
            module_args={**arguments, "asked_at": time.time()}, task_vars=task_vars
        )
        if "report" in answer:
            answer["report"]["facts"]["received_s"] = round(time.time(), 3)
        return answer

    def _write(self, place: Path, content: dict[str, Any]) -> None:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
