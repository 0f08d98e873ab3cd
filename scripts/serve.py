"""Serve requests with a small engine around the library: continuous batching, a prefix cache, CUDA graphs.

python scripts/serve.py --samples 8x8 --prompt 4096 --compare
python scripts/serve.py --tools 64 --compare
python scripts/serve.py --trace conversation --requests 64 --max-prompt 4096 --compare
python scripts/serve.py --suite --json PATH         all of these, for the record: needs a GPU
python scripts/serve.py --write                     put the table of the committed record into docs/serving.md
python scripts/serve.py --check                     fail when docs/serving.md shows another
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pydantic
import torch
from rich.console import Console

from flashinfer_cascade import CascadeError
from flashinfer_cascade.bench.records import put_table
from flashinfer_cascade.engine.cases import SUITE, ServeOptions
from flashinfer_cascade.engine.serve import agrees, serve
from flashinfer_cascade.engine.show import markdown

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "records" / "h200_serve.json"
DOCUMENT = ROOT / "docs" / "serving.md"

COMPILE = """
import torch
from flashinfer_cascade import UnsupportedError
from flashinfer_cascade.engine.config import EngineConfig
from flashinfer_cascade.engine.model import LLAMA_8B
from flashinfer_cascade.runtime.launch import compile_backend
try:
    compile_backend(LLAMA_8B.cascade_config(EngineConfig(num_pages=1)), {backend!r}, torch.device("cuda", 0))
except UnsupportedError as error:
    print({backend!r}, "is not for this GPU:", error)
"""


def compile_side_by_side():
    """FlashInfer compiles a module at its first use, 20 to 90 s each: here all at once, each in its own process."""
    backends = ("fa2", "decode", "fa3")
    started = [subprocess.Popen([sys.executable, "-c", COMPILE.format(backend=backend)]) for backend in backends]
    for backend, process in zip(backends, started, strict=True):
        if process.wait():
            print(
                f"{backend}: compiling failed with status {process.returncode}; serving will say why", file=sys.stderr
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, field in ServeOptions.model_fields.items():
        flag = "--" + name.replace("_", "-")
        if field.annotation is bool:
            parser.add_argument(flag, action="store_true", default=None, help=field.description)
        else:
            kind = int if "int" in str(field.annotation) else str
            parser.add_argument(flag, type=kind, help=f"{field.description} [{field.default}]")
    parser.add_argument("--suite", action="store_true", help="samples, tools and conversation, flat against cascade")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--commit", help="of the code that is measured; git's HEAD by default")
    parser.add_argument("--write", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--check", action="store_true", help=argparse.SUPPRESS)
    arguments = vars(parser.parse_args())
    suite, path, commit, write, check = (arguments.pop(name) for name in ("suite", "json", "commit", "write", "check"))
    if write or check:
        put_table(DOCUMENT, "scripts/serve.py", markdown(json.loads(RECORD.read_text())), write=write)
        return
    given = {name: value for name, value in arguments.items() if value is not None}
    if suite:
        if not torch.cuda.is_available():
            parser.error("--suite needs a GPU: flashinfer-cascade demo --serve is the same in small")
        given = {"compare": True, "repeats": 5} | given
        compile_side_by_side()
    try:
        record = serve(ServeOptions(**given), SUITE if suite else {}, Console(), commit)
    except (CascadeError, pydantic.ValidationError, OSError) as error:
        parser.error(str(error))
    if path is not None:
        path.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(not agrees(record))


if __name__ == "__main__":
    main()
