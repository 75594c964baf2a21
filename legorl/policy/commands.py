"""The four commands of the `repair` habit, as the scripted expert writes and reads them."""

from __future__ import annotations

import re
from dataclasses import dataclass

CLASS = "[-+*/%<>=!]+"
EDIT_START = "sed -i -E '"
PATTERN = f"s@ {CLASS} @ "
EDIT_END = " @' "
TEST = "python check.py"
AND_TEST = f" && {TEST}"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

_EDIT = re.compile(
    re.escape(EDIT_START)
    + r"(\d+)"
    + re.escape(PATTERN)
    + "("
    + CLASS
    + ")"
    + re.escape(EDIT_END)
    + r"(\S+)(.*)"
)


@dataclass(frozen=True)
class Edit:
    """Put `operator` in the place of the operator on `line` of `path`, and run the tests or not."""

    path: str
    line: int
    operator: str
    test: bool

    def command(self) -> str:
        """Shell command."""
        edit = f"{EDIT_START}{self.line}{PATTERN}{self.operator}{EDIT_END}{self.path}"
        return edit + AND_TEST if self.test else edit


def read_edit(command: str) -> Edit | None:
    """The edit a command makes; None when it is not one of ours."""
    match = _EDIT.fullmatch(command.strip())
    if match is None or match[4] not in ("", AND_TEST):
        return None
    return Edit(match[3], int(match[1]), match[2], match[4] == AND_TEST)
