#!/usr/bin/python
"""Runs `hybrid-ep doctor --json` on a node and returns what it said. Facts only: nothing is judged or changed here."""

from __future__ import annotations

import json
import subprocess

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: hybrid_ep_doctor
short_description: Ask the node doctor of hybrid_ep
description:
  - Runs C(hybrid-ep doctor --json) on the node and returns its report as it is.
  - Reads only, so it gives the same real data in check mode.
  - A report that holds faults is not a failure of this module; it fails where there is no report.
version_added: "0.1.0"
options:
  command:
    description: How hybrid-ep is called on the node, word by word.
    type: list
    elements: str
    required: true
  profile:
    description:
      - The platform, by name or as the path of a YAML file on the controller; empty lets the doctor propose one.
      - The node gets the content of a file, and passes it to the doctor's standard input.
    type: str
    default: ""
  checks:
    description: Only these checks; empty means all that the profile asks for.
    type: list
    elements: str
    default: []
  options:
    description: Further options of C(hybrid-ep doctor).
    type: list
    elements: str
    default: []
  asked_at:
    description: The controller's Unix time in seconds, from which the doctor measures the node's clock.
    type: float
  limit_s:
    description: How long it may take, in seconds.
    type: int
    default: 120
  results:
    description:
      - A results folder on the controller, where the report is written as C(nodes/HOST.json).
      - There, also a node that cannot be reached or gives no report leaves a file, with the reason, and is no failure.
    type: path
author:
  - the hybrid_ep maintainers
attributes:
  check_mode:
    support: full
    description: Reads only.
"""

EXAMPLES = r"""
- name: Ask the doctor
  hybrid_ep_doctor:
    command: [hybrid-ep]
    profile: hgx-h100
  register: node
"""

RETURN = r"""
report:
  description: The doctor's JSON document; not returned where O(results) takes it.
  type: dict
  returned: without O(results)
answered:
  description: Whether there is a report.
  type: bool
  returned: always
status:
  description: C(pass), C(fail) or C(unknown), as the doctor says.
  type: str
  returned: where there is a report
findings:
  description: One line for each check that failed, with its remedy.
  type: list
  elements: str
  returned: where there is a report
"""


def main() -> None:
    """Runs the command."""
    module = AnsibleModule(
        argument_spec={
            "command": {"type": "list", "elements": "str", "required": True},
            "profile": {"type": "str", "default": ""},
            "checks": {"type": "list", "elements": "str", "default": []},
            "options": {"type": "list", "elements": "str", "default": []},
            "asked_at": {"type": "float"},
            "limit_s": {"type": "int", "default": 120},
        },
        supports_check_mode=True,
    )
    asked = module.params
    words = [*asked["command"], "doctor", "--json", *asked["options"]]
    content = asked["profile"] if asked["profile"].startswith("{") else ""
    words += ["--profile", "-" if content else asked["profile"]] if asked["profile"] else []
    for check in asked["checks"]:
        words += ["--check", check]
    words += ["--asked-at", str(asked["asked_at"])] if asked["asked_at"] is not None else []
    try:
        done = subprocess.run(
            words, input=content, capture_output=True, text=True, timeout=asked["limit_s"], check=False
        )
    except OSError as error:
        module.fail_json(msg=f"{words[0]} cannot be run on the node: {error.strerror}", command=words)
    except subprocess.TimeoutExpired:
        module.fail_json(msg=f"the doctor took more than {asked['limit_s']} s", command=words)
    try:
        report = json.loads(done.stdout)
        findings = [f"{item['id']}: {item['seen']}: {item['remedy']}" for item in failed(report)]
        status = report["status"]
    except (ValueError, KeyError, TypeError):
        said = (done.stderr or done.stdout).strip()[-500:] or "nothing"
        module.fail_json(msg=f"the doctor gave no report (exit status {done.returncode}): {said}", command=words)
    module.exit_json(changed=False, answered=True, report=report, status=status, findings=findings)


def failed(report: dict) -> list[dict]:
    """The results that the doctor itself calls failed, warnings left out."""
    return [item for item in report["results"] if item["status"] == "fail" and item["severity"] == "error"]


if __name__ == "__main__":
    main()
