"""The process of one release: loads it, then does one piece of work per request. Started by ``releases.py``."""

import contextlib
import importlib
import importlib.util
import sys
from multiprocessing.connection import Connection
from pathlib import Path


def _load(folder: Path) -> None:
    """Import the package ``dflash``, and nothing else, from ``folder``."""
    path = folder / "dflash" / "__init__.py"
    spec = importlib.util.spec_from_file_location("dflash", path, submodule_search_locations=[str(path.parent)])
    package = sys.modules["dflash"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)


def _serve(connection: Connection) -> None:
    """Answer requests until the other end closes."""
    module, arguments = connection.recv()
    works = importlib.import_module(module).works(arguments)
    connection.send((True, list(works)))
    pieces: list = []
    with contextlib.suppress(EOFError):
        while True:
            request, argument = connection.recv()
            try:
                if request == "prepare":
                    pieces = []  # frees what the work before held
                    pieces = works[argument]()
                    answer: object = len(pieces)
                else:
                    answer = tuple(pieces[argument]())
            except Exception as error:
                connection.send((False, f"{type(error).__name__}: {error}".splitlines()[0]))
            else:
                connection.send((True, answer))


if __name__ == "__main__":
    if sys.argv[2]:
        _load(Path(sys.argv[2]))
    _serve(Connection(int(sys.argv[1])))
