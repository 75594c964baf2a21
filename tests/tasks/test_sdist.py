"""Unpacking of source distributions and the licence gate."""

import io
import tarfile
from pathlib import Path

import pytest

from legorl.errors import UserError
from legorl.tasks.real import PACKAGES
from legorl.tasks.sdist import Package, check_licence, unpack

PACKAGE = Package(
    "thing", "1.0", "", "train", {"src/thing/": "thing/", "test/": "tests/"}, ("tests/test_slow.py",)
)


def archive(path: Path, files: dict[str, str]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(f"thing-1.0/{name}")
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return path


def test_layout_keeps_code_tests_and_licence_only(tmp_path: Path) -> None:
    files = {
        "PKG-INFO": "License: MIT\n",
        "LICENSE": "Permission is hereby granted",
        "setup.py": "raise SystemExit",
        "src/thing/__init__.py": "x = 1",
        "src/thing/data.bin": "?",
        "src/other/__init__.py": "",
        "test/test_thing.py": "import thing",
        "test/test_slow.py": "",
        "test/../../escape.py": "",
    }
    assert unpack(PACKAGE, archive(tmp_path / "a.tar.gz", files)) == {
        "LICENSE": "Permission is hereby granted",
        "thing/__init__.py": "x = 1",
        "tests/test_thing.py": "import thing",
        "tests/__init__.py": "",
    }


@pytest.mark.parametrize(
    "metadata",
    [
        "License-Expression: MIT\n",
        "License: BSD 3-Clause OR Apache-2.0\n",
        "License: UNKNOWN\nClassifier: License :: OSI Approved :: ISC License (ISCL)\n",
    ],
)
def test_permissive_licences_pass(metadata: str) -> None:
    check_licence(PACKAGE, metadata)


@pytest.mark.parametrize(
    "metadata",
    [
        "",
        "License: LGPL-3.0\n",
        "License-Expression: MIT AND GPL-2.0-only\n",
        "License: MITIGATED\n",
        "License: MPL-2.0\n",
    ],
)
def test_other_licences_are_refused_by_name(metadata: str) -> None:
    with pytest.raises(UserError, match=r"thing==1\.0 states the licence"):
        check_licence(PACKAGE, metadata)


def test_splits_of_the_pool_are_made_of_different_packages() -> None:
    names = [package.name for package in PACKAGES]
    assert len(set(names)) == len(names)
    assert {package.split for package in PACKAGES} == {"train", "heldout"}
