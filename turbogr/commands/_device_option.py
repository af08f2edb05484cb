"""The option `--device`, which all commands share that compute with a trained model."""

from __future__ import annotations

import argparse


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """Add `--device` to a command."""
    parser.add_argument(
        "--device",
        default="auto",
        metavar="NAME",
        help="where to compute: cpu, cuda, cuda:1, npu, mps, or auto, the accelerator if there is one (default: auto)",
    )
