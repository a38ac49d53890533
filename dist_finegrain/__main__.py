"""Command line, e.g. ``python -m dist_finegrain plan --model pkg.mod:build --recipe pkg.mod:f``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from .planning import load_object, plan
from .recipe import EXECUTIONS, CustomRecipe


def main(argv: list[str] | None = None) -> int:
    """Run the command line; 0, 1 when the plan has rejected GEMMs, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m dist_finegrain", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("plan", help="print what a recipe does to a model, GEMM by GEMM")
    command.add_argument("--model", required=True, help="pkg.mod:function that builds the model")
    command.add_argument("--recipe", required=True, help="pkg.mod:factory, or a CustomRecipe")
    command.add_argument("--device", default="cpu", help="cpu, sm_90, sm_100 or a torch device")
    command.add_argument("--execution", choices=EXECUTIONS, help="default: environment, or native")
    command.add_argument("--tokens", type=int, default=4096, help="rows of each module's input")
    command.add_argument("--forward-only", action="store_true", help="leave dgrad and wgrad out")
    command.add_argument("--json", action="store_true", help="one JSON object per GEMM")
    arguments = parser.parse_args(argv)
    try:
        model = load_object(arguments.model, "--model")()
        recipe = load_object(arguments.recipe, "--recipe")
        if not isinstance(recipe, CustomRecipe):
            recipe = CustomRecipe(qfactory=recipe, execution=arguments.execution)
        elif arguments.execution is not None:
            recipe = dataclasses.replace(recipe, execution=arguments.execution)
        result = plan(
            model,
            recipe,
            device=arguments.device,
            training=not arguments.forward_only,
            tokens=arguments.tokens,
        )
    except (TypeError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    if arguments.json:
        print("\n".join(json.dumps(dataclasses.asdict(row)) for row in result.rows))
    else:
        print(result)
    return 0 if result.ok else 1


if __name__ == "__main__":
    sys.exit(main())
