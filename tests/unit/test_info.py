"""`hybrid-ep info` and `hybrid-ep env`: what they say, as JSON and in words, and their exit codes."""

import json

import pytest
import torch
from click.testing import CliRunner

from hybrid_ep import __version__, env
from hybrid_ep.cli import main


def test_info_json_names_versions_engine_and_what_was_built() -> None:
    result = CliRunner().invoke(main, ["info", "--json"], env={"HYBRID_EP_ENGINE": "torch"})
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["versions"]["hybrid_ep"] == __version__
    assert found["versions"]["torch"] == torch.__version__
    assert (found["engine"], found["reason"]) == ("torch", "asked for by name")
    assert "_C" in found["built"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is visible, so cuda may be a good answer")
def test_info_says_why_an_engine_cannot_run_and_exits_with_1() -> None:
    result = CliRunner().invoke(main, ["info"], env={"HYBRID_EP_ENGINE": "cuda", "COLUMNS": "200"})
    assert result.exit_code == 1
    assert "none" in result.stdout
    assert "engine is 'cuda', but" in result.stdout


def test_info_names_the_transport_and_why_not_the_others() -> None:
    result = CliRunner().invoke(
        main, ["info", "--json"], env={"HYBRID_EP_ENGINE": "torch", "HYBRID_EP_TRANSPORT": "tcp"}
    )
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert (found["transport"], found["transport_reason"]) == ("tcp", "asked for by name")
    assert sorted(found["transports"]) == ["loopback", "nvshmem", "verbs"]
    assert found["transports"]["loopback"] == "usable; tcp is asked for by name"


def test_info_exits_with_1_for_a_transport_that_does_not_exist() -> None:
    result = CliRunner().invoke(main, ["info", "--json"], env={"HYBRID_EP_TRANSPORT": "pigeon"})
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["transport"] is None
    assert "HYBRID_EP_TRANSPORT='pigeon' is not allowed" in found["transport_reason"]


def test_env_json_is_the_table_with_values_in_force() -> None:
    result = CliRunner().invoke(main, ["env", "--json"], env={"HYBRID_EP_TIMEOUT_S": "2.5", "HYBRID_EP_NICS": ""})
    assert result.exit_code == 0
    rows = {row["name"]: row for row in json.loads(result.stdout)}
    assert list(rows) == [variable.name for variable in env.VARIABLES]
    assert (rows["HYBRID_EP_TIMEOUT_S"]["value"], rows["HYBRID_EP_TIMEOUT_S"]["is_set"]) == (2.5, True)
    assert (rows["HYBRID_EP_NICS"]["value"], rows["HYBRID_EP_NICS"]["is_set"]) == (None, False)


def test_env_shows_a_value_that_is_not_allowed_and_exits_with_1() -> None:
    result = CliRunner().invoke(main, ["env"], env={"HYBRID_EP_TIMEOUT_S": "soon", "COLUMNS": "250"})
    assert result.exit_code == 1
    assert "HYBRID_EP_TIMEOUT_S='soon' is not allowed" in result.stdout
