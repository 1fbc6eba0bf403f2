"""List the files and functions that are longer than this house likes (STYLE.md). It informs; it does not fail."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("plugin", "trainer_callbacks", "examples", "benchmarks", "tests", ".ci")
MOST_LINES_OF_FILE = 500
MOST_LINES_OF_FUNCTION = 60


def main() -> None:
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    long_files, long_functions = [], []
    for path in files:
        source = path.read_text()
        name, lines = str(path.relative_to(ROOT)), source.count("\n")
        if lines > MOST_LINES_OF_FILE:
            long_files.append(f"  {lines:5}  {name}")
        for node in ast.walk(ast.parse(source, name)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MOST_LINES_OF_FUNCTION:
                    long_functions.append(f"  {length:5}  {name}:{node.lineno} {node.name}")
    print(f"Sizes: {len(files)} files.")
    print("\n".join([f"Files over {MOST_LINES_OF_FILE} lines: {len(long_files)}", *long_files]))
    print("\n".join([f"Functions over {MOST_LINES_OF_FUNCTION} lines: {len(long_functions)}", *long_functions]))


if __name__ == "__main__":
    main()
