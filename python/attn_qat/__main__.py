"""Command line: `python -m attn_qat demo` and `python -m attn_qat info`."""

from __future__ import annotations

import argparse
import json

from . import build_info
from .demo import cli as demo


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="attn_qat", description="NVFP4 attention for PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    demo.add_parser(commands).set_defaults(run=demo.run)
    info = commands.add_parser("info", help="what this build holds, as JSON")
    info.set_defaults(run=lambda _: print(json.dumps(build_info(), indent=2)))
    options = parser.parse_args(arguments)
    return options.run(options) or 0


if __name__ == "__main__":
    raise SystemExit(main())
