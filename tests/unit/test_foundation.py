"""Errors, environment variables, geometry, records and configuration."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hybrid_ep
from hybrid_ep import Config, ConfigError, EventOverlap, TopologyError, env, errors
from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.engine.select import choose_engine
from hybrid_ep.engine.torch.records import RecordFormat

ROOT = Path(hybrid_ep.__file__).parent


def test_errors_have_one_root_and_say_what_the_builtin_says() -> None:
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.HybridEPError)
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.TimeoutError, TimeoutError)
    assert issubclass(errors.OverflowError, OverflowError)


def test_errors_cross_processes() -> None:
    error = errors.TimeoutError("dispatch: rows", 1, 3, "nothing came", timeout_s=2.5)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.peer, again.timeout_s) == (str(error), 3, 2.5)
    assert "rank 1 waited 2.5 s for rank 3" in str(error)
    assert error.args == ("dispatch: rows", 1, 3, "nothing came", 2.5)
    assert errors.TransportError(where="combine", rank=0, peer=None, detail="closed").args == (
        "combine",
        0,
        None,
        "closed",
    )
    assert str(errors.TransportError("combine", 0, None, "closed")) == "combine: rank 0: closed"
    assert str(errors.TransportError("combine", 0, 3, "closed")) == "combine: rank 0 lost rank 3: closed"


@pytest.mark.parametrize(
    ("variable", "text"),
    [(env.ENGINE, "gpu"), (env.TIMEOUT_S, "soon"), (env.TIMEOUT_S, "-1"), (env.NUM_RANKS_PER_DOMAIN, "0")],
)
def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch, variable: env.Variable[object], text: str) -> None:
    monkeypatch.setenv(variable.name, text)
    with pytest.raises(ConfigError, match=re.escape(f"{variable.name}={text!r} is not allowed; it takes")):
        variable.get()


def test_variables_have_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
        assert variable.get() == variable.default
    monkeypatch.setenv("HYBRID_EP_TIMEOUT_S", "2.5")
    assert env.TIMEOUT_S.get() == 2.5


def test_nobody_else_reads_the_environment() -> None:
    readers = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if re.search(r"os\.environ(\.get|\[)|getenv\(", path.read_text())
    }
    assert readers <= {"env.py"}


def test_grid() -> None:
    grid = RankGrid(5, 8, 4)
    assert (grid.domain_idx, grid.domain_rank, grid.num_domains) == (1, 1, 2)
    assert list(grid.domain) == [4, 5, 6, 7]
    assert list(grid.peers) == [1, 5]
    with pytest.raises(TopologyError, match="num_ranks_per_domain is 3; allowed: a divisor of 8"):
        RankGrid(0, 8, 3)
    with pytest.raises(TopologyError, match="rank is 8"):
        RankGrid(8, 8, 8)


@given(st.integers(0, 5), st.integers(1, 40), st.integers(1, 7))
def test_records_come_back(num_rows: int, hidden: int, width: int) -> None:
    columns = [
        torch.randn(num_rows, hidden).to(torch.bfloat16),
        torch.randint(-9, 9, (num_rows, width), dtype=torch.int32),
        torch.rand(num_rows, 1),
    ]
    fmt = RecordFormat.of(columns)
    packed = fmt.pack(columns)
    assert packed.shape == (num_rows, fmt.num_bytes)
    for got, want in zip(fmt.unpack(packed), columns, strict=True):
        assert torch.equal(got, want)


def test_config() -> None:
    assert Config(24).num_sms == 24
    for bad in (0, -4, 1.5, True):
        with pytest.raises(ConfigError, match="num_sms is"):
            Config(bad)  # type: ignore[arg-type]
    for link, sizes in (("nvl", (256, 6)), ("nvl", (6, 6)), ("rdma", (6, 256, 128, 128)), ("rdma", (6, 256, 16, 6))):
        name, (send, recv) = f"num_max_{link}_chunked_recv_tokens", sizes[-2:]
        with pytest.raises(ConfigError, match=f"{name} is {recv}; allowed: more than .*_send_tokens = {send}"):
            Config(20, *sizes)
    Config(20, 1, 2, 16, 17)  # the peer's too: it rounds the last one up
    with pytest.raises(ConfigError, match="num_ranks is 0"):
        Config().get_nvl_buffer_size_hint(128, 0)


def test_events_without_a_gpu_do_nothing_and_run_the_block() -> None:
    ran = []
    with EventOverlap(hybrid_ep.EventHandle(), (torch.zeros(1),)):
        ran.append(1)
    EventOverlap().current_stream_wait()
    assert ran == [1]


def test_engine_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_engine("torch").name == "torch"
    monkeypatch.setenv("HYBRID_EP_ENGINE", "torch")
    assert choose_engine().reason == "asked for by name"
    with pytest.raises(ConfigError, match="engine is 'gpu'; allowed: auto, torch or cuda"):
        choose_engine("gpu")
    if not torch.cuda.is_available():
        assert choose_engine("auto").name == "torch"
        with pytest.raises(ConfigError, match="engine is 'cuda', but"):
            choose_engine("cuda")


def test_the_package_imports_without_torch() -> None:
    """Commands that need no tensors must not pay for torch."""
    code = "import sys, hybrid_ep, hybrid_ep.env, hybrid_ep.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_nn_and_quantize_are_reachable_without_an_import() -> None:
    script = "import hybrid_ep; hybrid_ep.nn.MoELayer, hybrid_ep.quantize.cast_to_fp8"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_hook_runs_once_after_the_wait_and_gives_the_result() -> None:
    event = EventOverlap(hybrid_ep.EventHandle(), (torch.zeros(1),))
    event.register_hook_after_wait(lambda: "epilogue")
    with pytest.raises(ConfigError, match="a hook is registered already"):
        event.register_hook_after_wait(lambda: None)
    assert event.wait() == "epilogue"
    assert event.wait() is None
    with event():
        pass
    assert event.event is not None
    with event(release_handle=True):
        assert event.event is not None
    assert event.event is None
    assert event.extra_tensors is None


@pytest.mark.parametrize("given", [{"event": "x"}, {"extra_tensors": [torch.zeros(1)]}])
def test_an_event_of_another_kind_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"allowed: .* or None"):
        EventOverlap(**given)  # type: ignore[arg-type]
