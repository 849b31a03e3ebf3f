"""The `hybrid-ep` command: a list of subcommands, each imported only when it is called.

Exit codes of every subcommand: 0 = good, 1 = a confirmed fault or failed check, 2 = unknown, or wrong usage,
130 = interrupted by Ctrl-C.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import logging
import os
import sys
from typing import NoReturn

import click

from hybrid_ep import env
from hybrid_ep._version import __version__
from hybrid_ep.errors import ConfigError, HybridEPError
from hybrid_ep.packages import explain

# Subcommand → (module, attribute, one line of help). The help stands here so that listing the commands imports none.
COMMANDS = {
    "demo": ("hybrid_ep.demo.command", "demo", "Run dispatch → experts → combine on a virtual cluster, and check it."),
    "bench": (
        "hybrid_ep.bench.command",
        "bench",
        "Check dispatch and combine, then time them.",
    ),
    "model": ("hybrid_ep.cluster.model.command", "model", "Predict time, bytes and memory of dispatch and combine."),
    "balance": ("hybrid_ep.balance.command", "balance", "Compare placements of experts on a trace of their loads."),
    "doctor": (
        "hybrid_ep.cluster.doctor.command",
        "doctor",
        "Check this node: driver, GPUs, NVLink, NICs, GPUDirect, host limits.",
    ),
    "topology": (
        "hybrid_ep.cluster.doctor.command",
        "topology",
        "Print or draw how GPUs, NICs and NVLink are connected.",
    ),
    "preflight": (
        "hybrid_ep.cluster.preflight",
        "preflight",
        "Check the hosts of a job with MoE traffic before it starts.",
    ),
    "k8s": (
        "hybrid_ep.cluster.kubernetes.command",
        "k8s",
        "Check Kubernetes manifests; write the doctor's findings to the node.",
    ),
    "validation": (
        "hybrid_ep.cluster.validation.command",
        "validation",
        "Plan the test jobs of a cluster, and write its report.",
    ),
    "info": ("hybrid_ep.info", "info", "Show versions, built modules, and the chosen engine."),
    "env": ("hybrid_ep.info", "env_table", "Show every environment variable, its value and effect."),
}


# What to do first, below the list of commands.
FIRST_STEPS = (
    ("hybrid-ep info", "which modules are built, and which engine is chosen"),
    ("hybrid-ep demo", "runs and checks dispatch and combine; needs no GPU"),
    ("hybrid-ep doctor", "checks the GPUs, network and limits of this node"),
    ("hybrid-ep bench", "times dispatch and combine on this machine"),
)


_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def _require_written(ctx: click.Context) -> None:
    """Ends with 2 where standard output does not take what is left to write."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        _tell_unwritten(ctx, error)


def _tell_unwritten(ctx: click.Context, error: OSError) -> NoReturn:
    # The interpreter would try once more when it ends, and end with 120.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    click.echo(f"hybrid-ep: standard output cannot be written: {error.strerror}", err=True)
    ctx.exit(2)


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[name]
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and (near := difflib.get_close_matches(name, COMMANDS)):
            ctx.fail(f"No such command {name!r}. Did you mean {' or '.join(near)}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])
        with formatter.section("First steps"):
            formatter.write_dl(list(FIRST_STEPS))

    def invoke(self, ctx: click.Context) -> object:
        if sys.stdout is None:  # closed by the caller, as by `>&-`: a command that writes must fail, with that reason
            sys.stdout = open(os.devnull, opener=lambda path, _: os.open(path, os.O_RDONLY), mode="w")  # noqa: SIM115
        try:
            result = self._invoke(ctx)
        except OSError as error:
            if error.errno not in _UNWRITABLE or error.filename is not None:
                raise
            _tell_unwritten(ctx, error)
        except click.exceptions.Exit:
            _require_written(ctx)
            raise
        _require_written(ctx)
        return result

    def _invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except HybridEPError as error:
            click.echo(f"hybrid-ep: {type(error).__name__}: {error}", err=True)
            ctx.exit(2 if isinstance(error, ConfigError) else 1)
        except ModuleNotFoundError as error:
            if (text := explain(error)) is None:
                raise
            click.echo(f"hybrid-ep: {text}", err=True)
            ctx.exit(2)
        except KeyboardInterrupt:
            click.echo("hybrid-ep: interrupted", err=True)
            ctx.exit(130)


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hybrid-ep")
def main() -> None:
    """Dispatch and combine for Mixture-of-Experts models: run them, time them, check the machines."""
    logging.basicConfig(level=env.LOG_LEVEL.get(), format="%(levelname)s %(name)s: %(message)s")
