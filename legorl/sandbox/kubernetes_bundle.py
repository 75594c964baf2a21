"""The guard's program, as bytes to send into a pod: its modules, in a zip archive that Python imports.

It goes with the first connection, so that a pod needs no image of ours, and provider and guard are never of
different versions. Byte code lies beside the sources; a guard with another Python takes those.
"""

from __future__ import annotations

import ast
import functools
import io
import py_compile
import tempfile
import zipfile
from pathlib import Path

import legorl

_START = """
import os, sys
data = b''
while len(data) < int(sys.argv[1]):
    piece = os.read(0, int(sys.argv[1]) - len(data))
    if not piece:
        sys.exit()
    data += piece
with open('/run/legorl/guard.zip', 'wb') as stream:
    stream.write(data)
sys.path.insert(0, '/run/legorl/guard.zip')
from legorl.sandbox.pod_guard import main
main()
"""


@functools.cache
def bundle() -> bytes:
    """The archive."""
    root = Path(legorl.__file__).parents[1]
    out = io.BytesIO()
    never = py_compile.PycInvalidationMode.UNCHECKED_HASH
    with (
        zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive,
        tempfile.NamedTemporaryFile(suffix=".pyc") as code,
    ):
        for source in _needed(root, root / "legorl" / "sandbox" / "pod_guard.py"):
            name = str(source.relative_to(root))
            py_compile.compile(str(source), code.name, name, doraise=True, invalidation_mode=never)
            archive.writestr(name, source.read_bytes())
            archive.writestr(f"{name}c", Path(code.name).read_bytes())
    return out.getvalue()


def _needed(root: Path, first: Path) -> list[Path]:
    """Files of this project that a module imports when it is imported, and the packages they are in."""
    needed, waiting = {root / "legorl" / "__init__.py"}, [first]
    while waiting:
        source = waiting.pop()
        if source in needed or not source.is_file():
            continue
        needed |= {source, source.parent / "__init__.py"}
        for statement in ast.parse(source.read_text()).body:
            if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("legorl"):
                place = root.joinpath(*str(statement.module).split("."))
                waiting += [place.with_suffix(".py"), *(place / f"{a.name}.py" for a in statement.names)]
    return sorted(needed)


def guard_command() -> list[str]:
    """Reads exactly the archive from its standard input, and runs it."""
    return ["python3", "-I", "-S", "-c", _START, str(len(bundle()))]


def hold_command(orphan_s: float) -> list[str]:
    """Main program of the guard's container."""
    program = (Path(__file__).parent / "pod_hold.py").read_text()
    return ["python3", "-I", "-S", "-c", program, str(orphan_s)]
